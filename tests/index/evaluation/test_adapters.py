"""Adapters on pairs whose right answer is known, their optimality, and that edges serve what they save."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.edges.transform import Matrix, slerp
from index.errors import InvalidArgument
from index.evaluation import adapters
from index.evaluation.adapters import few_pairs_warning, fit_slerp, low_rank, procrustes, ridge
from index.space import Vectors
from index.version import Card, Edge, EdgeKind
from naive import draw, mean_square, retrieval, rotation, unit


def test_procrustes_finds_a_rotation_and_a_reflection_exactly() -> None:
    new = draw(50, 6)
    for determinant in (1.0, -1.0):
        true = rotation(6)
        true[0] *= determinant * np.sign(np.linalg.det(true))
        fitted = procrustes(new, new @ true)

        assert np.linalg.det(fitted.weight) == pytest.approx(determinant, abs=1e-5)
        np.testing.assert_allclose(fitted.weight, true, atol=1e-5)
        assert not fitted.bias.any()


def test_no_rotation_is_nearer_than_procrustes_on_noisy_pairs() -> None:
    new = draw(80, 4)
    old = new @ rotation(4) + 0.3 * draw(80, 4, seed=1)
    fitted = procrustes(new, old)
    best = mean_square(fitted, new, old)

    for seed in range(20):
        generator = 0.1 * draw(4, 4, seed=seed)
        skew = generator - generator.T
        turned = fitted.weight @ np.linalg.solve(np.eye(4) - skew, np.eye(4) + skew)  # Cayley: a rotation
        assert float(np.mean((new @ turned - old) ** 2)) > best


@pytest.mark.parametrize(("new_dim", "old_dim"), [(6, 4), (4, 6), (5, 5)])
def test_procrustes_of_unequal_dimensions_is_the_square_map_of_zero_padded_spaces(new_dim: int, old_dim: int) -> None:
    new, old = draw(60, new_dim), draw(60, old_dim, seed=1)
    size = max(new_dim, old_dim)
    left, _, right = np.linalg.svd(
        np.pad(new, ((0, 0), (0, size - new_dim))).T @ np.pad(old, ((0, 0), (0, size - old_dim)))
    )
    weight = procrustes(new, old).weight
    square = weight.T @ weight if new_dim >= old_dim else weight @ weight.T

    assert weight.shape == (new_dim, old_dim)
    np.testing.assert_allclose(weight, (left @ right)[:new_dim, :old_dim], atol=1e-5)
    assert np.abs(square - np.eye(min(new_dim, old_dim))).max() < 1e-5


def test_ridge_finds_an_affine_map_and_shrinks_with_its_strength() -> None:
    new = draw(200, 5) + 3.0
    weight, bias = draw(5, 3, seed=1), draw(3, seed=2)
    fitted = ridge(new, new @ weight + bias, strength=1e-9)

    np.testing.assert_allclose(fitted.weight, weight, atol=1e-4)
    np.testing.assert_allclose(fitted.bias, bias, atol=1e-3)
    strong = ridge(new, new @ weight + bias, strength=1e6)
    assert np.abs(strong.weight).max() < 1e-4
    np.testing.assert_allclose(strong(new).mean(0), (new @ weight + bias).mean(0), atol=1e-3)


def test_ridge_equals_its_normal_equations_written_out() -> None:
    new, old = draw(30, 4).astype(np.float64), draw(30, 2, seed=1).astype(np.float64)
    centred = new - new.mean(0)
    gram = np.zeros((4, 4))
    for row in centred:
        gram += np.outer(row, row)
    gram += 0.1 * np.trace(gram) / 4 * np.eye(4)
    naive = np.linalg.inv(gram) @ sum(np.outer(x, y) for x, y in zip(centred, old - old.mean(0), strict=True))

    np.testing.assert_allclose(ridge(new, old, strength=0.1).weight, naive, atol=1e-6)


def test_ridge_survives_a_component_that_never_varies() -> None:
    new = draw(50, 4)
    new[:, 2] = 0

    assert np.isfinite(ridge(new, draw(50, 4, seed=1)).weight).all()


@pytest.mark.parametrize("fit", [ridge, low_rank])
@pytest.mark.parametrize(("new", "strength"), [(draw(6, 12), 1e-18), (np.full((90, 8), 0.3, np.float32), 1e-3)])
def test_pairs_that_do_not_determine_a_map_are_refused(fit: Any, new: Any, strength: float) -> None:
    options = {"rank": 2} if fit is low_rank else {}

    with pytest.raises(InvalidArgument, match="do not determine") as refused:
        fit(new, draw(len(new), 8, seed=1), strength=strength, **options)

    assert refused.value.pointer == "/pairs"


def test_low_rank_has_the_rank_finds_a_map_of_that_rank_and_becomes_ridge_at_full_rank() -> None:
    new = draw(300, 8)
    true = draw(8, 2, seed=1) @ draw(2, 6, seed=2)
    fitted = low_rank(new, new @ true, rank=2, strength=1e-9)

    assert np.linalg.matrix_rank(fitted.weight.astype(np.float64), tol=1e-4) == 2
    np.testing.assert_allclose(fitted.weight, true, atol=1e-4)
    old = draw(300, 6, seed=3)
    np.testing.assert_allclose(low_rank(new, old, rank=6).weight, ridge(new, old).weight, atol=1e-6)


def test_low_rank_beats_cutting_the_ridge_matrix_itself() -> None:
    new = draw(300, 8) * np.array([9, 1, 1, 1, 1, 1, 1, 0.1], dtype=np.float32)
    old = (new @ draw(8, 6, seed=1)).astype(np.float32)
    left, values, right = np.linalg.svd(ridge(new, old, strength=1e-9).weight)
    cut = (left[:, :2] * values[:2]) @ right[:2]

    fitted = low_rank(new, old, rank=2, strength=1e-9)
    assert mean_square(fitted, new, old) < float(np.mean((new @ cut - old) ** 2))


def circle(*degrees: float) -> Vectors:
    return np.array([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees], np.float32)


def test_slerp_walks_the_arc_at_even_speed() -> None:
    start, end = circle(0, 170), circle(90, -170)

    np.testing.assert_allclose(slerp(start, end, 0.0), start, atol=1e-6)
    np.testing.assert_allclose(slerp(start, end, 1.0), end, atol=1e-6)
    np.testing.assert_allclose(slerp(start, end, 1 / 3), circle(30, 170 + 20 / 3), atol=1e-6)


def test_slerp_of_equal_and_of_opposite_directions_stays_finite_on_their_line() -> None:
    np.testing.assert_allclose(slerp(circle(20), circle(20), 0.4), circle(20), atol=1e-6)
    opposite = slerp(circle(20), circle(200), 0.25)
    assert np.linalg.norm(opposite) <= 1
    np.testing.assert_allclose(opposite @ circle(110).T, 0.0, atol=1e-4)


def test_slerp_of_a_larger_new_space_is_slerp_on_the_padded_sphere() -> None:
    new, old = unit(draw(40, 6)), unit(draw(40, 4, seed=1))
    weight = procrustes(new, old).weight
    padded = np.pad(old, ((0, 0), (0, 2)))
    left, _, right = np.linalg.svd(new.T.astype(np.float64) @ padded)
    full = slerp(padded, (new @ (left @ right)).astype(np.float32), 0.3)

    np.testing.assert_allclose(np.linalg.norm(full, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(adapters.SlerpAdapter(weight, 0.3)(new, old), full[:, :4], atol=1e-5)


def test_slerp_chooses_the_side_that_retrieves_and_the_middle_where_each_side_knows_half() -> None:
    labels = np.arange(60) % 6
    truth = unit(np.eye(6, dtype=np.float32)[labels] + 0.02 * draw(60, 6))
    blind = unit(draw(60, 6, seed=1))

    turned = fit_slerp(truth @ rotation(6), truth, labels)
    assert turned.alpha in np.linspace(0, 1, 11).tolist()
    np.testing.assert_allclose(turned.weight, rotation(6).T, atol=1e-5)
    halves = truth.copy()
    halves[:, 3:] = unit(draw(60, 3, seed=2)) * 0.5  # the old space tells classes 0 to 2 apart only
    old = unit(halves)
    chosen = fit_slerp(truth, old, labels)
    found = [
        retrieval(-(slerp(old, truth @ chosen.weight, alpha) @ old.T), labels, labels, range(60), [1])
        for alpha in np.linspace(0, 1, 11)
    ]
    answers = [[answer for answer in one if answer] for one in found]
    scores = [(np.mean([hits[1] for hits, _ in one]), np.mean([precision for _, precision in one])) for one in answers]
    assert chosen.alpha == pytest.approx(np.linspace(0, 1, 11)[scores.index(max(scores))])
    assert fit_slerp(blind, truth, labels).alpha < 0.5


@pytest.mark.parametrize("fit", [procrustes, ridge, partial(low_rank, rank=3)])
@pytest.mark.parametrize(("new_dim", "old_dim"), [(6, 4), (4, 6)])
def test_a_matrix_edge_serves_exactly_what_the_adapter_gives(
    tmp_path: Path, fit: Callable[[Vectors, Vectors], adapters.Affine], new_dim: int, old_dim: int
) -> None:
    new, old = unit(draw(50, new_dim)), unit(draw(50, old_dim, seed=1))
    adapter = fit(new, old)
    adapter.save(tmp_path)
    edge = Edge("v2", "v1", EdgeKind.MATRIX, folder=tmp_path)
    served = Matrix(edge, Card("v2", new_dim, {"kind": "cosine"}), Card("v1", old_dim, {"kind": "cosine"}))

    np.testing.assert_allclose(served(new), unit(adapter(new)), atol=1e-6)


def test_slerp_saves_its_matrix_and_weight(tmp_path: Path) -> None:
    adapters.SlerpAdapter(np.eye(3, 2, dtype=np.float32), 0.7).save(tmp_path)

    with np.load(tmp_path / "edge.npz") as arrays:
        assert arrays["weight"].shape == (3, 2)
        assert float(arrays["alpha"]) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: procrustes(draw(5, 3), draw(4, 3)), r"two arrays \(S, dim\) of the same S"),
        (lambda: procrustes(draw(1, 3), draw(1, 3)), "S >= 2"),
        (lambda: procrustes(np.diag([1, np.nan, 1]), draw(3, 3)), "finite"),
        (lambda: ridge(draw(5, 3), draw(5, 3), strength=0.0), "strength must be above 0"),
        (lambda: low_rank(draw(5, 3), draw(5, 2), rank=3), "rank must be 1 to 2, not 3"),
        (lambda: low_rank(draw(5, 3), draw(5, 2), rank=2, strength=-1.0), "strength must be above 0"),
    ],
)
def test_bad_pairs_and_options_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_few_pairs_are_said_and_enough_are_not() -> None:
    assert few_pairs_warning(4000) is None
    assert few_pairs_warning(3999) == "3999 pairs: fewer than 4000 leave an adapter's score uncertain"
