"""Every method on one data set over several seeds, as a table to compare with the papers' tables.

    python benchmarks/compatibility.py omniglot --root FOLDER --seeds 3 --out runs/omniglot

trains the versions that OUT/seed<N>/ lacks, one after the other, measures them, and writes the current table to
OUT/table.md. It can be stopped at any time; the same command continues. Versions that were trained with other settings
are refused, or replaced with `--overwrite`.

`--set` changes a recipe setting of all versions, as in `regraft train`, or of one, as fct.epochs=80. `--write FILE`
puts the table between `<!-- table FAMILY LABEL -->` and `<!-- end -->`; rows of methods that OUT lacks stay.
training/comparison/table.py explains the columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from command_line import Count, Document, Root, Settings, choice_of, run_main

from training.comparison.runs import COMPARED_FAMILIES, parts_for, runs_of
from training.comparison.schedule import compare_methods
from training.comparison.table import merge_table, read_pair_scores, table
from training.evaluation.plots import as_svg, pairs_figure
from training.recipes.family import METHOD_PARTS


def main(
    family: Annotated[str, typer.Argument(parser=choice_of(COMPARED_FAMILIES))],
    out: Annotated[Path, typer.Option(help="Where versions and measurements go.")],
    root: Root = None,
    seeds: Count = 3,
    methods: Annotated[
        list[str] | None, typer.Option("--method", parser=choice_of(METHOD_PARTS), help="Only this; may be repeated.")
    ] = None,
    settings: Settings = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of trainings side by side.")] = 1,
    overwrite: Annotated[bool, typer.Option(help="Replace versions that were trained with other settings.")] = False,
    only_print: Annotated[
        bool, typer.Option("--table", help="Train nothing, print the table of what is there.")
    ] = False,
    write: Document = None,
    label: Annotated[str, typer.Option(help="Of a second table of the family, as '30 epochs'.")] = "",
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the table as SVG.")] = None,
) -> None:
    given = [*([f"root={root}"] if root else []), *(settings or [])]
    runs = runs_of(COMPARED_FAMILIES[family], out, seeds, given)
    parts = parts_for(methods)

    def keep() -> None:
        (out / "table.md").write_text(table(runs, parts) + "\n")

    if not only_print:
        compare_methods(runs, parts, keep, lambda text: print(text, flush=True), overwrite=overwrite, jobs=jobs)
    found = table(runs, parts)
    print(found)
    if write:
        found = merge_table(write, f"{family} {label}".strip(), found)
    if picture:
        picture.write_bytes(as_svg(pairs_figure(read_pair_scores(found))))


if __name__ == "__main__":
    run_main(main)
