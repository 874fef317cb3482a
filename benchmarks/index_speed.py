"""Approximate search in process, beside FAISS's own index over the same vectors: speed and recall, in one run.

    python benchmarks/index_speed.py [ITEMS] [QUERIES] [DIM]

ITEMS (default 100000) clustered unit vectors of DIM (128) numbers in one gallery, sealed by `build_index`, and in a
FAISS HNSW and a flat index. Queries take turns between all of them, one at a time, one thread; a ratio is that of the
medians. FAISS's `efSearch` is the least that reaches the gallery's own recall. Then filters that 50, 10, 1 and 0.1 % of
the items pass: the recall against an exact query of the same gallery, and its time. Last a start that finds the index
on disk, and the bytes of an item there.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from index.engines.segment import Segment
from index.filter import parse_filter
from index.gallery import Gallery
from index.metadata import Item
from index.version import Card, Version

K, CLUSTERS, LINKS, BUILD = 10, 2000, 32, 60
EFFORTS = (10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256)
SHARES = (0.5, 0.1, 0.01, 0.001)

Vectors = NDArray[np.float32]
Find = Callable[[Vectors], Sequence[int]]


def main(items: str = "100000", queries: str = "500", dim: str = "128") -> None:
    faiss.omp_set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measure(int(items), int(queries), int(dim), Path(folder))


def measure(count: int, asked: int, dim: int, folder: Path) -> None:
    x, queries = draw(count, asked, dim)
    gallery = Gallery(folder=folder)
    gallery.declare(Version(Card("v", dim, {"kind": "cosine"}), folder))
    metadata = [f'{{"share": {value:.6f}}}' for value in np.random.default_rng(1).random(count)]
    items = {key: Item(text) for key, text in enumerate(metadata)}
    fill(gallery, x, items)
    started = time.perf_counter()
    while gallery.build_index():
        pass
    print(f"{count} x {dim}: sealed and indexed in {time.perf_counter() - started:.1f} s")
    graph = faiss.IndexHNSWFlat(dim, LINKS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = BUILD
    started = time.perf_counter()
    graph.add(x)
    print(f"FAISS's HNSW built in {time.perf_counter() - started:.1f} s")
    flat = faiss.IndexFlatIP(dim)
    flat.add(x)
    right = flat.search(queries, K)[1]

    def ours(query: Vectors) -> Sequence[int]:
        return gallery.search("v", lambda _: query, K).keys_QK[0]

    gained = recall([ours(query[None]) for query in queries], right)
    effort = next(
        (ef for ef in EFFORTS if recall(graph.search(queries, K, params=params(ef))[1], right) >= gained), EFFORTS[-1]
    )
    shard = gallery._shards.serving()["v", "encoded"]  # noqa: SLF001
    ways: dict[str, Find] = {
        "gallery": ours,
        "shard": lambda query: shard.search(query, K).keys_QK[0],
        f"FAISS HNSW, efSearch {effort}": lambda query: graph.search(query, K, params=params(effort))[1][0],
        "FAISS flat": lambda query: flat.search(query, K)[1][0],
    }
    compare(ways, queries, right)
    filtered(gallery, queries)
    again(x, items, folder)


def params(effort: int) -> object:
    return faiss.SearchParametersHNSW(efSearch=effort)


def draw(count: int, asked: int, dim: int) -> tuple[Vectors, Vectors]:
    random = np.random.default_rng(0)
    centres = random.normal(size=(CLUSTERS, dim)).astype(np.float32)

    def around(many: int) -> Vectors:
        x = centres[random.integers(0, CLUSTERS, many)] + 0.5 * random.normal(size=(many, dim)).astype(np.float32)
        return np.ascontiguousarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)

    return around(count), around(asked)


def fill(gallery: Gallery, x: Vectors, items: dict[int, Item], block: int = 10_000) -> None:
    for start in range(0, len(x), block):
        keys = range(start, min(start + block, len(x)))
        gallery.apply({("v", "encoded"): (keys, x[start : start + block])}, items={key: items[key] for key in keys})


def recall(found: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, right, strict=True)]))


def compare(ways: dict[str, Find], queries: Vectors, right: Sequence[Sequence[int]]) -> None:
    random, spent = np.random.default_rng(2), {name: [] for name in ways}
    found: dict[str, list[Sequence[int]]] = {name: [] for name in ways}
    for query in queries:
        for name in random.permutation(list(ways)):
            started = time.perf_counter()
            found[name].append(ways[name](query[None]))
            spent[name].append(time.perf_counter() - started)
    floor = np.median(spent[next(name for name in ways if "HNSW" in name)])
    print("| | recall@10 | p50 ms | p99 ms | speed against FAISS HNSW |\n| --- | --- | --- | --- | --- |")
    for name in ways:
        p50, p99 = np.percentile(spent[name], (50, 99))
        print(f"| {name} | {recall(found[name], right):.4f} | {p50 * 1e3:.3f} | {p99 * 1e3:.3f} | {floor / p50:.2f} |")


def filtered(gallery: Gallery, queries: Vectors) -> None:
    print("| items that pass | recall@10 | p50 ms | exact p50 ms |\n| --- | --- | --- | --- |")
    for share in SHARES:
        where = parse_filter({"field": "share", "range": {"lt": share}})
        found, right, spent, exact_spent = [], [], [], []
        for query in queries[:100]:
            for exact, into, times in ((False, found, spent), (True, right, exact_spent)):
                started = time.perf_counter()
                keys = gallery.search("v", lambda _, q=query: q[None], K, filter=where, exact=exact).keys_QK[0]
                times.append(time.perf_counter() - started)
                into.append([key for key in keys if key >= 0])
        p50, exact_p50 = np.median(spent), np.median(exact_spent)
        print(f"| {share:.1%} | {recall(found, right):.4f} | {p50 * 1e3:.3f} | {exact_p50 * 1e3:.3f} |")


def again(x: Vectors, items: dict[int, Item], folder: Path) -> None:
    """What a start finds: nothing may be built."""
    Segment.index_by = lambda *_: sys.exit("an index was built again")  # type: ignore[method-assign, assignment]
    started = time.perf_counter()
    other = Gallery(folder=folder)
    other.declare(Version(Card("v", x.shape[1], {"kind": "cosine"}), folder))
    fill(other, x, items)
    print(f"loaded in {time.perf_counter() - started:.1f} s, {other.indexed()} of {len(x)} items by the index on disk")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{size / len(x):.0f} bytes an item on disk; the vector itself has {4 * x.shape[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
