"""One sentence about each section of docs/performance.md, from the figures of its tables.

Each function takes the output of a script. If the table is not as expected, there is no sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Cells = list[str]


def of(conclude: Callable[[str], str], text: str) -> str:
    """The sentence; empty if the figures are missing."""
    try:
        return conclude(text)
    except (ValueError, IndexError, KeyError):
        return ""


def rows(text: str) -> Iterator[Cells]:
    """The cells of every line of every table, including heads."""
    for line in text.splitlines():
        if line.startswith("|") and " --- " not in line:
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(cell: str) -> float:
    """The first number of a cell."""
    found = re.search(r"-?[0-9][0-9,]*\.?[0-9]*", cell)
    if found is None:
        raise ValueError(cell)
    return float(found[0].replace(",", ""))


def in_process(text: str) -> str:
    """The largest size: Regraft, the fastest index of FAISS and the fastest of the other engines."""
    measured = [row for row in rows(text) if row[0].isdigit()]
    largest = max(int(row[0]) for row in measured)
    good = [row for row in measured if int(row[0]) == largest and number(row[3]) >= 0.985]
    median = {row[1]: number(row[4]) for row in sorted(good, key=lambda row: -number(row[4]))}
    text = f"{largest:,} items at recall 0.99: a query takes {median['Regraft, aim 0.99']:.3f} ms"
    indexes = {name: ms for name, ms in median.items() if name.startswith("FAISS")}
    others = {name: ms for name, ms in median.items() if name not in indexes and "Regraft" not in name}
    for what, found in (("FAISS index alone", indexes), ("other engine", others)):
        if found:
            best = min(found, key=found.__getitem__)
            text += f", the fastest {what} ({best}) {found[best]:.3f} ms"
    return f"{text}."


def over_http(text: str) -> str:
    """The most connections."""
    last = {row[0]: row for row in rows(text) if len(row) > 6 and row[1].isdigit()}
    ours, floor = last["regraft"], last["floor"]
    share = number(ours[5]) / number(floor[5])
    told = (
        f"{ours[1]} connections: {number(ours[5]):,.0f} requests/s, {share:.2f} of the floor's rate, with"
        f" {number(ours[6]) / number(floor[6]):.1f} times its processor time a request"
    )
    others = {name: row for name, row in last.items() if name not in {"regraft", "floor"}}
    return told + "".join(f"; {name}: {number(row[5]):,.0f} at recall {row[2]}" for name, row in others.items()) + "."


def versions(text: str) -> str:
    """Four versions."""
    four = next(row for row in rows(text) if row[:2] == ["4", "raw"])
    return f"A query over four versions takes {number(four[4]):.2f} times one over a single version."


def filtered(text: str) -> str:
    """The most expensive filter of one query."""
    ratios = {f"{row[0]}, {row[1]}": number(row[3]) for row in rows(text) if len(row) > 3 and row[2] == "1"}
    worst = max(ratios, key=ratios.__getitem__)
    return f"The most expensive filter ({worst}) multiplies the processor time of a query by {ratios[worst]:.1f}."


def stored(text: str) -> str:
    """Medians."""
    median = {row[0]: number(row[1]) for row in rows(text) if row[0] in {"floor", "json", "npy", "arrow"}}
    share = {name: rate / median["floor"] for name, rate in median.items()}
    return (
        f"Arrays are stored at {share['npy']:.2f} of the floor's rate, Arrow tables at {share['arrow']:.2f}, JSON at"
        f" {share['json']:.2f}."
    )


def imported(text: str) -> str:
    """The slowest and the fastest form."""
    rates = {row[0]: number(row[4]) for row in rows(text) if row[0].startswith(".")}
    slow, fast = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    return f"Imports store {rates[slow]:,.0f} ({slow}) to {rates[fast]:,.0f} ({fast}) rows a second."


def beside(text: str) -> str:
    """The 99th percentiles of all lines."""
    head = next(rows(text))
    p99 = head.index("p99 ms")
    found = [f"{number(row[p99]):.1f} ({row[0]})" for row in rows(text) if row != head]
    return f"99th percentile in ms: {', '.join(found)}."


def beside_backfill(text: str) -> str:
    """The same, from lines of prose."""
    found = re.findall(r"backfill ([^:]+): ([0-9]+) items/s .*?p99 ([0-9.]+) ms", text)
    if not found:
        raise ValueError(text)
    return f"99th percentile in ms: {', '.join(f'{p99} ({what}, {rate} items/s)' for what, rate, p99 in found)}."


def deployed(text: str) -> str:
    """The largest gallery."""
    last = {row[2]: row for row in rows(text) if row[0].isdigit()}
    rule, moved = last["a rule"], last["moved vectors"]
    return (
        f"At {int(rule[0]):,} items a deployment takes {number(rule[3]):.1f} ms; moving vectors took"
        f" {number(moved[3]):,.0f} ms."
    )


def growth(text: str) -> str:
    """What grows faster than a gallery."""
    fast = [row[0] for row in rows(text) if row[-1] != "exponent" and row[-1] != "-" and number(row[-1]) > 1.1]
    return f"Faster than the gallery grows: {', '.join(fast)}." if fast else "Nothing grows faster than the gallery."


def life(text: str) -> str:
    """The start and the deployment."""
    found = {row[0]: row[1] for row in rows(text)}
    start = next(value for name, value in found.items() if name.startswith("killed"))
    return (
        f"After a kill, the first answer comes {start} after the restart; a deployment takes {found['deployment']}, a"
        f" rollback {found['rollback']}; queries meanwhile: {found['queries meanwhile']}."
    )


def on_disk(text: str) -> str:
    """The gallery beside FAISS's own index."""
    ours = next(row for row in rows(text) if row[0] == "gallery")
    return f"The whole gallery answers at {number(ours[4]):.2f} of FAISS's own speed on the same index."
