from dataclasses import replace

import pytest
import torch

from index.version import Preprocess
from training.data.transforms import AUGMENTATIONS
from training.method import OldSummary
from training.methods import METHODS, method_options
from training.methods.compatible import Compatible
from training.networks.backbones import build_backbone
from training.networks.side_information import dim_of as side_dim_of
from training.networks.side_information import recipe_of_psi
from training.recipes import FAMILIES, RECIPES, Recipe
from training.recipes.family import METHOD_PARTS, Family
from training.sources import SOURCES
from training.trained import build_method

CLASSES = 3
V1 = Recipe("v1", preprocess=Preprocess(28, 28), classes=5, dim=8, options={}, epochs=7)
NEW = replace(V1, classes=None, dim=6, seed=1)


def dim_of(recipe: Recipe) -> int:
    """What the version of a recipe stores: OCA's and BT2's are no one's old version here."""
    assert recipe.method in {"independent", "hbct"}
    return recipe.dim


def old_of(recipe: Recipe) -> OldSummary | None:
    if not recipe.old:
        return None
    committed = {"examples/v1": "digits_v1", "examples/photos-v1": "photos_v1"}
    old = RECIPES[committed.get(recipe.old, recipe.old)]()
    assert old.preprocess == recipe.preprocess
    shape = torch.ones(CLASSES, dim_of(old))
    rows = torch.tensor([0, 1, -1])
    return OldSummary(shape, rows, shape[:2], torch.zeros(2), old.space, shape, torch.ones(CLASSES), side_dim_of(old))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_what_there_is_and_its_method_can_be_built(name: str) -> None:
    recipe = RECIPES[name]()
    method = build_method(recipe, CLASSES, old_of(recipe))

    assert recipe.data in SOURCES
    assert recipe.augment in AUGMENTATIONS
    assert method.trains_encoder or recipe.augment == "none"
    if recipe.independent:
        independent = RECIPES[recipe.independent]()
        assert independent.preprocess == recipe.preprocess
        assert method.trains_encoder or independent.dim == recipe.dim


@pytest.mark.parametrize(
    ("backbone", "channels"),
    sorted({(recipe.backbone, recipe.preprocess.channels) for recipe in (make() for make in RECIPES.values())}),
)
def test_the_backbone_of_every_recipe_can_be_built(backbone: str, channels: int) -> None:
    with torch.device("meta"):
        made = build_backbone(backbone, channels, 7)

    assert made.embed.out_features == 7


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_has_a_recipe_for_every_method(family: Family) -> None:
    recipes = [make() for make in family.recipes().values()]

    assert {recipe.method for recipe in recipes} == set(METHODS)
    assert all(RECIPES[recipe.name]() == recipe for recipe in recipes)
    assert set(family.tuned) <= set(Family.parts())


@pytest.mark.parametrize("name", [name for name, make in RECIPES.items() if make().method == "l2"])
def test_a_summary_of_l2_speaks_of_old_classes_only_where_it_holds_no_others(name: str) -> None:
    recipe = RECIPES[name]()
    over = {**method_options("l2"), **recipe.options}["over"]

    assert ("old classes" in recipe.summary) == (over == "old")


def test_a_family_changes_only_what_a_method_needs() -> None:
    made = {name: make() for name, make in Family("toy", "toys", V1, NEW).recipes().items()}

    assert made["toy_v1"] == replace(V1, name="toy_v1", summary="toys: the old version")
    assert made["toy_l2"] == replace(
        NEW, name="toy_l2", summary=f"toys: {METHOD_PARTS['l2']}", method="l2", old="toy_v1", options={}
    )
    assert (made["toy_oca"].dim, made["toy_bt2"].dim) == (8 + 32, 6 + 8)
    assert (made["toy_bt2"].independent, made["toy_fct"].independent) == ("toy_independent", "toy_independent")
    assert (made["toy_fct"].old, made["toy_side_v1"].side, made["toy_v1"].side) == ("toy_side_v1", "simclr", "none")
    assert (made["toy_hbct"].old, made["toy_hbct"].space) == ("toy_hyperbolic_v1", "lorentz")
    zeta = [made[f"toy_{part}"].options["zeta"] for part in ("hyperbolic_v1", "hyperbolic_independent", "hbct")]
    assert zeta == [1.0, 1.2, 1.2]


@pytest.mark.parametrize("part", ["contrast", "hot_refresh", "hoc", "advbct"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.independent.optimiser == "sgd"])
def test_under_sgd_what_is_sharp_weighs_no_more_than_the_base_loss(name: str, part: str) -> None:
    recipe = FAMILIES[name].recipe(part)

    method = build_method(recipe, CLASSES, old_of(recipe))
    assert isinstance(method, Compatible)
    assert 0 < method.weight <= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_simclr_sees_parts_of_photos_in_other_colours_and_handwriting_as_the_encoder_does(name: str) -> None:
    own = recipe_of_psi(FAMILIES[name].recipe("side_v1"))

    assert own.augment.endswith("jitter" if own.preprocess.mode == "RGB" else "shift")
    encoders = AUGMENTATIONS[FAMILIES[name].old.augment]
    assert (AUGMENTATIONS[own.augment].size is None) == (encoders.size is None)


def test_what_is_tuned_changes_fields_and_adds_options() -> None:
    family = Family("toy", "toys", V1, NEW, {"bt2": {"epochs": 9, "options": {"scale": 1.0}}})

    assert family.recipe("bt2").epochs == 9
    assert family.recipe("bt2").options == {"extra": 32, "scale": 1.0}
    assert family.recipe("oca").epochs == 7
