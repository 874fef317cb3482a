"""`make bench`: run every speed benchmark in turn, on a quiet machine, and write docs/performance.md with a plot.

    python benchmarks/performance.py --large --peers PYTHON

The output of each script is kept in runs/performance/ with the commit that it measured. A script whose output is there
is not run again, so a stopped run continues; `--again` starts over. `--only TEXT` measures the sections with TEXT in
their title. Sections that were not measured here stay unchanged on the page. A script that failed runs again the next
time. `--large` takes hours: a million items in the other tables too, and millions and longer vectors in process.
`--peers`: an interpreter whose environment has this package's dependencies and the other engines, see
benchmarks/peers.py.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import conclusions
import typer
from command_line import run_main

HERE = Path(__file__).parent
KEPT = HERE.parent / "runs" / "performance"
PAGE = HERE.parent / "docs" / "performance.md"
PLOT = HERE.parent / "docs" / "performance.svg"
SLOW_SECONDS = 7_200
WIDTH, RULE = 120, "---"


@dataclass(frozen=True)
class Section:
    """One script and the description of its table.

    Attributes:
        large: arguments with `--large`; None: the same.
        conclusion: makes one sentence from the script's output.
    """

    title: str
    about: str
    script: str
    arguments: tuple[str, ...]
    conclusion: Callable[[str], str]
    large: tuple[str, ...] | None = None
    only_large: bool = False

    def command(self, large: bool) -> list[str]:
        arguments = self.large if large and self.large is not None else self.arguments
        return [f"benchmarks/{self.script}.py", *arguments]

    def is_plotted(self) -> bool:
        """Whether its table compares engines in process on vectors of the same length."""
        return self.script == "peers" and "512" not in self.arguments


CHOSEN = ("--engine", "Regraft, aim 0.99", "--engine", "FAISS flat", "--engine", "FAISS IVF")
"""Engines that fit into memory together and are built within minutes; a graph takes half an hour."""

SECTIONS = (
    Section(
        "In process",
        "One query at a time, one thread, k = 10. Each engine runs with the least effort that reaches the recall."
        " Regraft is measured as a whole gallery: plan, search, exact scores, one list."
        " ![Median time by size](performance.svg)",
        "peers",
        ("--items", "10000", "--items", "100000", "--queries", "200"),
        conclusions.in_process,
    ),
    Section(
        "In process, a million",
        "The same, without the engines that take minutes for 100,000 items.",
        "peers",
        ("--items", "1000000", "--queries", "200"),
        conclusions.in_process,
        only_large=True,
    ),
    Section(
        "In process, five million",
        "Without graphs.",
        "peers",
        ("--items", "5000000", *CHOSEN),
        conclusions.in_process,
        only_large=True,
    ),
    Section(
        "In process, a million of 512 numbers",
        "Without graphs.",
        "peers",
        ("--items", "1000000", "--dim", "512", *CHOSEN),
        conclusions.in_process,
        only_large=True,
    ),
    Section(
        "Over HTTP, 10,000 items",
        "A query of one embedding in JSON, compared with Chroma's server and a floor: one Starlette route with orjson"
        " over the same index. CPU is the server's processor time per request.",
        "http_speed",
        ("--items", "10000", "--index", "auto"),
        conclusions.over_http,
    ),
    Section(
        "Over HTTP, 100,000 items",
        "The same with more items.",
        "http_speed",
        ("--items", "100000", "--index", "auto"),
        conclusions.over_http,
    ),
    Section(
        "Over HTTP, 100,000 items, two processes",
        "The same with `regraft serve --processes 2`. The floor has one process; the client is one more.",
        "http_speed",
        ("--items", "100000", "--index", "auto", "--processes", "2"),
        conclusions.over_http,
    ),
    Section(
        "Several versions in one list",
        "The same items in galleries of 1, 2, 4 and 8 versions, scanned; then the time of each kind of edge.",
        "mixed_versions",
        ("--items", "100000"),
        conclusions.versions,
        large=("--items", "100000", "--items", "1000000", "--queries", "100"),
    ),
    Section(
        "Several versions in one list, indexed",
        "The same with the index that `auto` chooses.",
        "mixed_versions",
        ("--items", "80000", "--queries", "300", "--index", "auto"),
        conclusions.versions,
    ),
    Section(
        "Filters",
        "A scan with a filter compared with the same scan without one; the ratio is of processor time.",
        "filters",
        ("--items", "100000"),
        conclusions.filtered,
    ),
    Section(
        "Ingest",
        "Vectors per second, committed to disk; the floor inserts rows into SQLite through its driver.",
        "http_ingest",
        ("--batches", "6", "--batch-size", "10000"),
        conclusions.stored,
    ),
    Section(
        "Imports of files",
        "Rows per second of `regraft import`, compared with only reading the same file by the library of its format.",
        "imports",
        ("--items", "50000"),
        conclusions.imported,
    ),
    Section(
        "Queries beside large ingests",
        "Queries of another gallery while JSON bodies of 10,000 embeddings arrive without a pause.",
        "ingest",
        ("--batch-size", "10000", "--seconds", "15"),
        conclusions.beside,
    ),
    Section(
        "Queries beside building",
        "Queries of the same gallery while it is written, sealed, compacted and saved as a snapshot at full speed.",
        "background",
        ("--items", "100000"),
        conclusions.beside,
        large=("--items", "1000000"),
    ),
    Section(
        "Queries beside a backfill",
        "Queries while a `transform` backfill moves every item, at a limited rate and at full speed.",
        "backfill",
        ("queries", "--vectors", "50000", "--seconds", "8"),
        conclusions.beside_backfill,
    ),
    Section(
        "Deployment and rollback in memory",
        "A deployment serves a fifth of the items by another version, compared with moving their vectors, as was done"
        " earlier.",
        "deploy_time",
        ("--items", "100000"),
        conclusions.deployed,
        large=("--items", "100000", "--items", "1000000"),
    ),
    Section(
        "What grows with a gallery",
        "The exponent is the slope in log-log: 1 means growth in proportion to the gallery.",
        "gallery_size",
        ("--items", "10000", "--items", "100000"),
        conclusions.growth,
        large=("--items", "10000", "--items", "100000", "--items", "1000000"),
    ),
    Section(
        "A gallery from its first item to a rollback",
        "Over HTTP, with a SIGKILL in between; memory and disk per item.",
        "million",
        ("--items", "1000000"),
        conclusions.life,
    ),
    Section(
        "An index on disk",
        "In process, compared with FAISS on the same index; then filters and a start.",
        "index_speed",
        ("--items", "100000", "--queries", "300"),
        conclusions.on_disk,
    ),
)


def main(
    again: Annotated[bool, typer.Option("--again", help="Measure again.")] = False,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Measure sections with this in their title.")] = "",
    large: Annotated[bool, typer.Option("--large", help="With a million items and more.")] = False,
    peers: Annotated[
        str, typer.Option(metavar="PYTHON", help="Interpreter that has the other engines.", show_default=False)
    ] = sys.executable,
) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    shown = [section for section in SECTIONS if large or not section.only_large]
    chosen = [section for section in shown if only in section.title]
    if not chosen:
        raise typer.BadParameter(f"no section has {only!r} in its title", param_hint="--only")
    for section in chosen if again else ():
        place(section, large).unlink(missing_ok=True)
    for at, section in enumerate(chosen, 1):
        print(f"{at}/{len(chosen)} {section.title}", flush=True)
        measure(section, large, peers if section.script == "peers" else sys.executable)
        PAGE.write_text(page(shown, large))
    if table := "".join(output(section, large) or "" for section in shown if section.is_plotted()):
        plot(table)
    print(f"written: {PAGE}")


def measure(section: Section, large: bool, python: str) -> None:
    """Run the script unless its output is kept already."""
    kept = place(section, large)
    if kept.is_file():
        return
    command, started = section.command(large), time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    ways: dict[str, Any] = {"cwd": HERE.parent, "env": env, "stdout": subprocess.PIPE, "text": True}
    try:
        ran = subprocess.run([python, *command], timeout=SLOW_SECONDS, check=True, **ways)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"not measured: {error}", flush=True)
        return
    took = time.monotonic() - started
    how = f"`python {shlex.join(command)}`, {took:.0f} s, {time.strftime('%Y-%m-%d')}, {commit()}"
    kept.write_text(f"{ran.stdout.strip()}\n\n{wrapped(how)}\n")


def commit() -> str:
    """The commit that is measured."""
    return subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=HERE, text=True).strip()


def place(section: Section, large: bool) -> Path:
    named = "_".join([section.script, *section.command(large)[1:]])
    return KEPT / (re.sub(r"[^A-Za-z0-9_.]+", "-", named) + ".txt")


def output(section: Section, large: bool) -> str | None:
    """The output of a section's script; None if it has not finished."""
    kept = place(section, large)
    return kept.read_text() if kept.is_file() else None


