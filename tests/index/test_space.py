"""index.space: layout, order and score of each space, and validation of vectors from outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.errors import InvalidArgument, InvalidVector
from index.space import SPACES, Cosine, Euclidean, Lorentz, Space, check_vectors, space_from_json

EVERY = [Cosine(), Euclidean(), Lorentz(), Lorentz(0.2), Lorentz(4.0)]


def scanned(space: Space, queries: np.ndarray, items: np.ndarray) -> np.ndarray:
    """What a shard's scan returns: plain inner products or squared distances of the stored rows."""
    q, x = space.queries(queries), space.items(items)
    assert q.shape[1] == x.shape[1] == space.width(queries.shape[1])
    return q @ x.T if space.inner_product else ((q[:, None] - x) ** 2).sum(-1)


@pytest.mark.parametrize("space", EVERY, ids=str)
def test_a_vector_is_best_matched_by_itself_and_the_order_is_the_declared_one(space: Space) -> None:
    x = space.normalise(np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32))
    scores = space.score(scanned(space, x, x))
    best = scores.argmax(axis=1) if space.higher_is_better else scores.argmin(axis=1)
    np.testing.assert_array_equal(best, np.arange(20))
    np.testing.assert_allclose(np.diag(scores), 1 if space.kind == "cosine" else 0, atol=3e-3)


def test_scores_by_hand() -> None:
    q, x = np.array([[0.6, 0.8]], np.float32), np.array([[1, 0], [0, -1]], np.float32)
    np.testing.assert_allclose(Cosine().score(scanned(Cosine(), q, x)), [[0.6, -0.8]], atol=1e-6)
    expected = [[np.hypot(0.4, 0.8), np.hypot(0.6, 1.8)]]
    np.testing.assert_allclose(Euclidean().score(scanned(Euclidean(), q, x)), expected, atol=1e-6)


@pytest.mark.parametrize("curvature", [0.25, 1.0, 3.0])
def test_lorentz_distance_is_the_geodesic_one(curvature: float) -> None:
    """A point at distance d from the origin along one axis is sinh(sqrt(K) d) / sqrt(K); distances on a line add up."""
    space = Lorentz(curvature)

    def point(distance: float) -> np.ndarray:
        return np.array([[np.sinh(curvature**0.5 * distance) / curvature**0.5, 0]], np.float32)

    for a, b in [(0.0, 0.7), (-1.0, 2.0), (0.3, 0.9)]:
        given_distance = space.score(scanned(space, point(a), point(b)))
        np.testing.assert_allclose(given_distance, [[abs(a - b)]], atol=2e-4)


