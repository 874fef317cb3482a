"""Approximate search in process against FAISS's own index over the same vectors: speed and recall, in one run.

    python benchmarks/index_speed.py --items 100000 --queries 500 --dim 128 --index hnsw --distribution clustered

ITEMS unit vectors of DIM numbers in one gallery, sealed by `build_index` as INDEX (hnsw or ivf). DISTRIBUTION
`clustered`: around 2,000 centres; `flat`: in 24 dimensions with a little noise, where neighbours are harder to
distinguish. Queries alternate, one at a time on one thread, between the gallery, its shard, FAISS on the index of the
largest segment with its measured effort, and FAISS's flat index. A ratio is that of the medians of processor time,
which other programs disturb least. Then filters that 50, 10, 1 and 0.1 % of the items pass: the recall against an exact
query of the same gallery, and its time. Last a start that finds the index on disk, and the bytes per item there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Literal
from unittest.mock import patch

import faiss
import numpy as np
import typer
from command_line import Count, run_main
from numpy.typing import NDArray

from index.engines.config import IndexConfig, IndexKind
from index.engines.memory.segment import Segment
from index.engines.memory.segments import SEAL_ROWS
from index.gallery import Gallery
from index.metadata.filter import parse_filter
from index.metadata.metadata import Item
from index.version import Card, Version

K, CLUSTERS = 10, 2000
FLAT_DIM, FLAT_NOISE = 24, 0.1
SHARES = (0.5, 0.1, 0.01, 0.001)

Vectors = NDArray[np.float32]
Find = Callable[[Vectors], Collection[int]]


def main(
    items: Annotated[int, typer.Option(min=SEAL_ROWS)] = 100_000,
    queries: Count = 500,
    dim: Count = 128,
    index: Literal["hnsw", "ivf"] = "hnsw",
    distribution: Literal["clustered", "flat"] = "clustered",
) -> None:
    faiss.omp_set_num_threads(1)
    x, q = {"clustered": draw, "flat": draw_flat}[distribution](items, queries, dim)
    with tempfile.TemporaryDirectory() as folder:
        measure(x, q, IndexConfig(kind=IndexKind(index)), Path(folder))


def measure(x: Vectors, queries: Vectors, config: IndexConfig, folder: Path) -> None:
    count, dim = len(x), x.shape[1]
    gallery = Gallery(config, folder)
    gallery.declare(Version(Card("v", dim, {"kind": "cosine"}), folder))
    metadata = [f'{{"share": {value:.6f}}}' for value in np.random.default_rng(1).random(count)]
    items = {key: Item(text) for key, text in enumerate(metadata)}
    fill(gallery, x, items)
    started = time.perf_counter()
    while gallery.build_index():
        pass
    print(f"{count} x {dim}: sealed and indexed in {time.perf_counter() - started:.1f} s")
    flat = faiss.IndexFlatIP(dim)
    flat.add(x)
    truth = flat.search(queries, K)[1]

    shard = gallery._shards.serving()["v", "encoded"]  # noqa: SLF001
    segment = max(shard.segments, key=lambda one: one.count())
    tuned, keys = segment.tuned, segment.keys_R
    assert tuned is not None, "no index was built"
    params = tuned.index.params(tuned.efforts[0])
    print(f"{len(shard.segments)} segments, {shard.indexed_count()} items in an index, efforts {tuned.efforts}")
    ways: dict[str, Find] = {
        "gallery": lambda query: gallery.search("v", lambda _: query, K).keys_QK[0],
        "shard": lambda query: shard.search(query, K).slots_QK[0],  # here the same as keys
        f"FAISS {config.kind}": lambda query: keys[tuned.index.index.search(query, K, params=params)[1][0]],
        "FAISS flat": lambda query: flat.search(query, K)[1][0],
    }
    compare(ways, queries, truth)
    filtered(gallery, queries)
    again(x, items, folder)


def draw(count: int, asked: int, dim: int) -> tuple[Vectors, Vectors]:
    random = np.random.default_rng(0)
    centres = random.normal(size=(CLUSTERS, dim)).astype(np.float32)

    def around(many: int) -> Vectors:
        x = centres[random.integers(0, CLUSTERS, many)] + 0.5 * random.normal(size=(many, dim)).astype(np.float32)
        return np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)

    return around(count), around(asked)


def draw_flat(count: int, asked: int, dim: int) -> tuple[Vectors, Vectors]:
    random = np.random.default_rng(0)
    axes = random.normal(size=(FLAT_DIM, dim)) / np.sqrt(FLAT_DIM)
    x = random.normal(size=(count + asked, FLAT_DIM)) @ axes + FLAT_NOISE * random.normal(size=(count + asked, dim))
    x = np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)
    return x[:count].copy(), x[count:].copy()


def fill(gallery: Gallery, x: Vectors, items: dict[int, Item], block: int = 10_000) -> None:
    for start in range(0, len(x), block):
        keys = range(start, min(start + block, len(x)))
        gallery.apply({("v", "encoded"): (keys, x[start : start + block])}, items={key: items[key] for key in keys})


def recall(found: Collection[Collection[int]], truth: Collection[Collection[int]]) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, truth, strict=True)]))


def compare(ways: dict[str, Find], queries: Vectors, truth: Collection[Collection[int]]) -> None:
    random = np.random.default_rng(2)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, list[Collection[int]]] = {name: [] for name in ways}
    for query in queries:
        for name in random.permutation(list(ways)):
            started = time.thread_time()
            found[name].append(ways[name](query[None]))
            spent[name].append(time.thread_time() - started)
    raw = list(ways)[2]
    floor = np.median(spent[raw])
    print(f"| | recall@10 | CPU p50 ms | p99 ms | speed against {raw} |\n| --- | --- | --- | --- | --- |")
    for name in ways:
        p50, p99 = np.percentile(spent[name], (50, 99))
        print(f"| {name} | {recall(found[name], truth):.4f} | {p50 * 1e3:.3f} | {p99 * 1e3:.3f} | {floor / p50:.2f} |")


def filtered(gallery: Gallery, queries: Vectors) -> None:
    print("| items that pass | recall@10 | CPU p50 ms | exact | by the index |\n| --- | --- | --- | --- | --- |")
    for share in SHARES:
        where = parse_filter({"field": "share", "range": {"lt": share}})
        found: dict[bool, list[list[int]]] = {exact: [] for exact in (False, True)}
        spent: dict[bool, list[float]] = {exact: [] for exact in (False, True)}
        for query_1D in queries[:100, None]:
            for exact in (False, True):
                started = time.thread_time()
                answer = gallery.search("v", lambda _: query_1D, K, filter=where, exact=exact)  # noqa: B023
                spent[exact].append(time.thread_time() - started)
                found[exact].append([key for key in answer.keys_QK[0] if key >= 0])
                if not exact:
                    how = answer.shards[0].scanned
        p50, exact_p50 = np.median(spent[False]), np.median(spent[True])
        row = (f"{share:.1%}", f"{recall(found[False], found[True]):.4f}", f"{p50 * 1e3:.3f}", f"{exact_p50 * 1e3:.3f}")
        print(f"| {' | '.join(row)} | {how.approximate}, effort {how.effort} |")


def again(x: Vectors, items: dict[int, Item], folder: Path) -> None:
    """What a start finds: nothing may be built."""
    started = time.perf_counter()
    other = Gallery(folder=folder)
    other.declare(Version(Card("v", x.shape[1], {"kind": "cosine"}), folder))
    with patch.object(Segment, "build_index", side_effect=SystemExit("an index was built again")):
        fill(other, x, items)
    seconds = time.perf_counter() - started
    print(f"loaded in {seconds:.1f} s, {other.indexed_count()} of {len(x)} items by the index on disk")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{size / len(x):.0f} bytes an item on disk; the vector itself has {4 * x.shape[1]}")


if __name__ == "__main__":
    run_main(main)
