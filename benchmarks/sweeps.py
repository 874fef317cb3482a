"""The results of `regraft sweep` for several methods as a table: the recipe's own weights and the best of its trials.

    python benchmarks/sweeps.py digits runs/sweep-bct runs/sweep-oca --write docs/results/training.md

reads the cards of the finished trials; a diverged trial is not finished. --write puts the table between `<!-- table
sweeps FAMILY -->` and `<!-- end -->`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from command_line import Document, choice_of, run_main

from index.errors import InvalidArgument
from index.version import Card
from index.version_folder.folder import load_version
from training.comparison.provenance import read_note
from training.comparison.runs import COMPARED_FAMILIES
from training.comparison.table import replace_table

COLUMNS = ("method", "weights of the recipe", "new/old", "new/new", "best weights", "new/old", "new/new", "old/old")
OWN = "trial-0"
"""The recipe as it is."""


def main(
    family: Annotated[str, typer.Argument(parser=choice_of(COMPARED_FAMILIES), help="Whose recipes were swept.")],
    sweeps: Annotated[list[Path], typer.Argument(exists=True, help="Folders that `regraft sweep --out` wrote.")],
    write: Document = None,
) -> None:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}", *map(line, sweeps)]
    print("\n".join(lines))
    if write:
        replace_table(write, f"sweeps {family}", "\n".join(lines))


def line(sweep: Path) -> str:
    """One method's row."""
    # In the order of their numbers: the first of equals is the best one, as for the command.
    found = sorted(sweep.glob("trial-*.json"), key=lambda note: (len(note.stem), note.stem))
    notes = [note for note in found if "replaces" not in read_note(note)]  # not those that are being trained
    cards = {note.stem: load_version(note.with_suffix("")).card for note in notes}
    if not cards:
        raise InvalidArgument(f"{sweep} holds no trial that `regraft sweep` finished")
    best = max(cards.values(), key=lambda card: cmc(card, "new/old"))
    as_it_is = cells(cards[OWN]) if OWN in cards else ["diverged", "", ""]
    old_old = f"{100 * cmc(best, 'old/old'):.1f}"
    return f"| {' | '.join([best.method, *as_it_is, *cells(best), old_old])} |"


def cells(card: Card) -> list[str]:
    """A trial's weights, and what it found in percent."""
    return [weights(card), *(f"{100 * cmc(card, pair):.1f}" for pair in ("new/old", "new/new"))]


def cmc(card: Card, pair: str) -> float:
    """CMC-1 of a trial on its held-out images."""
    return float(card.metrics[pair]["cmc@1"]["value"])


def weights(card: Card) -> str:
    """The options of a trial that a sweep changes, and the scale that they belong to."""
    options = card.recipe["options"].items()
    return ", ".join(f"{name} {value:g}" for name, value in options if name.endswith(("weight", "scale")))


if __name__ == "__main__":
    run_main(main)
