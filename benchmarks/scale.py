"""The needs of 1 M to 1 G items, from measured costs of one item, and a simulation of backfill, queries and failures.

    python benchmarks/scale.py

Prints the tables of docs/scale.md. `COSTS` are measured or marked as assumed; each names its command, and
docs/performance.md the date. Everything else is computed from them here and is an estimate. The simulation has a fixed
seed and no clock.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
DIM = 128


@dataclass(frozen=True)
class Costs:
    """Of one machine with two cores, for vectors of 128 numbers and two metadata fields."""

    memory: float = 1_200.0
    """Bytes an item in each API process, vectors and index with it: benchmarks/million.py."""
    remote: float = 611.0
    """Bytes an item in each API process where an engine holds the vectors: benchmarks/engines.py, pgvector, 50,000."""
    sql: float = 715.0
    """Bytes an item in the database: docs/scale.md, vectors in the store of images."""
    places: float = 181.0
    """The same where vectors lie in files, REGRAFT_VECTORS=objects."""
    files: float = 536.0
    """Bytes an item of these files."""
    indexes: float = 1_289.0
    """Bytes an item below indexes/ of an API machine: what benchmarks/million.py finds on disk, 2,004, less `sql`."""
    image: float = 20_000.0
    """Bytes of a stored image: an assumption."""
    ingest: float = 19.0 / 1e6
    """Seconds an item, arrays over HTTP, SQLite: benchmarks/million.py."""
    seal: float = 37.6 / 1e6
    """Seconds an item until it is in an index, after the last write: benchmarks/million.py."""
    bring: float = 461 / 1e6
    """Seconds of processor an item that is stored and brought to pgvector, by the process that does it and the server:
    benchmarks/engines.py, 50,000. A graph of more rows takes longer to grow."""
    move: float = 80 / 1e6
    """Seconds of processor an item whose vector is moved into files: docs/scale.md."""
    load: float = 1.85 / 1e6
    """Seconds an item from kill -9 to the first answer, from a snapshot: benchmarks/million.py."""
    encode: float = 0.005
    """Seconds an item of a real encoder on one core: an assumption; the part of a backfill that workers share."""
    commit: float = 175 / 1e6
    """Seconds of PostgreSQL's processor an item of a transform, whose computing takes next to nothing:
    benchmarks/workers.py, one worker, 0.35 of a core for 2,004 items a second. Taken to come one after the other, as a
    gallery's numbers of the feed do: no more items a second, however many workers."""
    query: float = 0.0006
    """Seconds of a query, p50, at a million items: benchmarks/million.py, the slowest of its three."""
    growth: float = 0.7
    """A query takes so many times more, as a power of the items: one graph's search grows slowly, but segments grow in
    number where one index of all would miss the recall aim (decision 0042). An assumption."""


COSTS = Costs()


def main() -> None:
    print("\n".join(needs(COSTS)), end="\n\n")
    print("\n".join(saturation(COSTS)), end="\n\n")
    print("\n".join(backfills(COSTS)), end="\n\n")
    print("\n".join(queries(COSTS)))


def needs(costs: Costs) -> Iterator[str]:
    columns = (
        "memory of an API process | external engine | SQL | with `objects`: SQL, files | indexes | images | start |"
    )
    yield f"| items | {columns}"
    yield f"|{' --- |' * 8}"
    for items in SIZES:
        processes = [as_bytes(items * one) for one in (costs.memory, costs.remote, costs.sql)]
        apart = f"{as_bytes(items * costs.places)} and {as_bytes(items * costs.files)}"
        rest = [as_bytes(items * one) for one in (costs.indexes, costs.image)]
        yield f"| {named(items)} | {' | '.join([*processes, apart, *rest])} | {as_time(items * costs.load)} |"


def saturation(costs: Costs) -> Iterator[str]:
    one = "ingest | sealing | into pgvector | vectors into files | a backfill's commits"
    yield f"| items | {one} | 1 worker | 16 workers | 256 workers |"
    yield f"|{' --- |' * 9}"
    for items in SIZES:
        times = [items * one for one in (costs.ingest, costs.seal, costs.bring, costs.move, costs.commit)]
        times += [items * max(costs.encode / workers, costs.commit) for workers in (1, 16, 256)]
        yield f"| {named(items)} | {' | '.join(map(as_time, times))} |"


