"""The recipes that a recipe depends on (its references), changed where `--set` must reach them, and their versions.

Settings of the data source and of the machine apply to all; settings of the encoder also to the independent version of
a method that trains no encoder. Everything else is set with the reference's name:
`old.epochs=5`, `independent.seed=3`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from index.errors import InvalidArgument
from index.version import CARD
from index.version_folder.folder import load_given_version
from training.methods import method_options
from training.overrides import with_overrides
from training.recipes import RECIPES, Recipe, find_recipe, recipe_from_json

RUNS = Path("runs")
"""Folder of the versions that recipes train against by naming another recipe."""
FIELDS = ("old", "independent")
EVERYWHERE = ("data", "root", "unreadable", "precision", "workers", "threads")
ENCODER = ("backbone", "pretrained", "weights", "dim", "last_relu", "preprocess", "space")
NO_ENCODER_METHOD = "fct"
"""The method that trains no encoder: its version has that of the independent version."""

References = Mapping[str, Recipe]
"""Those of FIELDS that name a recipe -> the recipe to train for it."""


def with_settings(recipe: Recipe, settings: Sequence[str], base: Recipe | None = None) -> tuple[Recipe, References]:
    """Apply settings to a recipe and to what it depends on.

    Args:
        recipe: what to change.
        settings: `field=value` as `training.overrides` takes them, and `old.field=value`, `independent.field=value`.
        base: the recipe that this one was derived from, if not `RECIPES[recipe.name]`.

    Returns:
        The changed recipe, and the recipes to train for its references.

    Raises:
        InvalidArgument: as `with_overrides`, or a reference is set that names no recipe.
    """
    others = reference_settings(settings)
    changed = with_overrides(recipe, [text for text in settings if text not in others])
    references = {}
    for field in FIELDS:
        theirs = [text.partition(".")[2] for text in others if text.startswith(f"{field}.")]
        name: str = getattr(changed, field)
        if name in RECIPES:
            references[field] = with_overrides(reference_recipe(changed, field, base), theirs)
        elif theirs:
            raise InvalidArgument(
                f"{field}.{theirs[0]} changes a recipe, but {field}={name or '(none)'} is not one", pointer=f"/{field}"
            )
    return changed, references


def reference_settings(settings: Sequence[str]) -> list[str]:
    """The settings that change a reference, not the recipe itself."""
    return [text for text in settings if text.startswith(tuple(f"{field}." for field in FIELDS))]


def reference_recipe(recipe: Recipe, field: str, base: Recipe | None = None) -> Recipe:
    """The recipe that `old` or `independent` names, changed to go with this one.

    Args:
        recipe: the one that depends on it.
        field: which of FIELDS.
        base: the recipe before anything was changed; None: that of its name, if there is one.
    """
    wanted = find_recipe(getattr(recipe, field))
    if base is None:
        base = RECIPES[recipe.name]() if recipe.name in RECIPES else recipe
    encoder = ENCODER if field == "independent" and recipe.method == NO_ENCODER_METHOD else ()
    same = (*EVERYWHERE, *encoder)
    changes = {name: getattr(recipe, name) for name in same if getattr(recipe, name) != getattr(base, name)}
    wanted = replace(wanted, **changes)
    return replace(wanted, root=recipe.root) if wanted.data == recipe.data else wanted


def reference_recipes(recipe: Recipe) -> References:
    """Field -> the recipe that it names, changed by `reference_recipe` to go with this one."""
    return {field: reference_recipe(recipe, field) for field in FIELDS if getattr(recipe, field) in RECIPES}


def folder_of(recipe: Recipe) -> Path:
    """The folder below `RUNS` of a recipe's version, where a recipe that names it looks for it."""
    return RUNS / recipe.name


def is_trained(field: str, recipe: Recipe) -> bool:
    """Whether the version of exactly this recipe is below `RUNS`.

    Raises:
        InvalidArgument: its folder was trained with other settings; names these, and the ways out.
    """
    out = folder_of(recipe)
    if not (out / CARD).is_file():
        return False
    if changed := ", ".join(differences(recipe, recipe_from_json(load_given_version(out).card.recipe))):
        raise InvalidArgument(
            f"{out} exists but was trained without {changed}: {field}={out} uses it unchanged, "
            f"`regraft train {recipe.name} --overwrite` with these settings replaces it",
            pointer=f"/{field}",
        )
    return True


def differences(recipe: Recipe, other: Recipe) -> Iterator[str]:
    """`field=value`, as `--set` takes it, of each setting that decides the result and differs in the other recipe."""
    own, others = _result_settings(recipe), _result_settings(other)
    yield from (f"{name}={value}" for name, value in own.items() if name not in others or others[name] != value)


def _result_settings(recipe: Recipe) -> dict[str, Any]:
    """Fields, options and parts of `preprocess` by name; without `workers`, on which batches do not depend."""
    fields = {name: value for name, value in vars(recipe).items() if name not in {"summary", "workers"}}
    options = {**method_options(recipe.method), **fields.pop("options")}
    preprocess = {f"preprocess.{part}": value for part, value in fields.pop("preprocess").as_json().items()}
    return {**fields, **options, **preprocess}
