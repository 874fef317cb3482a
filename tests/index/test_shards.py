"""A gallery under random writes, orders, edges, sealing and restarts, by every engine, compared with a dictionary."""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.engines.config import IndexConfig, IndexKind, Storage
from index.engines.digest import digests
from index.engines.memory import approximate, segment, segments
from index.engines.remote.base import Entries
from index.errors import NoRoute
from index.gallery import Gallery
from index.metadata.filter import parse_filter
from index.metadata.metadata import Item
from index.query.search_result import SearchResult
from index.version import Edge, EdgeKind, Score
from staging.external.fake_engine import FakeEngine

VERSIONS = ("a", "b", "c")
ORIGINS = ("encoded", "transformed")
DIM = 3

held = st.dictionaries(st.sampled_from(VERSIONS), st.sampled_from(ORIGINS), min_size=0, max_size=3)
write = st.dictionaries(st.integers(0, 11), held, max_size=6)
orders = st.permutations(VERSIONS).flatmap(lambda all_: st.integers(0, 3).map(lambda count: tuple(all_[:count])))
EDGES = (("a", "b"), ("b", "c"), ("a", "c"))
work = st.sampled_from(["nothing", "index", "move", "restart", "restart from an earlier snapshot"])
step = st.tuples(st.none() | write, st.none() | orders, st.none() | st.sampled_from(EDGES), work)
CONFIGS = [
    IndexConfig(kind=IndexKind.EXACT),
    IndexConfig(),
    IndexConfig(kind=IndexKind.PGVECTOR),
    *(IndexConfig(kind=kind, storage=storage) for kind in (IndexKind.HNSW, IndexKind.IVF) for storage in Storage),
]


@dataclass
class Model:
    """Key -> version -> (origin, vector)."""

    holds: dict[int, dict[str, tuple[str, np.ndarray]]] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    edges: set[tuple[str, str]] = field(default_factory=set)
    seqs: Counter[int] = field(default_factory=Counter)
    engine: FakeEngine = field(default_factory=FakeEngine)

    def written(self, keys: Any) -> None:
        for key in keys:
            self.seqs[key] = 1 + max(self.seqs.values(), default=0)

    def reached(self, version: str) -> bool:
        """Whether queries of "a" get there by edges."""
        return version == "a" or any(old == version and self.reached(new) for new, old in self.edges)

    def server(self, key: int, order: tuple[str, ...] | None = None) -> str:
        ranked = [*(self.order if order is None else order), *VERSIONS]
        return min(self.holds[key], key=ranked.index)


def vector(rng: np.random.Generator) -> np.ndarray:
    made = rng.integers(-3, 4, DIM).astype(np.float32) + np.float32(0.5)
    return made / np.linalg.norm(made)


def placed(model: Model, keys: Any) -> dict[tuple[str, str], tuple[list[int], np.ndarray]]:
    found: dict[tuple[str, str], tuple[list[int], np.ndarray]] = {}
    for place in ((version, origin) for version in VERSIONS for origin in ORIGINS):
        mine = [key for key in keys if model.holds.get(key, {}).get(place[0], ("",))[0] == place[1]]
        if mine:
            found[place] = mine, np.stack([model.holds[key][place[0]][1] for key in mine])
    return found


def check(gallery: Gallery, model: Model, query: np.ndarray, encoders: frozenset[str]) -> None:
    """Each item within reach is found once, from what serves it, by the very score; filters and counts say the same."""
    served = {key: model.server(key) for key in model.holds}
    assert gallery.items_by_version() == Counter(served.values())
    expected = {key: version for key, version in served.items() if encoders or model.reached(version)}
    for even in (False, True):
        where = parse_filter({"field": "even", "eq": True}) if even else None
        options = {"filter": where} if where is not None else {}

        def search(k: int, options: dict[str, Any] = options) -> SearchResult:
            return gallery.search("a", lambda _: query[None], k, encoders=encoders, mode="raw", **options)

        if served and not expected:
            with pytest.raises(NoRoute):
                search(20)
            continue
        answer = search(20)
        assert {d.version: d.items for d in answer.degraded} == Counter(served[k] for k in served.keys() - expected)
        found = {
            int(key): (answer.shards[shard].version, answer.shards[shard].origin, score)
            for key, shard, score in zip(answer.keys_QK[0], answer.shards_QK[0], answer.raw_QK[0], strict=True)
            if key >= 0
        }
        assert len(found) == np.count_nonzero(answer.keys_QK[0] >= 0)
        assert set(found) == {key for key in expected if not even or key % 2 == 0}
        for key, (version, origin, score) in found.items():
            assert (version, origin) == (expected[key], model.holds[key][version][0])
            assert score == pytest.approx(float(model.holds[key][version][1] @ query), abs=1e-6)
        few = search(2).keys_QK[0]
        assert set(few[few >= 0].tolist()) <= set(found)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.kind}-{config.storage}")
