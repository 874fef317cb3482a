import json
import re
from collections.abc import Iterable
from dataclasses import fields, replace

import pytest

from index.errors import InvalidArgument
from training.data.transforms import AUGMENTATIONS
from training.methods import METHODS, method_options
from training.networks.backbones import BACKBONES
from training.networks.heads import HEADS
from training.networks.side_information import KINDS
from training.overrides import with_overrides
from training.recipes import (
    GROUPS,
    OWN_IMAGES,
    RECIPES,
    Recipe,
    field_descriptions,
    find_recipe,
    recipe_from_json,
)
from training.sources import SOURCES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_its_own_name_and_purpose_and_sets_only_options_of_its_method(name: str) -> None:
    recipe = RECIPES[name]()

    assert recipe.name == name
    assert 10 < len(recipe.summary) < 110
    assert set(recipe.options) <= set(method_options(recipe.method))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_its_card(name: str) -> None:
    recipe = RECIPES[name]()

    assert recipe_from_json(json.loads(json.dumps(recipe.as_json()))) == replace(recipe, summary="")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digit_bct", "'digit_bct' is unknown; did you mean digits_bct"),
        ("digits", "'digits' is a family of recipes, such as digits_v1, .*`regraft recipes digits`"),
        ("zzz", "'zzz' is unknown; `regraft recipes` lists them"),
    ],
)
def test_an_unknown_recipe_names_the_ones_near_it(name: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        find_recipe(name)


def test_every_recipe_is_in_one_group_and_every_field_has_a_meaning() -> None:
    assert sorted(RECIPES) == sorted(name for group in GROUPS.values() for name in group.recipes)
    assert OWN_IMAGES in GROUPS
    assert list(field_descriptions()) == [field.name for field in fields(Recipe)]


@pytest.mark.parametrize(
    ("field", "legal"),
    [
        ("method", METHODS),
        ("data", SOURCES),
        ("augment", AUGMENTATIONS),
        ("backbone", BACKBONES),
        ("head", HEADS),
        ("side", ["none", *KINDS]),
    ],
)
def test_the_meaning_of_a_field_names_every_legal_value(field: str, legal: Iterable[str]) -> None:
    assert set(legal) <= set(re.findall(r"\w+", field_descriptions()[field]))


def test_a_setting_takes_the_type_of_its_field() -> None:
    recipe = with_overrides(
        find_recipe("photos_oca"), ["epochs=3", "rate=0.5", "pretrained=true", "classes=4", "old=here", "scale=7"]
    )

    assert (recipe.epochs, recipe.rate, recipe.pretrained, recipe.classes, recipe.old) == (3, 0.5, True, 4, "here")
    assert recipe.options["scale"] == 7.0
    assert recipe.options["influence_weight"] == find_recipe("photos_oca").options["influence_weight"]
    assert with_overrides(recipe, ["classes=none"]).classes is None


@pytest.mark.parametrize("settings", [["weight=5", "method=l2"], ["method=l2", "weight=5"]])
def test_an_option_is_that_of_the_method_that_is_set_wherever_it_stands(settings: list[str]) -> None:
    assert with_overrides(find_recipe("folders_bct"), settings).options == {"weight": 5.0}
    with pytest.raises(InvalidArgument, match="no field 'influence'"):
        with_overrides(find_recipe("folders_bct"), ["influence=distill", *settings])


@pytest.mark.parametrize(
    ("name", "settings", "warmup"),
    [
        ("folders_v1", ["epochs=1"], 0),
        ("folders_fct", ["epochs=4"], 0),  # 5 of 80
        ("cifar100_resnet50_v1", ["epochs=4"], 0),  # 5 of 100
        ("folders_v1", ["warmup_epochs=20", "epochs=15"], 20),
        ("folders_v1", ["epochs=2"], 2),
        ("folders_v1", ["seed=3"], 2),
    ],
)
def test_a_warm_up_that_epochs_alone_would_make_too_long_keeps_its_share(
    name: str, settings: list[str], warmup: int
) -> None:
    assert with_overrides(find_recipe(name), settings).warmup_epochs == warmup


@pytest.mark.parametrize("setting", ["learning_rate=1", "preprocess=8", "name=mine", "margin=1"])
def test_an_unknown_field_lists_the_legal_ones_and_the_options_of_the_method(setting: str) -> None:
    with pytest.raises(InvalidArgument, match=f"no field '{setting.partition('=')[0]}'; legal: .*influence.*rate"):
        with_overrides(find_recipe("digits_bct"), [setting])


@pytest.mark.parametrize(
    ("setting", "taken"),
    [("epochs=2.5", "a whole number"), ("rate=fast", "a number"), ("pretrained=1", "true or false")],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(setting: str, taken: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{setting.partition('=')[0]} must be {taken}, not "):
        with_overrides(find_recipe("digits_v1"), [setting])


def test_a_setting_needs_an_equals_sign() -> None:
    with pytest.raises(InvalidArgument, match="FIELD=VALUE, not 'epochs'"):
        with_overrides(find_recipe("digits_v1"), ["epochs"])


def test_another_method_starts_from_its_own_options() -> None:
    recipe = with_overrides(find_recipe("digits_bct"), ["method=oca", "alignment_weight=2"])

    assert recipe.options == {"alignment_weight": 2.0}


def test_an_unknown_method_lists_the_legal_ones() -> None:
    with pytest.raises(InvalidArgument, match="'magic' is unknown; legal: independent"):
        with_overrides(find_recipe("digits_v1"), ["method=magic", "epochs=1"])


@pytest.mark.parametrize("value", [{}, {"name": "x"}, {"name": "x", "preprocess": {"height": 8}, "sorcery": 1}])
def test_a_card_of_another_package_is_no_recipe(value: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="not written by this release"):
        recipe_from_json(value)
