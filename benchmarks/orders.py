"""Methods in the order of P_com, in each paper's own run and in ours.

    python benchmarks/orders.py docs/results/training.md --write docs/results.md

Our runs are the tables that `benchmarks/compatibility.py FAMILY --write` put into the document. P_com of mAP is
computed from their rounded figures, and so is P_com of CMC-1 if a row has none because another machine trained the
independent version. If some methods have fewer seeds, those with all seeds get a separate line. --write FILE puts the
orders between `<!-- table orders -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from command_line import Document, run_main

from index.evaluation.metrics import p_com
from training.comparison.papers import PROTOCOLS, ordering, ranked
from training.comparison.runs import COMPARED_FAMILIES, METRICS, independent_part
from training.comparison.table import replace_table
from training.recipes.family import STANDALONE_PARTS

HEADER = ("run", "by P_com of CMC-1, best first", "of mAP")
Row = tuple[str, str, str]
MARKED = re.compile(r"<!-- table (\S+)((?: [^\n]+)?) -->\n(.*?)<!-- end -->", re.DOTALL)
"""Family, what else its table is named, the table."""
CMC = ("new/old - old/old, CMC-1", re.compile(r"^[\d.]+"))
MAP = ("the same, mAP", re.compile(r"\[([\d.]+)\]"))
"""Where a table has gains, and a score in its cell."""


def main(document: Annotated[Path, typer.Argument(exists=True, dir_okay=False)], write: Document = None) -> None:
    rows = [*of_papers(), *of_tables(document.read_text())]
    table = "\n".join([f"| {' | '.join(row)} |" for row in [HEADER, ("---",) * len(HEADER), *rows]])
    print(table)
    if write:
        replace_table(write, "orders", table)


def of_papers() -> Iterator[Row]:
    """Whose run, and the order inside it, where a paper's table has two methods or more."""
    for protocol in PROTOCOLS.values():
        by_cmc, by_map = (dict(ordering(protocol, [], list(protocol.published), metric)) for metric in METRICS)
        for whose, order in by_cmc.items():
            yield f"{whose}, CIFAR-100", order, by_map.get(whose, "")


def of_tables(text: str) -> Iterator[Row]:
    """Which family and how many seeds, and the orders of the methods that have them all, then of all methods."""
    for family, label, table in MARKED.findall(text):
        if family not in COMPARED_FAMILIES:
            continue
        header, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
        rows = [dict(zip(header, line, strict=True)) for line in lines]
        every = {row["method"]: row for row in rows}  # a machine with fewer seeds may have written the references
        counts = sorted({int(row["seeds"]) for row in rows})
        for least in sorted({counts[0], counts[-1]}, reverse=True):
            seeds = f"{counts[-1]}" if least == counts[-1] else f"{least} to {counts[-1]}"
            held = {name: row for name, row in every.items() if int(row["seeds"]) >= least}
            methods = [name for name in held if name not in STANDALONE_PARTS and independent_part(name) in every]
            yield (
                f"ours, {family}{label} ({seeds} seed{'' if seeds == '1' else 's'})",
                ranked({name: float(held[name]["P_com"] or reckoned(every, name, *CMC)) for name in methods}),
                ranked({name: reckoned(every, name, *MAP) for name in methods}),
            )


def reckoned(rows: Mapping[str, Mapping[str, str]], method: str, gains: str, score: re.Pattern[str]) -> float:
    """P_com of a method's gain, the only difference that the table has before it is rounded."""
    gain = float(rows[method][gains].split()[0])
    ends = ((method, "old/old"), (independent_part(method), "new/new"))
    old_old, new_new = (float(score.findall(rows[name][pair])[0]) for name, pair in ends)
    return p_com(old_old, old_old + gain, new_new)


if __name__ == "__main__":
    run_main(main)
