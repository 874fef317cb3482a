"""Gallery.search against brute force: encoder, edge, FAISS and merge against float64 numpy written from definitions.

Query images are never gallery images. Ties may swap, so keys are compared by the score that brute force gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import naive
from index.edges.calibration import Calibration
from index.encoders.encoder import Encoder
from index.engines.base import MISSING
from index.evaluation.metrics import MEAN_AP, retrieval_from_rankings
from index.gallery import Gallery
from index.query.edge_maps import map_key
from index.query.search_result import SearchResult
from index.space import space_from_json
from index.version import Version
from naive import reach, unit, weight_in

MakeVersion = Callable[..., Version]
MakeImage = Callable[..., Image.Image]

COSINE, L2, LORENTZ = {"kind": "cosine"}, {"kind": "l2"}, {"kind": "lorentz", "curvature": 0.7}
QUERIES, ITEMS, TOLERANCE = 12, 60, 2e-3

CASES = [
    ("identity", 6, 6, COSINE, COSINE),
    ("identity", 6, 6, L2, L2),
    ("identity", 6, 6, LORENTZ, LORENTZ),
    ("truncate", 9, 6, COSINE, COSINE),
    ("truncate", 9, 6, L2, L2),
    ("zero_pad", 9, 6, COSINE, COSINE),
    ("matrix", 9, 6, COSINE, COSINE),
    ("matrix", 5, 6, L2, L2),
    ("onnx", 9, 6, COSINE, COSINE),
    ("onnx", 5, 6, COSINE, COSINE),
    ("slerp", 9, 6, COSINE, COSINE),
    ("slerp", 5, 6, COSINE, COSINE),
]


def embed(images: list[Image.Image], version: Version) -> np.ndarray:
    """The version's encoder by hand: scale the pixels to [-1, 1], project, normalise for cosine."""
    pixels = np.stack([np.asarray(image, np.float64).ravel() for image in images]) / 255 * 2 - 1
    z = pixels @ weight_in(version.folder / "encoder.onnx")
    return unit(z) if version.card.space["kind"] == "cosine" else z


def scores(q: np.ndarray, x: np.ndarray, space: dict[str, Any]) -> np.ndarray:
    return naive.scores(q, x, space_from_json(space))


def assert_ranks(found: SearchResult, table: np.ndarray, higher: bool, k: int) -> None:
    """`found` holds the k best entries of each row of the (queries, items) table, in order."""
    best = np.sort(table, axis=1)[:, ::-1][:, :k] if higher else np.sort(table, axis=1)[:, :k]
    np.testing.assert_allclose(found.scores_QK, best, atol=TOLERANCE)
    assert (found.keys_QK != MISSING).all()
    np.testing.assert_allclose(np.take_along_axis(table, found.keys_QK, axis=1), found.scores_QK, atol=TOLERANCE)
    assert all(len(set(row)) == k for row in found.keys_QK)


@pytest.fixture
def queries(make_image: MakeImage) -> list[Image.Image]:
    return [make_image(i % 6, 1000 + i) for i in range(QUERIES)]


@pytest.fixture
def items(make_image: MakeImage) -> list[Image.Image]:
    return [make_image(i % 6, i) for i in range(ITEMS)]


@pytest.mark.parametrize(("kind", "new_dim", "old_dim", "new_space", "old_space"), CASES)
@pytest.mark.parametrize("share", [0.0, 0.35, 1.0])
def test_search_equals_brute_force(
    make_version: MakeVersion,
    queries: list[Image.Image],
    items: list[Image.Image],
    tmp_path: Path,
    kind: str,
    new_dim: int,
    old_dim: int,
    new_space: dict[str, Any],
    old_space: dict[str, Any],
    share: float,
) -> None:
    old = make_version(tmp_path / "v1", "v1", old_dim, space=old_space)
    new = make_version(tmp_path / "v2", "v2", new_dim, space=new_space, drift=0.2, edges=[(old, kind)])
    encoders = {v.name: Encoder(v) for v in (old, new)}
    moved = np.random.default_rng(0).random(ITEMS) < share
    gallery = Gallery()
    gallery.declare(old)
    gallery.declare(new)
    placed = {
        (name, "encoded"): (keys, encoders[name].encode([items[key] for key in keys]).vectors)
        for name, keys in (("v1", np.flatnonzero(~moved)), ("v2", np.flatnonzero(moved)))
        if len(keys)
    }
    gallery.apply(placed)

    def encode(version: str) -> np.ndarray:
        return encoders[version].encode(queries).vectors

    q = embed(queries, new)
    old_scores = scores(reach(new.edges[0], q, old.card, embed(queries, old)), embed(items, old), old_space)
    table = np.where(moved, scores(q, embed(items, new), new_space), old_scores)
    higher = new_space["kind"] == "cosine"
    for k in (1, 10, ITEMS):
        found = gallery.search("v2", encode, k, strict=True, encoders=frozenset({"v1"}))
        assert found.mode == "raw"
        assert_ranks(found, table, higher, k)
        assert found.items_by_version == {name: len(keys) for (name, _), (keys, _) in placed.items()}
    slope = 3.0 if higher else -3.0
    gallery.apply(
        {},
        calibrations=(
            {
                map_key(shard.route, "encoded"): Calibration(np.array([0.5 + number]), np.array([0.5]), slope)
                for number, shard in enumerate(found.shards)
            },
            {},
        ),
    )
    for mode in ("calibrated", "rank"):
        other = gallery.search("v2", encode, ITEMS, encoders=frozenset({"v1"}), mode=mode)
        # Nothing moved, or everything: the pure ranking, to the last tie.
        assert np.array_equal(other.keys_QK, found.keys_QK) or 0 < share < 1


