"""index.query.scatter: of several shards each is searched as thoroughly as its part of a list takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.engines.config import IndexConfig, IndexKind
from index.engines.memory import approximate, segment, segments
from index.engines.memory.segments import SegmentedShard
from index.gallery import Gallery
from index.query.scatter import ShardQuery, scatter
from index.space import Cosine
from index.version import Card, Edge, EdgeKind, Score, Version
from staging.inputs.builders import always

DIM, K = 16, 10
AIM = 0.98


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "MIN_APPROXIMATE", 40)
    for rows in ("SEAL_ROWS", "SETTLED_ROWS"):  # also when building the first index takes longer than `SETTLED_SECONDS`
        monkeypatch.setattr(segments, rows, 30)
    monkeypatch.setattr(segment, "SAMPLE_ROWS", 200)
    monkeypatch.setattr(approximate, "NODE_COST", 1)  # as in larger shards, where a graph is faster than a scan


def drawn(count: int, seed: int) -> np.ndarray:
    return Cosine().normalise(np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32))


def gallery_of(items: np.ndarray, versions: np.ndarray) -> Gallery:
    """Each item lies in its version; v0 asks, and reaches the others by identity."""
    gallery, names = (
        Gallery(IndexConfig(kind=IndexKind.HNSW, recall=AIM)),
        [f"v{n}" for n in range(versions.max() + 1)],
    )
    edges = tuple(Edge("v0", name, EdgeKind.IDENTITY, {"cmc@1": Score(0.9, 0.8, 1.0)}) for name in names[1:])
    for name in reversed(names):
        gallery.declare(Version(Card(name, DIM, {"kind": "cosine"}), Path(), edges if name == "v0" else ()))
    of = {(name, "encoded"): np.flatnonzero(versions == n) for n, name in enumerate(names)}
    gallery.apply({place: (keys.tolist(), items[keys]) for place, keys in of.items()})
    while gallery.build_index():
        pass
    return gallery


def recall(gallery: Gallery, queries: np.ndarray, **options: Any) -> float:
    found, right = (
        gallery.search("v0", always(queries), K, mode="raw", exact=exact, **options).keys_QK for exact in (False, True)
    )
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(right, found, strict=True)]))


@pytest.mark.parametrize("shares", [(0.25,) * 4, (0.9, 0.1)], ids=["alike", "unequal"])
def test_a_list_over_versions_reaches_the_aim_with_less_effort_than_each_of_them_alone(
    shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    items, queries = drawn(4000, 0), drawn(200, 1)
    gallery = gallery_of(items, np.random.default_rng(2).choice(len(shares), len(items), p=shares))
    efforts: list[tuple[float, int, int]] = []
    widths: list[int] = []
    search = SegmentedShard.search

    def noted(shard: SegmentedShard, asked: np.ndarray, *args: Any, **options: Any) -> Any:
        hits = search(shard, asked, *args, **options)
        efforts.append((options.get("share", 1.0), hits.scanned.effort, len(asked)))
        widths.append(hits.slots_QK.shape[1])
        return hits

    monkeypatch.setattr(SegmentedShard, "search", noted)
    assert recall(gallery, queries) >= AIM

    small = [(effort, asked) for share, effort, asked in efforts if share < 0.5 and effort]
    again = [(effort, asked) for share, effort, asked in efforts if share == 1.0]
    assert min(effort for effort, _ in small) < max(effort for effort, _ in again)
    assert all(asked < len(queries) / 4 for _, asked in again)  # nearly all queries are done at once
    assert min(widths) < max(widths) == K  # of a part no more is asked for than it is likely to give


def test_recall_holds_where_all_that_a_query_looks_for_lies_in_one_version() -> None:
    items = drawn(4000, 0)
    versions = np.argsort(np.argsort(items[:, 0])) * 4 // len(items)  # each version holds a slice of the sphere
    gallery = gallery_of(items, versions)

    assert recall(gallery, drawn(200, 1)) >= AIM


def test_a_filter_that_leaves_only_one_version_keeps_recall_and_fills_the_list() -> None:
    items = drawn(4000, 0)
    gallery = gallery_of(items, np.arange(len(items)) % 4)
    (only,) = [shard for place, shard in gallery._shards.serving().items() if place[0] == "v2"]
    allowed = np.zeros(len(items), np.bool_)
    allowed[np.concatenate(only.slots())] = True
    view, queries = gallery._view, drawn(100, 1)
    plan = view.plan("v0", frozenset(), None)
    vectors = {shard.version: queries for shard in plan.shards}
    asked = ShardQuery(plan, vectors, K, allowed, False, None, True, {}, 0.0)
    found, right = (scatter(query).merged for query in (asked, asked._replace(exact=True)))

    assert (found.keys_QK >= 0).all()
    assert np.mean([np.isin(a, b).mean() for a, b in zip(right.keys_QK, found.keys_QK, strict=True)]) >= AIM
