"""`regraft reproduce`: run a paper's protocol and print its table beside ours. Needs the extra `train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from index.durable import write_whole
from index.errors import InvalidArgument
from regraft.terminal.answers import answer, out
from regraft.terminal.extras import needs
from regraft.terminal.stopping import stoppable


def reproduce(
    protocol: Annotated[str, typer.Argument(metavar="PROTOCOL", help="cifar100-b, cifar100-b-data or cifar100-a.")],
    root: Annotated[str, typer.Option("--root", help="Folder of the data set.")],
    target: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Folder for versions and results; default: runs/PROTOCOL."),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Number of seeds; all methods run on one seed before the next.")
    ] = 1,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="Stop after this time; run again to continue.")
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help="Train only this method; may be repeated.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of every recipe, or fct.FIELD of one."),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option("--jobs", min=1, help="Trainings side by side; one small network leaves most of a GPU idle."),
    ] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace versions that were trained with other settings.")
    ] = False,
) -> None:
    """Train a paper's protocol; print its table beside our results.

    Example: regraft reproduce cifar100-b --root cifar-100-python --minutes 55
    """
    with needs("train"), stoppable():
        from training.comparison.papers import PROTOCOLS, beside, ordering
        from training.comparison.runs import COMPARED_FAMILIES, METRICS, parts_for, runs_of, time_limit
        from training.comparison.schedule import compare_methods
        from training.comparison.table import table
        from training.recipes.family import METHOD_PARTS

        _require("PROTOCOL", [protocol], list(PROTOCOLS))
        _require("--method", methods or [], list(METHOD_PARTS))
        wanted = PROTOCOLS[protocol]
        folder = target or Path("runs") / protocol
        runs = runs_of(COMPARED_FAMILIES[wanted.family], folder, seeds, [f"root={root}", *(settings or [])])
        parts = parts_for(methods)
        ended = True
        try:
            with time_limit(minutes):
                compare_methods(
                    runs,
                    parts,
                    lambda: write_whole(folder / "table.md", f"{table(runs, parts)}\n".encode()),
                    out.print,
                    overwrite=overwrite,
                    jobs=jobs,
                )
        except KeyboardInterrupt:
            ended = False
        ordered = [
            f"{metric}, {whose}: {o}" for metric in METRICS for whose, o in ordering(wanted, runs, parts, metric)
        ]
        texts = {"beside": beside(wanted, runs, parts), "table": table(runs, parts)}
        answer({"protocol": protocol, "folder": folder, "complete": ended, **texts, "ordering": ordered})
        out.print(wanted.title)
        for text in texts.values():
            for line in text.splitlines():
                out.print(line)
            out.print()
        for line in ordered:
            out.print(f"by P_com of {line}")
        if not ended:
            raise KeyboardInterrupt


def _require(name: str, values: Sequence[str], legal: Sequence[str]) -> None:
    for value in values:
        if value not in legal:
            raise InvalidArgument(f"{name} must be one of {', '.join(legal)}, not {value!r}")
