"""Methods in the order of P_com: inside each paper's own run, and inside ours.

    python benchmarks/orders.py docs/results/training.md --write docs/results.md

Ours are the tables that `benchmarks/compatibility.py FAMILY --write` put into the document.
--write FILE puts the orders between `<!-- table orders -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from training.comparison import COMPARED
from training.comparison_table import put_into
from training.papers import PROTOCOLS, ordering, ranked
from training.recipes.family import FIRSTS

MARKED = re.compile(r"<!-- table (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = [*of_papers(), *of_tables(arguments.document.read_text())]
    table = "\n".join(
        ["| run | by P_com, best first |", "| --- | --- |", *(f"| {run} | {order} |" for run, order in rows)]
    )
    print(table)
    if arguments.write:
        put_into(arguments.write, "orders", table)


def of_papers() -> Iterator[tuple[str, str]]:
    """Whose run, and the order inside it, where a paper's table has two methods or more."""
    for protocol in PROTOCOLS.values():
        for line in ordering(protocol, [], list(protocol.published)):
            whose, _, order = line.partition(": ")
            yield f"{whose}, CIFAR-100", order


def of_tables(text: str) -> Iterator[tuple[str, str]]:
    """Which family and how many seeds, and the order of the methods that have them all."""
    for family, table in MARKED.findall(text):
        if family not in COMPARED:
            continue
        header, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
        rows = [dict(zip(header, line, strict=True)) for line in lines]
        seeds = max(int(row["seeds"]) for row in rows)
        found = {
            row["method"]: float(row["P_com"])
            for row in rows
            if row["method"] not in FIRSTS and int(row["seeds"]) == seeds
        }
        yield f"ours, {family} ({seeds} seed{'s' if seeds > 1 else ''})", ranked(found)


if __name__ == "__main__":
    main()
