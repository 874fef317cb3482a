"""What each method gains, and the order of methods by P_com, in all of our runs and in the papers'.

    python benchmarks/orders.py docs/results/training.md --write docs/results.md

Our runs are the tables that `benchmarks/compatibility.py FAMILY --write` put into the document. P_com of mAP is
computed from their rounded figures, and so is P_com of CMC-1 if a row has none because another machine trained the
independent version. If some methods have fewer seeds, those with all seeds get a separate line in the orders. --write
FILE puts the gains between `<!-- table gains -->` and `<!-- end -->`, the orders after `<!-- table orders -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from command_line import Document, run_main

from index.evaluation.metrics import p_com
from training.comparison.papers import PROTOCOLS, ordering, ranked
from training.comparison.runs import COMPARED_FAMILIES, METRICS, independent_part
from training.comparison.table import replace_table
from training.recipes.family import METHOD_PARTS, STANDALONE_PARTS

MARKED = re.compile(r"<!-- table (\S+)((?: [^\n]+)?) -->\n(.*?)<!-- end -->", re.DOTALL)
"""Family, what else its table is named, the table."""
CMC = ("new/old - old/old, CMC-1", re.compile(r"^[\d.]+"))
MAP = ("the same, mAP", re.compile(r"\[([\d.]+)\]"))
"""Where a table has gains, and a score in its cell."""

Cells = Mapping[str, str]
"""Column -> cell."""


@dataclass(frozen=True)
class Measured:
    """One of our tables.

    Args:
        name: its family, and what else it is named.
        rows: part -> its row.
    """

    name: str
    rows: Mapping[str, Cells]

    @property
    def seeds(self) -> list[int]:
        """The numbers of seeds that rows have, ascending."""
        return sorted({int(row["seeds"]) for row in self.rows.values()})

    @property
    def methods(self) -> list[str]:
        """Those that can be compared with an independent version."""
        return [name for name in self.rows if name not in STANDALONE_PARTS and independent_part(name) in self.rows]

    def p_com(self, method: str, gains: str, score: re.Pattern[str]) -> float:
        """P_com of a method's gain, the only difference that the table has before it is rounded."""
        gain = float(self.rows[method][gains].split()[0])
        ends = ((method, "old/old"), (independent_part(method), "new/new"))
        old_old, new_new = (float(score.findall(self.rows[name][pair])[0]) for name, pair in ends)
        return p_com(old_old, old_old + gain, new_new)


def main(document: Annotated[Path, typer.Argument(exists=True, dir_okay=False)], write: Document = None) -> None:
    tables = list(read(document.read_text()))
    written = {"gains": gains(tables), "orders": orders(tables)}
    print(*written.values(), sep="\n\n")
    if write:
        for name, text in written.items():
            replace_table(write, name, text)


def read(text: str) -> Iterator[Measured]:
    """Our tables in a document."""
    for family, label, table in MARKED.findall(text):
        if family in COMPARED_FAMILIES:
            header, _, *lines = [[cell.strip() for cell in x.split("|")[1:-1]] for x in table.strip().splitlines()]
            rows = [dict(zip(header, line, strict=True)) for line in lines]
            yield Measured(f"{family}{label}", {row["method"]: row for row in rows})


def gains(tables: Sequence[Measured]) -> str:
    """A row for each method, a column for each of our tables: points of CMC-1, and their deviation over seeds."""
    header = ["new/old - old/old", *(f"{table.name} ({of_seeds(table.seeds)})" for table in tables)]
    ends = [
        [what, *(start(table.rows.get("independent", {}).get(pair, "")) for table in tables)]
        for what, pair in (("*old/old*", "old/old"), ("*new/new, independent*", "new/new"))
    ]
    gained = [[method, *(gain(table.rows.get(method, {})) for table in tables)] for method in METHOD_PARTS]
    return markdown(header, [*ends, *gained])


def start(cell: str) -> str:
    """The score of a cell, without its interval."""
    return cell.split(" ", maxsplit=1)[0]


def gain(row: Cells) -> str:
    """Points; ± the standard deviation over seeds where there are several."""
    if not row:
        return ""
    points, deviation = start(row[CMC[0]]), row["sd gain"]
    return f"{float(points):+.1f}{f' ± {deviation}' if deviation else ''}"


def orders(tables: Sequence[Measured]) -> str:
    """A row for each run, the papers' first: its methods by P_com of CMC-1 and of mAP, best first."""
    header = ("run", "by P_com of CMC-1, best first", "of mAP")
    return markdown(header, [*of_papers(), *(row for table in tables for row in of_table(table))])


def of_papers() -> Iterator[Sequence[str]]:
    """Whose run, and the order inside it, where a paper's table has two methods or more."""
    for protocol in PROTOCOLS.values():
        by_cmc, by_map = (dict(ordering(protocol, [], list(protocol.published), metric)) for metric in METRICS)
        for whose, order in by_cmc.items():
            yield f"{whose}, CIFAR-100", order, by_map.get(whose, "")


def of_table(table: Measured) -> Iterator[Sequence[str]]:
    """Which family and how many seeds, and the orders of the methods that have them all, then of all methods."""
    counts = table.seeds
    for least in sorted({counts[0], counts[-1]}, reverse=True):
        # A machine with fewer seeds may have written the references.
        methods = [name for name in table.methods if int(table.rows[name]["seeds"]) >= least]
        yield (
            f"ours, {table.name} ({of_seeds([least, counts[-1]])})",
            ranked({name: float(table.rows[name]["P_com"] or table.p_com(name, *CMC)) for name in methods}),
            ranked({name: table.p_com(name, *MAP) for name in methods}),
        )


def of_seeds(counts: Sequence[int]) -> str:
    """As "1 seed", "1 to 3 seeds", of ascending numbers."""
    least, most = counts[0], counts[-1]
    return f"{least} to {most} seeds" if least < most else f"{most} seed{'' if most == 1 else 's'}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


if __name__ == "__main__":
    run_main(main)
