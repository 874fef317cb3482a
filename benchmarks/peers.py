"""Approximate search in process: Regraft against widely used libraries and embedded databases, in one run.

    python benchmarks/peers.py --items 10000 --items 100000 --queries 300 --engine 'FAISS flat' --engine hnswlib

The same ITEMS clustered unit vectors of DIM numbers in each ENGINE (default: all) that is installed (`pip install
hnswlib usearch qdrant-edge-py lancedb chromadb milvus-lite pymilvus`; FAISS always). Each engine uses the least of its
efforts that reaches recall@10 0.95 and 0.99 with a thousand other queries. The queries of the table then alternate
between all engines in random order, one at a time and 64 in one call, so that other load affects all alike: compare
ratios. The search parameters of FAISS are created once, because creating them costs as much as a small search. `MiB` is
the growth of the process.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import faiss
import numpy as np
import typer
from command_line import Count, Counts, choice_of, run_main
from index_speed import Vectors, draw, fill, recall

from index.engines.config import IndexConfig
from index.gallery import Gallery
from index.metadata.metadata import Item
from index.version import Card, Version

ITEMS = [10_000, 100_000]
K, LINKS, BUILD = 10, 32, 60
AIMS = (0.95, 0.99)
EFFORTS = (10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
BATCH, TOGETHER = 5_000, 64
CHOOSING = 1_000
"""Queries that efforts are chosen with; by the few that are timed, luck would choose."""
SLOW_ABOVE = 100_000
"""Of more items, engines that take minutes to build are left out, and the table says so by their absence."""


Found = Collection[Collection[int]]
"""The numbers of the items found for each query, best first; arrays or lists."""


class Engine(Protocol):
    """One engine, filled when it is made."""

    @property
    def efforts(self) -> Sequence[int]:
        """What `search` may be asked to spend, ascending; one 0 where nothing can be chosen."""

    def search(self, queries_QD: Vectors, effort: int) -> Found: ...


class Regraft:
    """The whole gallery: plan, search, scores, keys."""

    efforts = (0,)

    def __init__(self, vectors: Vectors, folder: Path, aim: float = AIMS[-1]) -> None:
        self._gallery = Gallery(IndexConfig(recall=aim))
        self._gallery.declare(Version(Card("v", vectors.shape[1], {"kind": "cosine"}), folder))
        fill(self._gallery, vectors, {key: Item("{}") for key in range(len(vectors))})
        while self._gallery.build_index():
            pass

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        return self._gallery.search("v", lambda _: queries_QD, K).keys_QK


class Regraft95(Regraft):
    """The same with a lower aim."""

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        super().__init__(vectors, folder, AIMS[0])


class FaissFlat:
    """A scan."""

    efforts = (0,)

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        return self._index.search(queries_QD, K)[1]


class FaissHnsw:
    """A graph."""

    efforts = EFFORTS

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        self._index = faiss.IndexHNSWFlat(vectors.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
        self._index.hnsw.efConstruction = BUILD
        self._index.add(vectors)
        self._params = {effort: faiss.SearchParametersHNSW(efSearch=effort) for effort in self.efforts}  # type: ignore[attr-defined]

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        return self._index.search(queries_QD, K, params=self._params[effort])[1]


class FaissIvf:
    """Inverted lists."""

    efforts = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        lists = int(4 * np.sqrt(len(vectors)))
        self._quantizer = faiss.IndexFlatIP(vectors.shape[1])
        self._index = faiss.IndexIVFFlat(self._quantizer, vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
        self._index.cp.min_points_per_centroid = 1
        self._index.train(vectors[: 40 * lists])
        self._index.add(vectors)
        self._params = {effort: faiss.SearchParametersIVF(nprobe=effort) for effort in self.efforts}  # type: ignore[call-arg]

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        return self._index.search(queries_QD, K, params=self._params[effort])[1]


class Hnswlib:
    """The graph's first implementation."""

    efforts = EFFORTS

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        import hnswlib

        self._index = hnswlib.Index("ip", vectors.shape[1])
        self._index.init_index(len(vectors), M=LINKS // 2, ef_construction=BUILD)
        self._index.set_num_threads(1)
        self._index.add_items(vectors)

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        self._index.set_ef(effort)
        return np.asarray(self._index.knn_query(queries_QD, K)[0])


class Usearch:
    """A graph over half precision."""

    efforts = EFFORTS

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        from usearch.index import Index

        self._index = Index(
            ndim=vectors.shape[1], metric="ip", dtype="f16", connectivity=LINKS // 2, expansion_add=BUILD
        )
        self._index.add(np.arange(len(vectors)), vectors, threads=1)

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        self._index.expansion_search = effort
        found = self._index.search(queries_QD, K, threads=1).keys  # of one query a single row
        return [[int(key) for key in row] for row in found.reshape(len(queries_QD), -1)]


class QdrantEdge:
    """Qdrant's own shard, in this process."""

    efforts = EFFORTS

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        import qdrant_edge as qdrant

        self._qdrant = qdrant
        config = qdrant.EdgeConfig(
            vectors=qdrant.EdgeVectorParams(size=vectors.shape[1], distance=qdrant.Distance.Dot),
            hnsw_config=qdrant.HnswIndexConfig(m=LINKS // 2, ef_construct=BUILD, full_scan_threshold=10),
            optimizers=qdrant.EdgeOptimizersConfig(indexing_threshold=1_000, default_segment_number=1),
            max_search_threads=1,
        )
        self._shard = qdrant.EdgeShard.create(str(folder), config)
        for start in range(0, len(vectors), BATCH):
            block = vectors[start : start + BATCH].tolist()
            points = [qdrant.Point(start + n, vector, None) for n, vector in enumerate(block)]
            self._shard.update(qdrant.UpdateOperation.upsert_points(points))
        self._shard.optimize()

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        return [self._search(query_D, effort) for query_D in queries_QD]

    def _search(self, query_D: Vectors, effort: int) -> Sequence[int]:
        asked = self._qdrant.SearchRequest(
            self._qdrant.Query.Nearest(query_D.tolist()), K, params=self._qdrant.SearchParams(hnsw_ef=effort)
        )
        return [int(point.id) for point in self._shard.search(asked)]


class LanceDb:
    """Files of columns; its graph over int8 codes proposes, the vectors score."""

    efforts = tuple(effort for effort in EFFORTS if effort >= 2 * K)

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        import lancedb.index
        import pyarrow as pa

        flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        table = pa.table({"key": np.arange(len(vectors)), "vector": flat})
        self._table = lancedb.connect(str(folder)).create_table("t", table)
        graph = lancedb.index.HnswSq(distance_type="dot", num_partitions=1, m=LINKS // 2)
        self._table.create_index("vector", config=graph)

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        return [self._search(query_D, effort) for query_D in queries_QD]

    def _search(self, query_D: Vectors, effort: int) -> Sequence[int]:
        asked = self._table.search(query_D).distance_type("dot").nprobes(1).ef(effort).refine_factor(2).limit(K)
        keys: list[int] = asked.select(["key", "_distance"]).to_arrow()["key"].to_pylist()
        return keys


class Chroma:
    """Chroma inside the process; its effort is a property of the collection."""

    efforts = (0,)

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        import chromadb

        client = chromadb.PersistentClient(str(folder), chromadb.Settings(anonymized_telemetry=False))
        self._collection = client.create_collection("items", configuration={"hnsw": {"space": "ip", "ef_search": 64}})
        for start in range(0, len(vectors), BATCH):
            block = vectors[start : start + BATCH]
            self._collection.add([str(start + n) for n in range(len(block))], block)

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        found = self._collection.query(queries_QD, n_results=K, include=[])["ids"]
        return [[int(key) for key in row] for row in found]


class MilvusLite:
    """Milvus's interface over a server of its own in Python, which compares all rows whatever index is asked for."""

    efforts = (0,)

    def __init__(self, vectors: Vectors, folder: Path) -> None:
        from pymilvus import MilvusClient

        folder.mkdir(exist_ok=True)
        self._client = MilvusClient(str(folder / "items.db"))
        self._client.create_collection("items", dimension=vectors.shape[1], metric_type="IP")
        for start in range(0, len(vectors), BATCH):
            block = vectors[start : start + BATCH]
            self._client.insert("items", [{"id": start + n, "vector": vector} for n, vector in enumerate(block)])

    def search(self, queries_QD: Vectors, effort: int) -> Found:
        found = self._client.search("items", list(queries_QD), limit=K)
        return [[int(hit["id"]) for hit in hits] for hits in found]

    @staticmethod
    def stop() -> None:
        """Stop the servers: at the end of the process they would write their rows into a folder that is removed."""
        if "milvus_lite" in sys.modules:
            sys.modules["milvus_lite.server_manager"].server_manager_instance.release_all()


ENGINES: dict[str, tuple[Callable[[Vectors, Path], Engine], str, bool]] = {
    "Regraft, aim 0.99": (Regraft, "faiss", True),
    "Regraft, aim 0.95": (Regraft95, "faiss", True),
    "FAISS flat": (FaissFlat, "faiss", True),
    "FAISS HNSW": (FaissHnsw, "faiss", True),
    "FAISS IVF": (FaissIvf, "faiss", True),
    "hnswlib": (Hnswlib, "hnswlib", True),
    "usearch, float16": (Usearch, "usearch", True),
    "Qdrant's embedded engine": (QdrantEdge, "qdrant_edge", False),
    "LanceDB, IVF_HNSW_SQ": (LanceDb, "lancedb", False),
    "Chroma, embedded": (Chroma, "chromadb", False),
    "milvus-lite": (MilvusLite, "milvus_lite", False),
}
"""Name -> the engine, the package it needs, and whether it builds a million in minutes."""


def main(
    items: Counts = ITEMS,
    queries: Annotated[int, typer.Option(min=TOGETHER)] = 300,
    dim: Count = 128,
    engines: Annotated[list[str] | None, typer.Option("--engine", parser=choice_of(ENGINES))] = None,
) -> None:
    faiss.omp_set_num_threads(1)
    print("| items | engine | effort | recall@10 | p50 ms | p99 ms | queries/s | 64 in a call: /s | built s | MiB |")
    print(f"|{' --- |' * 10}")
    for size in items:
        with tempfile.TemporaryDirectory() as scratch:
            measure(size, queries, dim, engines or list(ENGINES), Path(scratch))
            MilvusLite.stop()


def measure(size: int, count: int, dim: int, chosen: Sequence[str], scratch: Path) -> None:
    vectors, asked = draw(size, count + CHOOSING, dim)
    nearest = faiss.knn(asked, vectors, K, metric=faiss.METRIC_INNER_PRODUCT)[1]
    queries, truth = asked[:count], nearest[:count]
    built: dict[str, tuple[Engine, float, float]] = {}
    for name, (engine, package, fast) in ENGINES.items():
        if name in chosen and importlib.util.find_spec(package) and (fast or size <= SLOW_ABOVE):
            tell(f"{size} x {dim}: building {name}")
            before, started = resident_mib(), time.perf_counter()
            made = engine(vectors, scratch / package)
            built[name] = made, time.perf_counter() - started, resident_mib() - before
    ways = {}
    for name, (made, *_) in built.items():
        for aim in AIMS if len(made.efforts) > 1 else (0.0,):
            ways[name, least(made, aim, asked[count:], nearest[count:])] = made
    tell(f"{size} x {dim}: asking")
    random = np.random.default_rng(2)
    one: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    many: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    found: dict[tuple[str, int], list[Collection[int]]] = {way: [] for way in ways}
    for together, spent in ((1, one), (TOGETHER, many)):
        for start in range(0, len(queries) - together + 1, together):
            for place in random.permutation(len(ways)):
                way = list(ways)[place]
                started = time.perf_counter()
                answer = ways[way].search(queries[start : start + together], way[1])
                spent[way].append(time.perf_counter() - started)
                found[way] += list(answer) if together == 1 else []
    for (name, effort), took in one.items():
        _, seconds, mib = built[name]
        speed = " | ".join(f"{ms:.3f}" for ms in np.percentile(took, (50, 99)) * 1e3)
        gained = recall(found[name, effort], truth)
        cost = f"{1 / np.mean(took):,.0f} | {TOGETHER / np.median(many[name, effort]):,.0f} | {seconds:.1f} | {mib:.0f}"
        print(f"| {size} | {name} | {effort or '-'} | {gained:.3f} | {speed} | {cost} |", flush=True)


def tell(text: str) -> None:
    """Progress: a million take many minutes to build."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def least(engine: Engine, aim: float, queries: Vectors, truth: Any) -> int:
    """The least effort that reaches the aim; the largest where none does."""
    for effort in engine.efforts:
        if recall(engine.search(queries, effort), truth) >= aim:
            return effort
    return engine.efforts[-1]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


if __name__ == "__main__":
    run_main(main)
