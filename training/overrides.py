"""How `--set field=value` changes a recipe: a field, an option of its method, or `preprocess.PART`.

A recipe is data and knows no method; which options there are, `training.methods` says.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from index.errors import InvalidArgument, InvalidVersionFolder
from index.version import Preprocess
from index.version_folder.card import parse_preprocess
from training.methods import method_options
from training.recipes import Recipe


def with_overrides(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Apply `field=value` settings, to the recipe's fields or to its method's options.

    The order of different fields does not matter: `method`, whose options others may be, is set first. A warm-up longer
    than the `epochs` that are set keeps its share of the training, unless it is set as well.

    Raises:
        InvalidArgument: no '=', an unknown field (lists the legal ones), or a value of the wrong type.
    """
    preprocess: dict[str, Any] = {}
    before, names = recipe, set[str]()
    for setting in sorted(settings, key=lambda setting: setting.partition("=")[0].strip() != "method"):
        name, given, value = setting.partition("=")
        if not given:
            raise InvalidArgument(f"a setting must be FIELD=VALUE, not {setting!r}", pointer="/set")
        table, dot, part = name.strip().partition(".")
        if dot and table == "preprocess":
            preprocess[part] = _json(value.strip())
        else:
            recipe = _override(recipe, name.strip(), value.strip())
            names.add(name.strip())
    if "epochs" in names and "warmup_epochs" not in names and recipe.warmup_epochs > recipe.epochs:
        recipe = replace(recipe, warmup_epochs=before.scale_epoch(before.warmup_epochs, recipe.epochs))
    return with_preprocess(recipe, preprocess)


def with_preprocess(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Change parts of how images become the encoder's input, all at once: some must fit each other.

    A number for `mean` or `std` is that of the only channel.

    Raises:
        InvalidArgument: an unknown part, or a value out of range; names it.
    """
    if not changes:
        return recipe
    if unknown := unknown_parts(changes):
        legal = ", ".join(sorted(recipe.preprocess.as_json()))
        raise InvalidArgument(f"preprocess.{unknown[0]} is unknown; legal: {legal}", pointer="/preprocess")
    listed = {part: [x] if part in {"mean", "std"} and type(x) in {int, float} else x for part, x in changes.items()}
    try:
        return replace(recipe, preprocess=parse_preprocess({**recipe.preprocess.as_json(), **listed}))
    except InvalidVersionFolder as error:
        text = str(error).partition("preprocess/")[2] or str(error)
        raise InvalidArgument(f"preprocess.{text}", pointer="/preprocess") from error


def unknown_parts(names: Iterable[str]) -> list[str]:
    """Those of the names that no part of a recipe's `preprocess` has."""
    parts = {field.name for field in dataclasses.fields(Preprocess)}
    return [name for name in names if name not in parts]


def size_settings(recipe: Recipe, size: int) -> list[str]:
    """The settings by which the encoder reads squares of so many pixels, cut as the recipe cuts its own."""
    spec = recipe.preprocess
    settings = [f"preprocess.height={size}", f"preprocess.width={size}"]
    if spec.stretch:
        return settings
    shorter = spec.resize if isinstance(spec.resize, int) else min(spec.height, spec.width)
    return [*settings, f"preprocess.resize={round(size * shorter / min(spec.height, spec.width))}"]


def _json(text: str) -> Any:
    """A value as JSON has it; numbers with commas between them are a list, what is no JSON is a text."""
    try:
        return json.loads(f"[{text}]" if "," in text else {"none": "null"}.get(text, text))
    except json.JSONDecodeError:
        return text


def _override(recipe: Recipe, name: str, value: str) -> Recipe:
    options = method_options(recipe.method)
    fields = {f.name: f.type for f in dataclasses.fields(Recipe) if f.name not in {"name", "summary", "options"}}
    if name in options:
        return replace(recipe, options={**recipe.options, name: converted(name, value, type(options[name]).__name__)})
    if name not in fields or name == "preprocess":
        parts = [f"preprocess.{part}" for part in recipe.preprocess.as_json()]
        legal = ", ".join(sorted([*(set(fields) - {"preprocess"}), *options, *parts]))
        raise InvalidArgument(f"recipe {recipe.name} has no field {name!r}; legal: {legal}", pointer=f"/set/{name}")
    # Options belong to the method they were set for.
    kept = {} if name == "method" and value != recipe.method else recipe.options
    return replace(recipe, **{"options": kept, name: converted(name, value, str(fields[name]))})


_CONVERT: dict[str, tuple[Callable[[str], Any], str]] = {
    "str": (str, "a text"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "int | None": (lambda text: None if text == "none" else int(text), "a whole number or none"),
    "tuple[int, ...]": (
        lambda text: tuple(int(number) for number in text.split(",") if number.strip()),
        "whole numbers separated by commas",
    ),
    "bool": (lambda text: {"true": True, "false": False}[text.lower()], "true or false"),
}
"""Type of a field -> what makes one of a text, and what it takes."""


def converted(name: str, value: str, kind: str) -> Any:
    """A setting's text as a value of a type, of which `kind` is the name; InvalidArgument: it is none."""
    convert, taken = _CONVERT[kind]
    try:
        return convert(value)
    except (ValueError, KeyError):
        raise InvalidArgument(f"{name} must be {taken}, not {value!r}", pointer=f"/set/{name}") from None
