"""The cost of a query over several versions against one over a single version, and the cost of each kind of edge.

    python benchmarks/mixed_versions.py --items 100000 --items 1000000 --queries 200 --index exact

The same ITEMS (128 components, clustered unit vectors) are in galleries of 1, 2, 4 and 8 versions, joined by identity
edges to the version that queries. The galleries take turns, query by query, in random order, so that other load affects
all alike; a ratio is that of the medians. INDEX exact: every gallery must first find what brute force finds, so recall
is 1. With another INDEX every shard gets its index, recall is measured, and times are the processor's. The last table
times the transform of each edge kind, 128 to 128 components, against a scan of the same run.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from command_line import Count, Counts, run_main
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from index.edges.calibration import Calibration
from index.edges.graph import Graph
from index.edges.transform import load_transform
from index.engines.config import IndexConfig, IndexKind
from index.engines.memory import segments
from index.gallery import Gallery
from index.query.edge_maps import map_key
from index.space import Cosine
from index.version import EDGE_ARRAYS, EDGE_MODEL, Card, Edge, EdgeKind, Score, Version

ITEMS = [100_000, 1_000_000]
DIM, K, CLUSTERS = 128, 10, 2000
SHARDS = (1, 2, 4, 8)
MODES = ("raw", "calibrated", "rank")
HIDDEN = 256
"""Width of the MLP behind an `onnx` edge, as Drift-Adapter's."""

Vectors = NDArray[np.float32]


def main(items: Counts = ITEMS, queries: Count = 200, index: Literal["exact", "auto", "hnsw", "ivf"] = "exact") -> None:
    for size in items:
        mixed(size, queries, IndexConfig(kind=IndexKind(index)))
    edge_kinds(100_000, queries)


def mixed(size: int, count: int, config: IndexConfig) -> None:
    """One line a number of versions: p50, p99 and the ratio to one version."""
    exact = config.kind is IndexKind.EXACT
    clock = time.perf_counter if exact else time.thread_time
    items, queries = draw(size, count)
    galleries = {shards: gallery_of(items, shards, config) for shards in SHARDS}
    if exact:
        check(galleries, items, queries[:5])
    else:
        print({shards: f"recall {recall(gallery, items, queries):.4f}" for shards, gallery in galleries.items()})
    names = [(shards, mode) for shards in SHARDS for mode in MODES]
    generator = np.random.default_rng(3)
    spent: dict[tuple[int, str], list[float]] = {name: [] for name in names}
    for query_1D in queries[:, None]:
        # In random order: what the one before left in the cache must not favour any of them.
        for shards, mode in generator.permutation(np.array(names, object)):
            started = clock()
            galleries[shards].search("v0", lambda _: query_1D, K, mode=mode)  # noqa: B023
            spent[shards, mode].append(1000 * (clock() - started))
    print(f"\n{size} items x {DIM}, {config.kind}, one query at a time, {memory():.1f} GiB for four galleries")
    print("| versions | mode | p50 ms | p99 ms | ratio of p50 to one version |\n| --- | --- | --- | --- | --- |")
    for shards, mode in names:
        p50, p99 = np.percentile(spent[shards, mode], (50, 99))
        print(f"| {shards} | {mode} | {p50:.2f} | {p99:.2f} | {p50 / np.median(spent[1, mode]):.2f} |")


def edge_kinds(size: int, count: int) -> None:
    """One line an edge kind: the time of its transform for 1 and 64 queries, and its share of a scan."""
    items, queries = draw(size, max(count, 64))
    gallery = gallery_of(items, 1, IndexConfig(kind=IndexKind.EXACT))
    with tempfile.TemporaryDirectory() as folder:
        transforms = dict(query_edges(Path(folder)))
        print(
            f"\n| edge | 1 query, µs | 64 queries, µs | share of one scan of {size} items |\n| --- | --- | --- | --- |"
        )
        scan = median(lambda n: gallery.search("v0", lambda _: queries[n : n + 1], K), count)
        for kind, transform in transforms.items():
            one = median(lambda n: transform(queries[n : n + 1], queries[n : n + 1]), count)  # noqa: B023
            many = median(lambda _: transform(queries[:64], queries[:64]), count)  # noqa: B023
            print(f"| {kind} | {one * 1e6:.0f} | {many * 1e6:.0f} | {one / scan:.2%} |")
    print(f"scan of {size} items: {scan * 1e6:.0f} µs; `identity` changes nothing, `dual` costs one more encoding")


