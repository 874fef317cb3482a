"""The recipes that a recipe depends on, changed where `--set` must reach them.

What is changed of where images come from and of how the machine computes holds for all; what decides the encoder holds
for the independent version of a method that trains none of its own. Everything else is set by the reference's name:
`old.epochs=5`, `independent.seed=3`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from index.errors import InvalidArgument
from training.methods import method_options
from training.overrides import with_overrides
from training.recipes import RECIPES, Recipe, find_recipe

FIELDS = ("old", "independent")
EVERYWHERE = ("data", "root", "unreadable", "precision", "workers", "threads")
ENCODER = ("backbone", "pretrained", "weights", "dim", "last_relu", "preprocess", "space")
NO_ENCODER_METHOD = "fct"
"""The method that trains no encoder: its version's is the independent one's."""

References = Mapping[str, Recipe]
"""Those of FIELDS that name a recipe -> what is trained for it."""


def with_settings(recipe: Recipe, settings: Sequence[str], base: Recipe | None = None) -> tuple[Recipe, References]:
    """Apply settings to a recipe and to what it depends on.

    Args:
        recipe: what to change.
        settings: `field=value` as `training.overrides` takes them, and `old.field=value`, `independent.field=value`.
        base: the recipe that this one was made of, if not of `RECIPES[recipe.name]`.

    Returns:
        The changed recipe, and what to train for the recipes that it names.

    Raises:
        InvalidArgument: as `with_overrides`, or a reference is set that names no recipe.
    """
    others = reference_settings(settings)
    changed = with_overrides(recipe, [text for text in settings if text not in others])
    made = {}
    for field in FIELDS:
        theirs = [text.partition(".")[2] for text in others if text.startswith(f"{field}.")]
        name: str = getattr(changed, field)
        if name in RECIPES:
            made[field] = with_overrides(reference_recipe(changed, field, base), theirs)
        elif theirs:
            raise InvalidArgument(
                f"{field}.{theirs[0]} changes a recipe, and {field}={name or '(none)'} names none", pointer=f"/{field}"
            )
    return changed, made


def reference_settings(settings: Sequence[str]) -> list[str]:
    """Those settings that are of a recipe which this one depends on."""
    return [text for text in settings if text.startswith(tuple(f"{field}." for field in FIELDS))]


def reference_recipe(recipe: Recipe, field: str, base: Recipe | None = None) -> Recipe:
    """The recipe that `old` or `independent` names, as it must be to go with this one.

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


def differences(recipe: Recipe, other: Recipe) -> Iterator[str]:
    """`field=value`, as `--set` takes it, of all that decides what a recipe gives and is otherwise in another one."""
    mine, others = _decides(recipe), _decides(other)
    yield from (f"{name}={value}" for name, value in mine.items() if name not in others or others[name] != value)


def _decides(recipe: Recipe) -> dict[str, Any]:
    """Fields, options and parts of `preprocess` by name; how many workers make the batches changes nothing of them."""
    fields = {name: value for name, value in vars(recipe).items() if name not in {"summary", "workers"}}
    options = {**method_options(recipe.method), **fields.pop("options")}
    preprocess = {f"preprocess.{part}": value for part, value in fields.pop("preprocess").as_json().items()}
    return {**fields, **options, **preprocess}
