"""A recipe as a TOML file: what `regraft train my.toml` reads and `regraft train RECIPE --save my.toml` writes.

from = "folders_bct"        # optional: the recipe that the rest changes
name = "mine"               # else the file's name
root = "my-photos"
epochs = 40

[options]                   # of the method
weight = 5.0

[preprocess]
height = 224
width = 224

[references]                # as --set takes them: of the recipes that this one depends on
old.epochs = 20
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from index.errors import InvalidArgument
from index.version_folder.new_folder import check_outside
from training.methods import METHODS, method_options
from training.overrides import size_settings, unknown_parts, with_overrides, with_preprocess
from training.recipes import Recipe, field_descriptions, find_recipe
from training.references import FIELDS, References, reference_settings, with_settings

SUFFIX = ".toml"
TABLES = ("options", "preprocess")
REFERENCES = "references"


def read_recipe(path: Path) -> Recipe:
    """The recipe that a TOML file describes.

    Raises:
        InvalidArgument: no such file, not TOML, or a field that is unknown or of the wrong type; names it.
    """
    given = _read(path)
    base = find_recipe(_text(given, "from")) if "from" in given else Recipe(path.stem)
    name = _text(given, "name") if "name" in given else path.stem
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise InvalidArgument(f"{path}: name must be letters, digits, '.', '_' and '-', not {name!r}", pointer="/name")
    tables = {table: given.pop(table, {}) for table in TABLES}
    for table, value in tables.items():
        if not isinstance(value, dict):
            raise InvalidArgument(f"{path}: {table} must be a table, [{table}]", pointer=f"/{table}")
    plain = {field: value for field, value in given.items() if field not in {"from", "name", "summary", REFERENCES}}
    for field, value in (*plain.items(), *tables["options"].items()):
        if isinstance(value, dict):
            raise InvalidArgument(f"{path}: {_no_table(field)}", pointer=f"/{field}")
    if misplaced := [part for part in unknown_parts(tables["preprocess"]) if part in field_descriptions()]:
        # In TOML, every line below the head of a table is part of it.
        raise InvalidArgument(
            f"{path}: {misplaced[0]} belongs above the first table, [preprocess] or another", pointer=f"/{misplaced[0]}"
        )
    # The method first: another one drops the options of the one before.
    ordered = {**{field: plain[field] for field in ("method",) if field in plain}, **plain, **tables["options"]}
    try:
        recipe = with_overrides(base, [f"{field}={_as_setting(value)}" for field, value in ordered.items()])
        recipe = with_preprocess(recipe, {part: None if x == "none" else x for part, x in tables["preprocess"].items()})
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}", pointer=error.pointer) from error
    return replace(recipe, name=name, summary=f"from {path.name}")


def base_of(given: str) -> Recipe | None:
    """The recipe that one starts from, given as for `named_or_read`: itself, or what a file says `from` which."""
    if not given.endswith(SUFFIX):
        return find_recipe(given)
    read = _read(Path(given))
    return find_recipe(_text(read, "from")) if "from" in read else None


def references_in(given: str) -> list[str]:
    """What a file says of the recipes that its own depends on, as `--set` takes it; nothing where no file is given.

    Raises:
        InvalidArgument: it speaks of anything else.
    """
    said = _read(Path(given)).get(REFERENCES, {}) if given.endswith(SUFFIX) else {}
    settings = list(_settings(said, "")) if isinstance(said, dict) else [str(said)]
    if strange := [text for text in settings if text not in reference_settings(settings)]:
        raise InvalidArgument(
            f"{given}: [{REFERENCES}] accepts only old.FIELD and independent.FIELD, not {strange[0]}",
            pointer=f"/{REFERENCES}",
        )
    return settings


def named_or_read(given: str) -> Recipe:
    """The recipe of that name or, where it ends in `.toml`, of that file. Raises as `find_recipe` and `read_recipe`."""
    return read_recipe(Path(given)) if given.endswith(SUFFIX) else find_recipe(given)


class ChosenRecipe(NamedTuple):
    """A recipe with its settings, those that it depends on, and what a file needs to say to reach the same again.

    Attributes:
        recipe: the changed recipe.
        references: the recipes to train for its references.
        base: as of `base_of`.
        said: the settings of its references.
    """

    recipe: Recipe
    references: References
    base: Recipe | None
    said: Sequence[str]

    def write(self, path: Path, recipe: Recipe | None = None) -> Path:
        """Write the recipe, or another one made of it, by `write_recipe`."""
        return write_recipe(recipe or self.recipe, path, self.said, self.base)


def choose(given: str, settings: Sequence[str] = (), size: int | None = None) -> ChosenRecipe:
    """The recipe given as for `named_or_read`, for inputs of `size` pixels, changed by `settings` of `--set`.

    Raises:
        InvalidArgument: as `named_or_read`, `references_in` and `with_settings`.
    """
    found = named_or_read(given)
    sized = () if size is None else size_settings(found, size)
    wanted = [*references_in(given), *sized, *settings]
    base = base_of(given)
    recipe, references = with_settings(found, wanted, base)
    return ChosenRecipe(recipe, references, base, reference_settings(wanted))


def write_recipe(recipe: Recipe, path: Path, references: Sequence[str] = (), base: Recipe | None = None) -> Path:
    """Write a recipe as TOML, every field and option of its method with what it means; `read_recipe` gives it back.

    Args:
        recipe: what to write.
        path: the file.
        references: settings of the recipes that it depends on; `references_in` gives them back.
        base: the recipe that it was made of, by which those recipes know what was changed; `base_of` gives it back.

    Raises:
        InvalidArgument: the file exists or cannot be written, is inside a version folder, or a value cannot be written.
    """
    check_outside(path)
    text = "\n".join([*_lines(recipe, base), *_reference_lines(references)]) + "\n"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror or error}", pointer="/save") from error
    return path


def check_new_file(path: Path) -> None:
    """Refuse a file that `write_recipe` would, before hours go into what it is to hold.

    Raises:
        InvalidArgument: it exists, or the folder does not or is a version's.
    """
    check_outside(path)
    if path.exists() or not path.parent.is_dir():
        why = "it already exists" if path.exists() else f"the folder {path.parent} does not exist"
        raise InvalidArgument(f"{path} cannot be written: {why}", pointer="/save")


def _lines(recipe: Recipe, base: Recipe | None) -> Iterator[str]:
    descriptions = field_descriptions()
    yield f"# {recipe.summary}" if recipe.summary else f"# {recipe.name}"
    if base is not None:
        yield from ("", "# the recipe that it was made of: changes of data and machine reach old and independent, too")
        yield _assignment("from", base.name)
    for field in (field.name for field in fields(Recipe) if field.name not in {"summary", *TABLES}):
        yield from ("", *_comment(descriptions[field]), _assignment(field, getattr(recipe, field)))
    yield from ("", "[options]")
    options = method_options(recipe.method)
    meanings = field_descriptions(METHODS[recipe.method])
    for option, default in options.items():
        # A default that is written out would be another recipe: a card keeps the options that were given.
        unset = "" if option in recipe.options else "# "
        yield from ("", *_comment(meanings[option]), unset + _assignment(option, recipe.options.get(option, default)))
    yield from ("", "[preprocess]")
    yield from (_assignment(name, value) for name, value in recipe.preprocess.as_json().items())


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="# ")


def _reference_lines(settings: Sequence[str]) -> Iterator[str]:
    last = {name.strip(): value.strip() for name, _, value in (setting.partition("=") for setting in settings)}
    yield from ("", f"[{REFERENCES}]") if last else ()
    yield from (_assignment(name, value) for name, value in last.items())


def _settings(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """`a.b=value` for each value of nested tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_as_setting(value)}"


def _assignment(name: str, value: object) -> str:
    written = "none" if value is None else list(value) if isinstance(value, tuple) else value
    line = f"{name} = {json.dumps(written, ensure_ascii=False)}"
    try:
        line.encode()
        tomllib.loads(line)
    except ValueError as error:  # JSON's infinity, half of a surrogate pair, a control character
        raise InvalidArgument(f"{name} cannot be written into a file: {value!r}", pointer=f"/{name}") from error
    return line


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read as a recipe: {error}", pointer="/recipe") from error


def _no_table(field: str) -> str:
    if field in FIELDS:
        return f"fields of {field} belong below [{REFERENCES}], as {field}.epochs = 5"
    return f"{field} cannot be a table; the tables are {', '.join(f'[{name}]' for name in (*TABLES, REFERENCES))}"


def _text(given: Mapping[str, Any], field: str) -> str:
    if not isinstance(given[field], str):
        raise InvalidArgument(f"{field} must be a text, not {given[field]!r}", pointer=f"/{field}")
    return str(given[field])


def _as_setting(value: object) -> str:
    """A TOML value as `--set` takes it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