def backfills(costs: Costs) -> Iterator[str]:
    yield "| workers | killed a day, each | hours | items a second | computed twice | database busy |"
    yield f"|{' --- |' * 6}"
    for workers in (1, 2, 4, 16, 64, 256):
        for kills in (0.0, 10.0):
            run = backfill(costs, 10_000_000, workers, kills)
            told = f"{run.seconds / 3600:.1f} | {run.items / run.seconds:,.0f} | {100 * run.twice:.2f} %"
            yield f"| {workers} | {kills:.0f} | {told} | {100 * run.busy:.0f} % |"


@dataclass(frozen=True)
class Backfill:
    """How one ended: seconds, the items, which share was computed more than once, and the database's busy share."""

    seconds: float
    items: int
    twice: float
    busy: float


CHUNK, LEASE, RESTART = 256, 30.0, 10.0


def backfill(costs: Costs, items: int, workers: int, kills_a_day: float, seed: int = 0) -> Backfill:
    """Workers claim chunks, encode, and commit one after the other; one that is killed loses its chunk to the lease."""
    draw = random.Random(seed)
    todo, done, twice = -(-items // CHUNK), 0, 0
    every = 86_400 / kills_a_day if kills_a_day else 0.0
    database_free = busy = now = 0.0
    free = [(0.0, number) for number in range(workers)]  # when each worker can claim
    dies = [draw.expovariate(1 / every) if every else float("inf") for _ in free]
    back: list[float] = []  # when the chunks of those that were killed may be claimed again
    last = 0.0
    while done < -(-items // CHUNK):
        now, worker = heapq.heappop(free)
        if back and back[0] <= now:
            heapq.heappop(back)
            twice += 1
        elif todo:
            todo -= 1
        elif back:
            heapq.heappush(free, (back[0], worker))
            continue
        else:
            continue  # nothing left to claim; the others end theirs
        computed = now + CHUNK * costs.encode * draw.uniform(0.9, 1.1)
        if computed > dies[worker]:
            heapq.heappush(back, max(dies[worker], now) + LEASE)
            heapq.heappush(free, (max(dies[worker], now) + RESTART, worker))
            dies[worker] = max(dies[worker], now) + RESTART + draw.expovariate(1 / every)
            continue
        database_free = max(database_free, computed) + CHUNK * costs.commit
        busy += CHUNK * costs.commit
        heapq.heappush(free, (database_free, worker))
        last, done = max(last, database_free), done + 1
    return Backfill(last, items, twice * CHUNK / items, busy / last)


def queries(costs: Costs) -> Iterator[str]:
    yield "| items | API processes | asked a second | p50 ms | p99 ms | p99 while one is down |"
    yield f"|{' --- |' * 6}"
    for items, processes in ((1_000_000, 2), (1_000_000, 8), (10_000_000, 8), (100_000_000, 16)):
        service = costs.query * (items / 1_000_000) ** costs.growth
        rate = 0.6 * processes / service
        whole, less = (waits(service, rate, up) for up in (processes, processes - 1))
        p99 = f"{1000 * less[1]:.1f}" if rate * service < processes - 1 else "grows without end"
        told = f"{rate:,.0f} | {1000 * whole[0]:.1f} | {1000 * whole[1]:.1f}"
        yield f"| {named(items)} | {processes} | {told} | {p99} |"


def waits(service: float, rate: float, processes: int, asked: int = 60_000, seed: int = 0) -> tuple[float, float]:
    """p50 and p99 seconds of queries that come by chance and go to the processes in turn."""
    draw = random.Random(seed)
    free, now, took = [0.0] * processes, 0.0, []
    for number in range(asked):
        now += draw.expovariate(rate)
        turn = number % processes
        free[turn] = max(free[turn], now) + service * draw.lognormvariate(-0.06, 0.35)
        took.append(free[turn] - now)
    took.sort()
    return took[asked // 2], took[asked * 99 // 100]


def named(items: int) -> str:
    return f"{items // 1_000_000_000} G" if items >= 1_000_000_000 else f"{items // 1_000_000} M"


def as_bytes(size: float) -> str:
    return f"{size / 2**40:,.1f} TiB" if size >= 2**40 else f"{size / 2**30:,.1f} GiB"


def as_time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


if __name__ == "__main__":
    main()
