"""What `regraft sweep` found for several methods, as a table: the recipe's own weights beside the best of its trials.

    python benchmarks/sweeps.py runs/sweep-bct runs/sweep-oca [--write docs/results/training.md]

reads the cards of the trials. --write puts the table between `<!-- table sweeps -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from index.folder import load_version
from index.version import Card
from training.comparison_table import put_into

COLUMNS = ("method", "weights of the recipe", "new/old", "new/new", "best weights", "new/old", "new/new", "old/old")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path, help="folders that `regraft sweep --out` wrote")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into a document")
    given = parser.parse_args()
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}", *map(line, given.sweeps)]
    print("\n".join(lines))
    if given.write:
        put_into(given.write, "sweeps", "\n".join(lines))


def line(sweep: Path) -> str:
    """One method's row."""
    cards = [load_version(trial).card for trial in sorted(sweep.glob("trial-*")) if trial.is_dir()]
    own, best = cards[0], max(cards, key=lambda card: cmc(card, "new/old"))
    percents = [[f"{100 * cmc(card, pair):.1f}" for pair in ("new/old", "new/new")] for card in (own, best)]
    cells = [own.method, weights(own), *percents[0], weights(best), *percents[1], f"{100 * cmc(own, 'old/old'):.1f}"]
    return f"| {' | '.join(cells)} |"


def cmc(card: Card, pair: str) -> float:
    """CMC-1 of a trial on its held-out images."""
    return float(card.metrics[pair]["cmc@1"]["value"])


def weights(card: Card) -> str:
    """The options of a trial that a sweep changes, and the scale that they belong to."""
    options = card.recipe["options"].items()
    return ", ".join(f"{name} {value:g}" for name, value in options if name.endswith("weight") or name == "scale")


if __name__ == "__main__":
    main()