@pytest.mark.parametrize("curvature", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("norm", [1.0, 1e4, 1e8, 1e14])
def test_lorentz_distances_of_one_direction_are_exact_far_from_the_origin(norm: float, curvature: float) -> None:
    """A vector is at asinh(sqrt(K) |x|) / sqrt(K) from the origin, and on a line distances add up."""
    space = Lorentz(curvature)
    q = np.random.default_rng(0).normal(size=16).astype(np.float32)
    q *= np.float32(norm) / np.linalg.norm(q)
    x = np.outer([0, -1, 0.5, 1, 2, 8], q).astype(np.float32)
    to_q, to_x = (np.arcsinh(curvature**0.5 * np.linalg.norm(v.astype(np.float64), axis=-1)) for v in (q, x))
    expected = np.where(np.arange(len(x)) == 1, to_q + to_x, abs(to_q - to_x)) / curvature**0.5

    rows, queries = space.items(x), space.queries(q[None])
    np.testing.assert_allclose(space.distances(q, rows), expected, rtol=1e-6)
    np.testing.assert_allclose(
        space.pairwise(queries.astype(np.float64), rows.astype(np.float64))[0], expected, rtol=1e-6
    )
    assert space.distances(q, rows)[3] == 0
    origin = np.zeros(16, np.float32)
    assert space.distances(origin, space.items(origin[None])) == 0


def test_rounding_never_leaves_the_domain_of_a_score() -> None:
    assert Lorentz().score(np.array([-0.99999], np.float32)) == 0
    assert Euclidean().score(np.array([-1e-7], np.float32)) == 0


@pytest.mark.parametrize("space", EVERY, ids=str)
def test_a_space_survives_its_json(space: Space) -> None:
    assert space_from_json(space.as_json()) == space


@pytest.mark.parametrize(
    ("value", "message", "pointer"),
    [
        (None, "space.kind must be one of cosine, l2, lorentz", "/space/kind"),
        ({}, "space.kind must be one of", "/space/kind"),
        ({"kind": "dot"}, "space.kind must be one of", "/space/kind"),
        ({"kind": ["cosine"]}, "space.kind must be one of", "/space/kind"),
        ({"kind": "cosine", "curvature": 1}, "unknown field 'curvature'", "/space"),
        ({"kind": "lorentz", "k": 1}, "unknown field 'k'", "/space"),
        ({"kind": "lorentz", "curvature": "1"}, "must be a number", "/space/curvature"),
        ({"kind": "lorentz", "curvature": 0}, "above 0", "/space/curvature"),
        ({"kind": "lorentz", "curvature": -1.0}, "above 0", "/space/curvature"),
        ({"kind": "lorentz", "curvature": float("nan")}, "above 0", "/space/curvature"),
        ({"kind": "lorentz", "curvature": float("inf")}, "above 0", "/space/curvature"),
    ],
)
def test_a_wrong_space_is_named(value: object, message: str, pointer: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        space_from_json(value)
    assert caught.value.pointer == pointer


def test_every_space_is_entered_under_its_own_name() -> None:
    assert all(SPACES[name].kind == name for name in SPACES)


def test_cosine_vectors_are_normalised_and_others_kept() -> None:
    given_vectors = [[3.0, 4.0], [0.0, -2.0]]
    np.testing.assert_allclose(check_vectors(given_vectors, 2, Cosine()), [[0.6, 0.8], [0, -1]], atol=1e-7)
    np.testing.assert_array_equal(check_vectors(given_vectors, 2, Euclidean()), given_vectors)


def test_one_vector_becomes_one_row() -> None:
    checked = check_vectors([1, 2, 2], 3, Cosine())
    assert checked.shape == (1, 3)
    assert checked.dtype == np.float32
    assert checked.flags["C_CONTIGUOUS"]


@pytest.mark.parametrize(
    ("value", "message", "pointer"),
    [
        ([1, 2], "have 3 numbers, not 2", "/e"),
        ([[1, 2, 3], [1, 2]], "list of 3 numbers", "/e"),
        ([[[1, 2, 3]]], "shape 1x1x3", "/e"),
        (5, "have 3 numbers", "/e"),
        ([], "list of 3 numbers|have 3 numbers", "/e"),
        ("abc", "list of 3 numbers", "/e"),
        (["1", "2", "3"], "list of 3 numbers", "/e"),
        ([1, None, 3], "list of 3 numbers", "/e"),
        ([True, False, True], "list of 3 numbers", "/e"),
        ({"a": 1}, "list of 3 numbers", "/e"),
        ([1, 2, float("nan")], "finite", "/e"),
        ([1, 2, float("inf")], "finite", "/e"),
        ([1, 2, 1e39], "finite", "/e"),
        ([0, 0, 0], "all-zero", "/e"),
        ([1e-20, 0, 0], "all-zero", "/e"),
        ([[1, 2, 3], [0, 0, 0]], "all-zero", "/e/1"),
        ([[1, 2, 3], [1, 2, float("nan")]], "finite", "/e/1"),
    ],
)
def test_a_bad_vector_is_refused_by_its_place(value: object, message: str, pointer: str) -> None:
    with pytest.raises(InvalidVector, match=message) as caught:
        check_vectors(value, 3, Cosine(), pointer="/e")
    assert caught.value.pointer == pointer


def test_zero_is_a_vector_where_no_direction_is_needed() -> None:
    for space in (Euclidean(), Lorentz()):
        np.testing.assert_array_equal(check_vectors([0, 0, 0], 3, space), [[0, 0, 0]])


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(value=json_like | st.lists(st.floats(), min_size=3, max_size=3), space=st.sampled_from(EVERY))
def test_any_json_is_a_valid_vector_or_refused(value: Any, space: Space) -> None:
    try:
        checked = check_vectors(value, 3, space)
    except InvalidVector:
        return
    assert checked.shape[1] == 3
    assert np.isfinite(checked).all()
