"""Methods in the order of P_com: inside each paper's own run, and inside ours.

    python benchmarks/orders.py digits=runs/digits omniglot=runs/omniglot --write docs/results.md

A run is FAMILY=FOLDER, what `benchmarks/compatibility.py FAMILY --out FOLDER` or `regraft reproduce` left. Seeds count
that measured every method which the first one did. --write FILE puts the table between `<!-- table orders -->` and
`<!-- end -->`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from training.comparison import COMPARED, Run, parts_of, runs_of
from training.comparison_table import put_into
from training.papers import PROTOCOLS, Protocol, ordering


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="FAMILY=FOLDER")
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = [*of_papers(), *(row for given in arguments.runs for row in of_runs(*given.split("=", 1)))]
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


def of_runs(family: str, folder: str) -> Iterator[tuple[str, str]]:
    """Our run of a family, and the order inside it."""
    seeds = runs_of(COMPARED[family], Path(folder), len(list(Path(folder).glob("seed*"))), [])
    parts = [part for part in parts_of(None) if seeds[0].measured(part).is_file()]
    whole = [run for run in seeds if _has(run, parts)]
    for line in ordering(Protocol(family, family, {}), whole, parts):
        whose, _, order = line.partition(": ")
        yield whose.replace("ours", f"ours, {family}"), order


def _has(run: Run, parts: list[str]) -> bool:
    return all(run.measured(part).is_file() for part in parts)


if __name__ == "__main__":
    main()
