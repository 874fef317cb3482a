"""`make bench`: every measurement of speed in turn, on a quiet machine, written into docs/performance.md with a plot.

    python benchmarks/performance.py [--again] [--large]

What each script printed is kept in runs/performance/, and a script whose output is there is not run again, so that a
run that was stopped goes on; `--again` begins anew. `--large` takes a million items too, which takes an hour.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
KEPT = HERE.parent / "runs" / "performance"
PAGE = HERE.parent / "docs" / "performance.md"
PLOT = HERE.parent / "docs" / "performance.svg"
SLOW_SECONDS = 3_600


@dataclass(frozen=True)
class Section:
    """One script, and what a reader should know of its table."""

    title: str
    about: str
    script: str
    arguments: tuple[str, ...] = ()
    large: tuple[str, ...] | None = None
    """Arguments with `--large`; None: the same."""

    def command(self, large: bool) -> list[str]:
        arguments = self.large if large and self.large is not None else self.arguments
        return [f"benchmarks/{self.script}.py", *arguments]


SECTIONS = (
    Section(
        "In process",
        "One query at a time, one thread, k = 10; each engine with the least effort that reaches the recall. Regraft is"
        " the whole gallery: plan, search, exact scores, one list. ![Median time by size](performance.svg)",
        "peers",
        ("10000,100000",),
        ("10000,100000,1000000",),
    ),
    Section(
        "Over HTTP, 10,000 items",
        "A query of one embedding in JSON, beside a floor: one Starlette route with orjson over the same index. CPU is"
        " the server's, a request.",
        "http_speed",
        ("10000", "4", "auto"),
    ),
    Section("Over HTTP, 100,000 items", "", "http_speed", ("100000", "4", "auto")),
    Section("Several versions in one list", "", "mixed_versions", ("100000",), ("100000,1000000",)),
    Section("Filters", "", "filters", ("100000",)),
    Section(
        "Ingest",
        "Vectors a second, committed to the disk; the floor is rows into SQLite by its driver.",
        "http_ingest",
        ("6", "10000"),
    ),
    Section(
        "Queries beside large ingests",
        "",
        "ingest",
        ("10000", "128", "15"),
    ),
    Section(
        "Deployment and roll-back",
        "",
        "deploy_time",
        ("100000",),
        ("100000,1000000",),
    ),
    Section("What grows with a gallery", "", "gallery_size", ("100000",), ("1000000",)),
    Section(
        "A gallery from its first item to a roll-back",
        "Over HTTP, killed with SIGKILL in between.",
        "million",
        ("100000",),
        ("1000000",),
    ),
    Section("An index on disk", "", "index_speed", ("100000",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure all anew")
    parser.add_argument("--large", action="store_true", help="with a million items")
    options = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    for kept in KEPT.glob("*.txt") if options.again else ():
        kept.unlink()
    for number, section in enumerate(SECTIONS, 1):
        print(f"{number}/{len(SECTIONS)} {section.title}", flush=True)
        measure(section, options.large)
    plot(output(SECTIONS[0], options.large))
    PAGE.write_text(page(options.large))
    print(f"written: {PAGE}")


def measure(section: Section, large: bool) -> None:
    """Run the script, unless what it printed is there already."""
    kept = place(section, large)
    if kept.is_file():
        return
    command, started = section.command(large), time.monotonic()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=HERE.parent,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SLOW_SECONDS,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"{' '.join(command)} ended with {ran.returncode}: nothing was written")
    took = time.monotonic() - started
    kept.write_text(
        f"{ran.stdout.strip()}\n\n`python {' '.join(command)}`, {took:.0f} s, {time.strftime('%Y-%m-%d')}\n"
    )


def place(section: Section, large: bool) -> Path:
    return KEPT / ("_".join([section.script, *section.command(large)[1:]]).replace(",", "-") + ".txt")


def output(section: Section, large: bool) -> str:
    return place(section, large).read_text()


def page(large: bool) -> str:
    parts = [
        f"# Performance\n\n{machine()} Written by `make bench`; absolute figures move from run to run: read ratios.\n"
    ]
    for section in SECTIONS:
        about = f"{section.about}\n\n" if section.about else ""
        parts.append(f"## {section.title}\n\n{about}{tables_apart(output(section, large))}")
    return "\n".join(parts)


def tables_apart(text: str) -> str:
    """Markdown tables need an empty line before them, and lines of prose one between them."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and lines[-1] and (line.startswith("|") != lines[-1].startswith("|") or not line.startswith("|")):
            lines.append("")
        lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def machine() -> str:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = model[1] if model else platform.machine()
    return f"{os.cpu_count()} cores ({name}), {memory:.0f} GiB, Python {platform.python_version()}."


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
    """Engine -> (items, median in ms) where its recall is 0.99, or what nothing can be chosen of."""
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
    main()
