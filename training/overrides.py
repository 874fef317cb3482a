"""How `--set field=value` changes a recipe: one of its fields, or an option of its method.

A recipe is data and knows no method; which options there are, `training.methods` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from index.errors import InvalidArgument
from training.methods import method_options
from training.recipes import Recipe


def with_overrides(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Apply `field=value` settings, to the recipe's fields or to its method's options.

    Raises:
        InvalidArgument: no '=', an unknown field (lists the legal ones), or a value of the wrong type.
    """
    for setting in settings:
        name, given, value = setting.partition("=")
        if not given:
            raise InvalidArgument(f"a setting is written field=value, not {setting!r}", pointer="/set")
        recipe = _override(recipe, name.strip(), value.strip())
    return recipe


def _override(recipe: Recipe, name: str, value: str) -> Recipe:
    options = method_options(recipe.method)
    fields = {f.name: f.type for f in dataclasses.fields(Recipe) if f.name not in {"name", "summary", "options"}}
    if name in options:
        return replace(recipe, options={**recipe.options, name: _convert(name, value, type(options[name]).__name__)})
    if name not in fields or name == "preprocess":
        legal = ", ".join(sorted([*(set(fields) - {"preprocess"}), *options]))
        raise InvalidArgument(f"recipe {recipe.name} has no field {name!r}; legal: {legal}", pointer=f"/set/{name}")
    # Options belong to the method they were set for.
    kept = {} if name == "method" else recipe.options
    return replace(recipe, **{"options": kept, name: _convert(name, value, str(fields[name]))})


_CONVERT: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "int | None": lambda text: None if text == "none" else int(text),
    "tuple[int, ...]": lambda text: tuple(int(number) for number in text.split(",") if number.strip()),
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
}


def _convert(name: str, value: str, kind: str) -> Any:
    try:
        return _CONVERT[kind](value)
    except (ValueError, KeyError):
        kind = "list of whole numbers" if kind.startswith("tuple") else kind
        raise InvalidArgument(f"{name} is a {kind}, which {value!r} is not", pointer=f"/set/{name}") from None