def page(chosen: Sequence[Section], large: bool) -> str:
    parts = [
        f"# Performance\n\n{machine()} Written by `make bench`.\nAbsolute figures vary between runs: compare ratios.\n"
    ]
    before = {part.partition("\n")[0][3:]: part for part in re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)}
    for section in SECTIONS:
        if section in chosen and (text := output(section, large)) is not None:
            concluded = conclusions.of(section.conclusion, text)
            said = [wrapped(section.about), wrapped(f"**{concluded}**") if concluded else "", tables_apart(text)]
            parts.append(f"## {section.title}\n\n" + "\n\n".join(part for part in said if part))
        elif section.title in before:
            parts.append(before[section.title].rstrip() + "\n")
        elif section in chosen:
            parts.append(f"## {section.title}\n\nNot measured yet: `python {shlex.join(section.command(large))}`\n")
    return "\n".join(parts)


def wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def tables_apart(text: str) -> str:
    """Add what Markdown needs: an empty line before each table and between lines of prose, and a head to each table."""
    lines: list[str] = []
    given = text.splitlines()
    for line, following in zip(given, [*given[1:], ""], strict=True):
        row, inside = line.startswith("|"), bool(lines) and lines[-1].startswith("|")
        head = row and RULE in following
        if lines and lines[-1] and (not row or not inside or head):
            lines.append("")
        if row and not head and not (lines and lines[-1].startswith("|")):
            columns = line.count("|") - 1
            lines += ["|" + "  |" * columns, "|" + f" {RULE} |" * columns]
        lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def machine() -> str:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = model[1] if model else platform.machine()
    when = time.strftime("%Y-%m-%d")
    return f"{when}: {os.cpu_count()} cores ({name}), {memory:.0f} GiB, Python {platform.python_version()}."


def plot(table: str) -> None:
    """Median time of a query by the number of items, log-log."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5))
    axes = figure.add_subplot()
    for name, points in sorted(by_engine(table).items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name, linewidth=2.5 if "Regraft" in name else 1)
    axes.set(xscale="log", yscale="log", xlabel="items", ylabel="median time of a query, ms")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(PLOT)


def by_engine(table: str) -> dict[str, list[tuple[int, float]]]:
    """Engine -> (items, median in ms), for rows with a recall of at least 0.985."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for items, engine, recall, median in rows(table):
        if recall >= 0.985:
            found[engine].append((items, median))
    return found


def rows(table: str) -> Iterator[tuple[int, str, float, float]]:
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].isdigit():
            yield int(cells[0]), cells[1], float(cells[3]), float(cells[4])


if __name__ == "__main__":
    run_main(main)
