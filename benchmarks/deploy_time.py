"""The time of a deployment in memory, alone and beside queries, against moving the vectors.

    python benchmarks/deploy_time.py --items 100000 --items 1000000 --swaps 10

ITEMS of 128 components have an embedding by v1, and every fifth item also one by v2; an identity edge joins the
versions. The gallery changes from v1 to v2 and back, SWAPS times each, so that each time another version serves a fifth
of the items: first alone, then while one thread queries without a pause. `wait` is how much longer the slowest query
took than the median; the column beside it is the same while nothing is swapped, which is the noise of the machine.
Moving vectors is the earlier implementation: vectors leave one shard for the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from command_line import Count, Counts, run_main
from numpy.typing import NDArray

from index.engines.config import IndexConfig, IndexKind
from index.gallery import Gallery
from index.space import Cosine
from index.version import Card, Edge, EdgeKind, Score, Version

ITEMS = [100_000, 1_000_000]
DIM, K, SHARE = 128, 10, 5
MOVES = 2
"""Times vectors are moved: it takes seconds."""
OLD, NEW = ("v1", "encoded"), ("v2", "encoded")

Vectors = NDArray[np.float32]
Placed = dict[tuple[str, str], tuple[range, Vectors]]


def main(items: Counts = ITEMS, swaps: Count = 10) -> None:
    print("| items | moving | how | alone ms | beside queries ms | longest ms | wait ms | wait at rest ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in items:
        vectors = Cosine().normalise(np.random.default_rng(0).normal(size=(size, DIM)).astype(np.float32))
        rule = measured(filled(vectors, beside=True), vectors, swap, 2 * swaps)
        some = range(0, size, SHARE)
        ways: list[Placed] = [{NEW: (some, vectors[::SHARE])}, {OLD: (some, vectors[::SHARE])}]
        moves = measured(filled(vectors, beside=False), vectors, partial(move, ways), 2 * MOVES)
        for how, (alone, beside, longest, wait, rest) in (("a rule", rule), ("moved vectors", moves)):
            numbers = f"{alone:.1f} | {beside:.1f} | {longest:.1f} | {wait:.1f} | {rest:.1f} | {alone / rule[0]:.0f}"
            print(f"| {size} | {size // SHARE} | {how} | {numbers} |", flush=True)


def swap(gallery: Gallery, number: int) -> None:
    """Deploy the new version, or roll back."""
    gallery.set_version_order(("v1", "v2") if number % 2 else ("v2", "v1"))


def move(ways: Sequence[Placed], gallery: Gallery, number: int) -> None:
    """Move the vectors to the other version, or back."""
    gallery.apply(ways[number % 2])


def measured(gallery: Gallery, items: Vectors, change: Callable[[Gallery, int], object], times: int) -> list[float]:
    """Milliseconds: a change alone, beside queries, the longest of those, a query's wait beside them and at rest."""
    alone = [timed(partial(change, gallery, number)) for number in range(times)]
    gallery.search("v2", lambda _: items[:1], K)  # imports FAISS
    with asking(gallery, items[:1]) as undisturbed:
        time.sleep(0.1 * times)
    with asking(gallery, items[:1]) as took:
        beside = []
        for number in range(times):
            time.sleep(0.1)
            beside.append(timed(partial(change, gallery, number)))
    assert gallery.items_by_version() == {"v1": len(items)}, "it is not back where it began"
    waits = (max(queries) - float(np.median(queries)) for queries in (took, undisturbed))
    return [float(np.median(alone)), float(np.median(beside)), max(beside), *waits]


def timed(work: Callable[[], object]) -> float:
    """Milliseconds it takes."""
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def filled(items: Vectors, *, beside: bool) -> Gallery:
    """Every item in v1; `beside`: a fifth of them in v2 as well, which serves none yet."""
    gallery = Gallery(IndexConfig(kind=IndexKind.EXACT))
    edge = Edge("v2", "v1", EdgeKind.IDENTITY, {"cmc@1": Score(0.9, 0.8, 1.0)})
    for name, edges in (("v1", ()), ("v2", (edge,))):
        gallery.declare(Version(Card(name, DIM, {"kind": "cosine"}), Path(), edges))
    placed: Placed = {OLD: (range(len(items)), items)}
    if beside:
        placed[NEW] = range(0, len(items), SHARE), items[::SHARE]
    gallery.apply(placed, order=("v1", "v2"))
    return gallery


@contextmanager
def asking(gallery: Gallery, queries: Vectors) -> Iterator[list[float]]:
    """Ask without a pause; gives the list of milliseconds that queries took."""
    took: list[float] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            started = time.perf_counter()
            gallery.search("v2", lambda _: queries, K)
            took.append(1000 * (time.perf_counter() - started))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    run_main(main)