def draw(size: int, count: int) -> tuple[Vectors, Vectors]:
    """Clustered unit vectors: items and queries."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(CLUSTERS, DIM)).astype(np.float32)

    def near(n: int) -> Vectors:
        noise = 0.5 * generator.normal(size=(n, DIM)).astype(np.float32)
        return Cosine().normalise(centres[generator.integers(CLUSTERS, size=n)] + noise)

    return near(size), near(count)


def gallery_of(items: Vectors, shards: int, config: IndexConfig) -> Gallery:
    """The items spread over versions v0, v1, ...; v0 asks, and reaches the others by identity."""
    gallery = Gallery(config)
    names = [f"v{n}" for n in range(shards)]
    card = {name: Card(name, DIM, {"kind": "cosine"}) for name in names}
    edges = tuple(Edge("v0", name, EdgeKind.IDENTITY, {"cmc@1": Score(0.9, 0.8, 1.0)}) for name in names[1:])
    for name in reversed(names):
        gallery.declare(Version(card[name], Path(), edges if name == "v0" else ()))
    gallery.apply({(name, "encoded"): (range(n, len(items), shards), items[n::shards]) for n, name in enumerate(names)})
    routes = [Graph(edges).route("v0", name, frozenset()) for name in names]
    one_map = Calibration(np.array([0.2, 0.8]), np.array([0.1, 0.9]), 5.0)
    gallery.apply({}, calibrations=({map_key(route, "encoded"): one_map for route in routes if route}, {}))
    while gallery.build_index():
        pass
    return gallery


def recall(gallery: Gallery, items: Vectors, queries: Vectors) -> float:
    """The share of the ten best of all versions that are found."""
    truth = np.argsort(-(queries @ items.T), axis=1)[:, :K]
    found = gallery.search("v0", lambda _: queries, K, mode="raw").keys_QK
    return float(np.mean([np.isin(one, other).mean() for one, other in zip(truth, found, strict=True)]))


def check(galleries: dict[int, Gallery], items: Vectors, queries: Vectors) -> None:
    """Every gallery finds what brute force finds."""
    expected = np.sort(np.argsort(-(queries @ items.T), axis=1)[:, :K], axis=1)
    for gallery in galleries.values():
        for mode in ("raw", "calibrated"):
            found = gallery.search("v0", lambda _: queries, K, mode=mode).keys_QK
            assert np.array_equal(np.sort(found, axis=1), expected), "the galleries do not agree"


def query_edges(folder: Path) -> Iterator[tuple[str, Callable[[Vectors, Vectors], Vectors]]]:
    """Each kind that changes a query, ready to run."""
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(DIM, DIM)))[0].astype(np.float32)
    for kind in (EdgeKind.TRUNCATE, EdgeKind.ZERO_PAD, EdgeKind.MATRIX, EdgeKind.SLERP, EdgeKind.ONNX):
        if kind is EdgeKind.MATRIX:
            np.savez(folder / EDGE_ARRAYS[kind], weight=rotation)
        if kind is EdgeKind.SLERP:
            np.savez(folder / EDGE_ARRAYS[kind], weight=rotation, alpha=np.float32(0.5))
        if kind is EdgeKind.ONNX:
            save_mlp(folder / EDGE_MODEL[kind])
        new, old = (Card(name, DIM, {"kind": "cosine"}) for name in ("new", "old"))
        yield kind.value, load_transform(Edge("new", "old", kind, folder=folder), new, old)


def save_mlp(path: Path) -> None:
    """A residual MLP with random weights."""
    generator = np.random.default_rng(2)
    arrays = {
        "inner": generator.normal(size=(DIM, HIDDEN)).astype(np.float32),
        "outer": generator.normal(size=(HIDDEN, DIM)).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["embedding", "inner"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "outer"], ["c"]),
        helper.make_node("Add", ["embedding", "c"], ["out"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("N", DIM)) for name in ("embedding", "out")]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "mlp", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def median(work: Callable[[int], object], count: int) -> float:
    """Seconds of the median run."""
    spent = []
    for number in range(count):
        started = time.perf_counter()
        work(number % count)
        spent.append(time.perf_counter() - started)
    return float(np.median(spent))


def memory() -> float:
    """Largest resident size of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


if __name__ == "__main__":
    segments.SETTLED_SECONDS = 0.0  # nothing is written any more
    run_main(main)
