"""`regraft recipes`: list the recipes of `regraft train`, by family, and explain their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from index.errors import InvalidArgument, did_you_mean
from regraft.terminal.answers import answer, out
from regraft.terminal.extras import needs
from regraft.terminal.printing import print_table

if TYPE_CHECKING:
    from training.recipes import Group, Recipe


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[FAMILY|RECIPE]", help="Show the recipes of a family, or the fields of a recipe."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List every recipe of every family.")] = False,
) -> None:
    """List the recipes of `regraft train` by family."""
    with needs("train"):
        from training.recipes import GROUPS, OWN_IMAGES, RECIPES, field_descriptions

    if everything:
        answer([{"family": family, **row} for family, group in GROUPS.items() for row in _recipes(group)])
        for group in GROUPS.values():
            _print_group(group)
    elif name is None:
        _print_families(GROUPS, OWN_IMAGES)
    elif name in GROUPS:
        answer(_recipes(GROUPS[name]))
        _print_group(GROUPS[name])
        out.print(f"`regraft recipes {next(iter(GROUPS[name].recipes))}` explains every field of a recipe.")
    elif name in RECIPES:
        recipe, meanings = RECIPES[name](), field_descriptions()
        answer({"name": name, "fields": vars(recipe), "meanings": meanings})
        _print_fields(recipe, meanings)
    else:
        near = did_you_mean(name, [*GROUPS, *RECIPES])
        raise InvalidArgument(f"unknown family or recipe {name!r}{near}; families: {', '.join(GROUPS)}")


def _print_families(groups: dict[str, Group], plain: str) -> None:
    rows = []
    for family, group in groups.items():
        old = group.recipes[f"{family}_v1"]()
        size = f"{old.preprocess.height} x {old.preprocess.width}"
        rows.append([family, group.title, size, old.backbone.removeprefix("timm/"), old.dim, old.epochs])
    columns = ["family", "trained on", "pixels", "backbone", "dim", "epochs"]
    answer([dict(zip(columns, row, strict=True)) for row in rows])
    print_table(columns, rows)
    out.print("Pixels to epochs are those of the family's first version; dim is the size of an embedding.")
    out.print()
    out.print("To train on your own images, one folder per label, then a second version compatible with the first:")
    out.print(f"  regraft train {plain}_v1 --set root=IMAGES --out runs/v1")
    out.print(f"  regraft train {plain}_bct --set root=IMAGES --set old=runs/v1 --out runs/v2")
    out.print()
    out.print(
        "`regraft recipes FAMILY` lists a family's recipes, `regraft recipes RECIPE` explains one, `--all` lists all."
    )


def _recipes(group: Group) -> list[dict[str, Any]]:
    made = {name: make() for name, make in group.recipes.items()}
    return [
        {"recipe": name, "method": r.method, "dim": r.dim, "epochs": r.epochs, "summary": r.summary.partition(": ")[2]}
        for name, r in made.items()
    ]


def _print_group(group: Group) -> None:
    print_table(["recipe", "method", "dim", "epochs", group.title], [[*row.values()] for row in _recipes(group)])


def _print_fields(recipe: Recipe, meanings: dict[str, str]) -> None:
    out.print(f"{recipe.name}: {recipe.summary}; change a field with `--set FIELD=VALUE`")
    fields = {**vars(recipe), "preprocess": recipe.preprocess.as_json()}
    rows = [[name, _written(fields[name]), text] for name, text in meanings.items() if name not in {"name", "summary"}]
    print_table(["field", "value", "meaning"], rows)


def _written(value: object) -> str:
    """A value in the syntax of `--set`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_written(inner)}" for name, inner in value.items())
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
