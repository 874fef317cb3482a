"""A backfill by 1, 2 and 4 worker processes on one PostgreSQL: items per second, and what limits them.

    python benchmarks/workers.py --images 512 --vectors 40000 --rounds 1

Re-encodes IMAGES with a small encoder, and transforms VECTORS of 128 numbers by an item edge. The workers are real
processes with one thread each, started before and warmed up by a backfill that is not counted. Rounds of the three
numbers take turns; figures are medians. `busy`: cores that the workers, and the PostgreSQL, kept busy. `of their time`:
items per second of processor time of both, which is valid on a busy machine too. PostgreSQL is pip's, without fsync, on
the same machine: two cores limit the gain to two.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from backfill import Server, back, done_of, fill, served
from command_line import Count, run_main
from random_versions import SMALL_EDGE, small

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "library"))
from staging.external import postgres

NUMBERS = (1, 2, 4)
GALLERY = {"reencode": "g", "transform": "vectors"}
CHUNKS = {"reencode": 16, "transform": 1024}


def main(
    images: Annotated[int, typer.Option(min=2 * CHUNKS["reencode"] + 1)] = 512,
    vectors: Annotated[int, typer.Option(min=2 * CHUNKS["transform"] + 1)] = 40_000,
    rounds: Count = 1,
) -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| backfill | workers | items/s | ratio to one | workers busy | PostgreSQL busy | items/s of their time |")
    print(f"|{' --- |' * 7}")
    with (
        closing(postgres.Server()) as database,
        served(small, images, 0, SMALL_EDGE, database.create()) as (server, _, _),
    ):
        fill(server, "vectors", "v1", "v2", 0, vectors, 128)
        found = measured(server, database, rounds)
    for kind, runs in found.items():
        show(kind, runs)
    print(f"load {os.getloadavg()[0]:.1f}")


def measured(server: Server, database: postgres.Server, rounds: int) -> dict[str, dict[int, list[tuple[float, ...]]]]:
    """Kind -> workers -> of each round items a second, and cores that workers and PostgreSQL kept busy."""
    found: dict[str, dict[int, list[tuple[float, ...]]]] = {kind: defaultdict(list) for kind in GALLERY}
    for _ in range(rounds):
        for number in NUMBERS:
            with workers(server, number) as running:
                for kind, runs in found.items():
                    run(server, database, kind, running)
                    runs[number].append(run(server, database, kind, running))
    return found


@contextmanager
def workers(server: Server, number: int) -> Iterator[list[int]]:
    variables = {"REGRAFT_DATABASE_URL": server.settings.database_url, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "regraft", "worker", "--data", str(server.settings.data)]
    made = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **variables})
        for _ in range(number)
    ]
    try:
        yield [one.pid for one in made]
    finally:
        for one in made:
            one.kill()
            one.wait()


def run(server: Server, database: postgres.Server, kind: str, running: Sequence[int]) -> tuple[float, float, float]:
    started = server.post(f"/galleries/{GALLERY[kind]}/backfills", kind=kind, chunk_size=CHUNKS[kind])
    while not (first := done_of(server, started["id"])[0]):
        time.sleep(0.005)
    total = server.http.get(f"/backfills/{started['id']}").json()["total"]  # planned since it was started
    before, began = (busy(running), busy(database._pids())), time.perf_counter()  # noqa: SLF001
    while (shown := done_of(server, started["id"]))[0] < total:
        assert shown[1] == "running", shown
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    used = [after - then for after, then in zip((busy(running), busy(database._pids())), before, strict=True)]  # noqa: SLF001
    while done_of(server, started["id"])[1] == "running":
        time.sleep(0.01)
    back(server.settings, "v2")
    return (total - first) / seconds, used[0] / seconds, used[1] / seconds


def busy(pids: Sequence[int]) -> float:
    """Seconds of processor time of processes so far, and of those that they started and that have ended."""
    ticks = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def show(kind: str, found: dict[int, list[tuple[float, ...]]]) -> None:
    speeds = {number: [statistics.median(each) for each in zip(*runs, strict=True)] for number, runs in found.items()}
    for number, (speed, theirs, its) in speeds.items():
        ratio = speed / speeds[NUMBERS[0]][0]
        told = f"{speed:,.0f} | {ratio:.2f} | {theirs:.2f} | {its:.2f} | {speed / (theirs + its):,.0f}"
        print(f"| {kind} | {number} | {told} |", flush=True)


if __name__ == "__main__":
    run_main(main)