@given(steps=st.lists(step, min_size=1, max_size=8), seed=st.integers(0, 2**16))
@settings(max_examples=12, deadline=None)
def test_an_item_is_served_once_by_the_first_it_holds(
    steps: list[Any], seed: int, config: IndexConfig, make_version: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    snapshots = [tmp_path_factory.mktemp("indexes")]
    versions = [known(name, make_version, tmp_path_factory) for name in VERSIONS]
    rng, model = np.random.default_rng(seed), Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEAL_ROWS", 3)
        patch.setattr(segments, "MERGE_FACTOR", 2)
        patch.setattr(segment, "MIN_APPROXIMATE", 4)
        for cost in ("NODE_COST", "LISTED_COST"):
            patch.setattr(approximate, cost, 0)
        gallery, live = started(config, snapshots[0], versions, model)
        for writes, order, edge, work in steps:
            take(gallery, model, rng, writes, order)
            if edge is not None:
                toggle(gallery, model, edge)
            if work == "move":
                config = IndexConfig(kind=IndexKind.AUTO if config.kind.is_remote else IndexKind.PGVECTOR)
                gallery.configure(config)
            while work != "nothing" and (bring(gallery, model) or gallery.build_index()):
                pass
            snapshots.append(copied(live))
            if work.startswith("restart"):
                at = rng.integers(len(snapshots)) if work.endswith("earlier snapshot") else -1
                gallery, live = started(config, snapshots[at], versions, model)
            for encoders in (frozenset[str](), frozenset(VERSIONS)):
                check(gallery, model, vector(rng), encoders)


def copied(folder: Path) -> Path:
    """What a process that is killed now leaves on disk."""
    return Path(shutil.copytree(folder, folder.with_name(uuid.uuid4().hex)))


def started(config: IndexConfig, snapshot: Path, versions: list[Any], model: Model) -> tuple[Gallery, Path]:
    """A process that finds a snapshot, and all that the feed says."""
    folder = copied(snapshot)
    gallery = Gallery(config, folder, model.engine.collection)
    for version in versions:
        gallery.declare(version)
    for edge in model.edges:
        gallery.add_edge(identity(*edge))
    gallery.apply(
        placed(model, model.holds), (), {key: item(key, seq=model.seqs[key]) for key in model.holds}, order=model.order
    )
    return gallery, folder


def identity(new: str, old: str) -> Edge:
    return Edge(new, old, EdgeKind.IDENTITY, {"cmc@1": Score(0.9, 0.8, 1.0)})


def toggle(gallery: Gallery, model: Model, edge: tuple[str, str]) -> None:
    """The edge comes, or goes."""
    model.edges ^= {edge}
    if edge in model.edges:
        gallery.add_edge(identity(*edge))
    else:
        gallery.remove_edge((*edge, EdgeKind.IDENTITY.value))


def item(key: int, number: int = 0, seq: int = 0) -> Item:
    return Item(f'{{"even": {str(key % 2 == 0).lower()}, "n": {number}}}', str(key), seq)


def bring(gallery: Gallery, model: Model) -> bool:
    """Write to the engine what it lacks, as who follows the feed does; False: always."""
    for place, shard in gallery.remote.shards().items():
        version, origin = place
        for key, seq in model.seqs.items() if gallery.config.kind.is_remote else ():
            kind, row = model.holds.get(key, {}).get(version, ("", np.empty(0)))
            one = np.array([key]), np.array([seq])
            if kind == origin:
                shard.collection.upsert(Entries(*one, digests(row[None])), row[None])
            else:
                shard.collection.delete(*one)
        shard.collection.set_covered_seq(max(model.seqs.values(), default=0))
    assert gallery.remote.settle()
    assert all(not shard.head.row_count() for shard in gallery.remote.shards().values())
    return False


def take(gallery: Gallery, model: Model, rng: Any, writes: Any, order: tuple[str, ...] | None) -> None:
    before = {key: model.server(key) for key in model.holds}
    if order is not None:
        moved_by = sum(model.server(key, order) != version for key, version in before.items())
        assert gallery.moved_by(order) == moved_by
        assert gallery.items_by_version(order) == Counter(model.server(key, order) for key in before)
        model.order = order
    if writes is None:
        if order is not None:
            gallery.set_version_order(order)
        return
    for key, versions in writes.items():
        kept = model.holds.pop(key, {})
        if versions:  # half of what it held stays what it was, so that rows of segments are met again
            fresh = {version: (origin, vector(rng)) for version, origin in versions.items()}
            same = {v: kept[v] for v in fresh if v in kept and kept[v][0] == fresh[v][0] and rng.random() < 0.5}
            model.holds[key] = fresh | same
    model.written(writes)
    gone = [key for key in writes if key not in model.holds]
    items = {key: item(key, rng.integers(2), model.seqs[key]) for key in writes if key not in gone}
    gallery.apply(placed(model, writes), gone, items, order=order)


_made: dict[str, Any] = {}


def known(name: str, make_version: Any, factory: pytest.TempPathFactory) -> Any:
    if name not in _made:
        _made[name] = make_version(factory.mktemp("shards") / name, name, DIM)
    return _made[name]
