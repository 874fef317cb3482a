"""Which embedding serves an item: random holds, orders, writes and swaps, compared with a dictionary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.engines import segment, segments
from index.engines.config import IndexConfig, IndexKind
from index.filter import parse_filter
from index.gallery import Gallery
from index.metadata import Item

VERSIONS = ("a", "b", "c")
ORIGINS = ("encoded", "transformed")
DIM = 3

held = st.dictionaries(st.sampled_from(VERSIONS), st.sampled_from(ORIGINS), min_size=0, max_size=3)
write = st.dictionaries(st.integers(0, 11), held, max_size=6)
orders = st.permutations(VERSIONS).flatmap(lambda all_: st.integers(0, 3).map(lambda count: tuple(all_[:count])))
step = st.tuples(st.none() | write, st.none() | orders, st.booleans())


@dataclass
class Model:
    """Key -> version -> (origin, vector)."""

    holds: dict[int, dict[str, tuple[str, np.ndarray]]] = field(default_factory=dict)
    order: tuple[str, ...] = ()

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


def check(gallery: Gallery, model: Model, query: np.ndarray) -> None:
    """Each item is found once, from what serves it, by the very score; filters and counts say the same."""
    expected = {key: model.server(key) for key in model.holds}
    assert gallery.items_by_version() == Counter(expected.values())
    for even in (False, True):
        where = parse_filter({"field": "even", "eq": True}) if even else None
        options = {"filter": where} if where is not None else {}
        answer = gallery.search("a", lambda _: query[None], 20, encoders=frozenset(VERSIONS), mode="raw", **options)
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


@pytest.mark.parametrize("kind", [IndexKind.EXACT, IndexKind.AUTO, IndexKind.HNSW])
@given(steps=st.lists(step, min_size=1, max_size=8), seed=st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_an_item_is_served_once_by_the_first_it_holds(
    steps: list[Any], seed: int, kind: IndexKind, make_version: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng, model, gallery = np.random.default_rng(seed), Model(), Gallery(IndexConfig(kind=kind))
    for name in VERSIONS:
        gallery.declare(known(name, make_version, tmp_path_factory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEAL_ROWS", 3)
        patch.setattr(segment, "MIN_APPROXIMATE", 4)
        for writes, order, index in steps:
            take(gallery, model, rng, writes, order)
            if index:
                gallery.build_index()
            check(gallery, model, vector(rng))


def take(gallery: Gallery, model: Model, rng: Any, writes: Any, order: tuple[str, ...] | None) -> None:
    before = {key: model.server(key) for key in model.holds}
    if order is not None:
        moving = sum(model.server(key, order) != version for key, version in before.items())
        assert gallery.moving(order) == moving
        assert gallery.items_by_version(order) == Counter(model.server(key, order) for key in before)
        model.order = order
    if writes is None:
        gallery.prefer(model.order)
        return
    for key, versions in writes.items():
        kept = model.holds.pop(key, {})
        if versions:  # half of what it held stays what it was, so that rows of segments are met again
            fresh = {version: (origin, vector(rng)) for version, origin in versions.items()}
            same = {v: kept[v] for v in fresh if v in kept and kept[v][0] == fresh[v][0] and rng.random() < 0.5}
            model.holds[key] = fresh | same
    gone = [key for key in writes if key not in model.holds]
    items = {key: Item(f'{{"even": {str(key % 2 == 0).lower()}, "n": {rng.integers(2)}}}', str(key)) for key in writes}
    gallery.apply(placed(model, writes), gone, {key: items[key] for key in writes if key not in gone}, order=order)


_made: dict[str, Any] = {}


def known(name: str, make_version: Any, factory: pytest.TempPathFactory) -> Any:
    if name not in _made:
        _made[name] = make_version(factory.mktemp("shards") / name, name, DIM)
    return _made[name]