def test_a_chain_of_edges_equals_brute_force(
    make_version: MakeVersion, queries: list[Image.Image], items: list[Image.Image], tmp_path: Path
) -> None:
    """v3 (9) -> v2 (7, truncate) -> v1 (5, matrix), a third of the items in each."""
    v1 = make_version(tmp_path / "v1", "v1", 5)
    v2 = make_version(tmp_path / "v2", "v2", 7, drift=0.1, edges=[(v1, "matrix")])
    v3 = make_version(tmp_path / "v3", "v3", 9, drift=0.2, edges=[(v2, "truncate")])
    gallery, tables = Gallery(), []
    q3 = embed(queries, v3)
    q2 = reach(v3.edges[0], q3, v2.card)
    for version, q in ((v1, reach(v2.edges[0], q2, v1.card)), (v2, q2), (v3, q3)):
        gallery.declare(version)
        tables.append(scores(q, embed(items, version), COSINE))
    owner = np.arange(ITEMS) % 3
    for number, version in enumerate((v1, v2, v3)):
        keys = np.flatnonzero(owner == number).tolist()
        gallery.apply(
            {(version.name, "encoded"): (keys, Encoder(version).encode([items[key] for key in keys]).vectors)}
        )
    found = gallery.search("v3", lambda version: Encoder(v3).encode(queries).vectors, ITEMS)
    assert_ranks(found, np.choose(owner, tables), True, ITEMS)
    assert {shard.route.kinds for shard in found.shards} == {(), ("truncate",), ("truncate", "matrix")}


def test_dual_equals_brute_force_by_the_old_encoder(
    make_version: MakeVersion, queries: list[Image.Image], items: list[Image.Image], tmp_path: Path
) -> None:
    versions = {name: make_version(tmp_path / name, name, 6, seed=seed) for seed, name in enumerate(["v1", "v2"])}
    encoders, gallery = {name: Encoder(v) for name, v in versions.items()}, Gallery()
    for name, version in versions.items():
        gallery.declare(version)
        keys = range(ITEMS)[int(name[1]) - 1 :: 2]
        gallery.apply({(name, "encoded"): (keys, encoders[name].encode([items[key] for key in keys]).vectors)})
    found = gallery.search(
        "v2", lambda name: encoders[name].encode(queries).vectors, 15, encoders=frozenset(versions), strict=True
    )
    tables = [scores(embed(queries, v), embed(items, v), COSINE) for v in versions.values()]
    assert_ranks(found, np.choose(np.arange(ITEMS) % 2, tables), True, 15)


def test_the_builders_classes_can_be_told_apart(
    make_version: MakeVersion, queries: list[Image.Image], items: list[Image.Image], tmp_path: Path
) -> None:
    """The small versions are real encoders: what other tests measure with them means something."""
    old = make_version(tmp_path / "v1", "v1", 6)
    new = make_version(tmp_path / "v2", "v2", 9, drift=0.05, edges=[(old, "truncate")])
    gallery = Gallery()
    gallery.declare(old)
    gallery.declare(new)
    gallery.apply({("v1", "encoded"): (range(ITEMS), Encoder(old).encode(items).vectors)})
    found = gallery.search("v2", lambda version: Encoder(new).encode(queries).vectors, ITEMS)
    measured = retrieval_from_rankings(found.keys_QK % 6, np.arange(QUERIES) % 6, np.full(QUERIES, ITEMS // 6))
    assert measured.cmc(1) == 1
    assert measured.mean(MEAN_AP) > 0.9
