"""Splitting pairs, fitting on one part and measuring on the other, against rankings written out."""

from __future__ import annotations

import numpy as np
import pytest

from index.edges.calibration import calibration_from_json
from index.errors import InvalidArgument
from index.evaluation.adapters import procrustes, ridge
from index.evaluation.fitting import (
    FITS,
    HELD_OUT,
    MAX_HELD_OUT,
    Pairs,
    fit_adapter,
    fit_calibration_maps,
    legal_options,
    measure,
    split_pairs,
)
from index.evaluation.scores import scores
from index.query.merge import Mode
from index.space import Cosine, Vectors
from index.version import Card, EdgeKind

OLD, NEW = Card("v1", 4, {"kind": "cosine"}), Card("v2", 6, {"kind": "cosine"})
OLD_L2 = Card("v1", 4, {"kind": "l2"})


def draw(count: int, dim: int, labels: np.ndarray | None = None, seed: int = 0) -> Vectors:
    generator = np.random.default_rng(seed)
    x = 0.3 * generator.standard_normal((count, dim))
    if labels is not None:
        x += generator.standard_normal((labels.max() + 1, dim))[labels]
    return Cosine().normalise(x.astype(np.float32))


@pytest.fixture
def labels() -> np.ndarray:
    return np.arange(60) % 5


@pytest.fixture
def pairs(labels: np.ndarray) -> Pairs:
    return split_pairs(draw(60, 6, labels), draw(60, 4, labels, seed=1), [f"class {n}" for n in labels], seed=3)


def test_a_fifth_measures_and_is_not_fitted_on(pairs: Pairs) -> None:
    assert (len(pairs.new_SM), len(pairs.new_QM), len(pairs.old_items_IN)) == (48, 12, 60)
    assert not {row.tobytes() for row in pairs.new_QM} & {row.tobytes() for row in pairs.new_SM}
    itself = pairs.relevance.self_Q
    np.testing.assert_array_equal(pairs.new_items_IM[itself], pairs.new_QM)
    np.testing.assert_array_equal(pairs.old_items_IN[itself], pairs.old_QN)
    np.testing.assert_array_equal(pairs.relevance.item_codes[itself], pairs.relevance.query_codes)


def test_the_seed_decides_the_split_and_many_pairs_keep_most_to_fit_on(labels: np.ndarray) -> None:
    new, old = draw(60, 6), draw(60, 4, seed=1)
    one, same, other = (split_pairs(new, old, labels, seed=seed) for seed in (1, 1, 2))

    np.testing.assert_array_equal(one.new_QM, same.new_QM)
    assert not np.array_equal(one.new_QM, other.new_QM)
    many = split_pairs(np.zeros((60_000, 1), np.float32), np.zeros((60_000, 1), np.float32), None)
    assert len(many.new_QM) == MAX_HELD_OUT < 60_000 // HELD_OUT


@pytest.mark.parametrize("old_card", [OLD, OLD_L2])
def test_what_is_measured_is_the_ranking_written_out(pairs: Pairs, old_card: Card) -> None:
    adapter = procrustes(pairs.new_SM, pairs.old_SN)
    queries = adapter(pairs.new_QM) if old_card is OLD_L2 else Cosine().normalise(adapter(pairs.new_QM))
    right, precision = [], []
    for row, query in enumerate(queries.astype(np.float64)):
        distances = np.linalg.norm(pairs.old_items_IN - query, axis=1)
        order = [i for i in np.argsort(distances) if i != pairs.relevance.self_Q[row]]
        hits = np.array([pairs.relevance.item_codes[i] == pairs.relevance.query_codes[row] for i in order])
        right.append(hits[0])
        precision.append(np.mean([hits[: at + 1].mean() for at in np.flatnonzero(hits)]))

    told = scores(measure(queries, pairs, old_card))

    assert told["cmc@1"].value == pytest.approx(np.mean(right))
    assert told["mAP@1.0"].value == pytest.approx(np.mean(precision), abs=1e-6)
    assert set(told) == {"cmc@1", "cmc@5", "mAP@1.0"}


def test_without_labels_an_item_must_find_itself() -> None:
    x = draw(40, 4)
    pairs = split_pairs(x, x[:, ::-1].copy(), None)
    adapter = procrustes(pairs.new_SM, pairs.old_SN)

    found = measure(adapter(pairs.new_QM), pairs, OLD)
    lost = measure(pairs.new_QM[:, [1, 0, 2, 3]], pairs, OLD)

    assert found.cmc(1) == 1.0
    assert lost.cmc(1) < 0.5
    assert (pairs.labels_S, pairs.labelled) == (None, False)


def test_the_maps_tell_right_from_wrong_and_run_with_their_spaces(pairs: Pairs) -> None:
    adapter = ridge(pairs.new_SM, pairs.old_SN)
    maps = fit_calibration_maps(EdgeKind.MATRIX, adapter(pairs.new_QM), pairs, NEW, OLD_L2)

    through, own = (calibration_from_json(maps[name]) for name in ("edge", "own"))
    assert through(0.1) > through(2.0)
    assert own(0.9) > own(0.0)
    assert Mode(maps["mode"]) in Mode


def test_every_kind_leads_from_the_new_version_to_the_old_one(pairs: Pairs) -> None:
    assert {kind: fit_adapter(kind, pairs, NEW, OLD, {}).weight.shape for kind in FITS} == dict.fromkeys(FITS, (6, 4))


def test_a_fit_that_cannot_be_made_is_refused_by_name(pairs: Pairs) -> None:
    bare = split_pairs(pairs.new_items_IM, pairs.old_items_IN, None)

    with pytest.raises(InvalidArgument, match="kind must be one of procrustes, ridge, low_rank, slerp, not 'magic'"):
        fit_adapter("magic", pairs, NEW, OLD, {})
    with pytest.raises(InvalidArgument, match="slerp needs labels"):
        fit_adapter("slerp", bare, NEW, OLD, {})
    with pytest.raises(InvalidArgument, match="cosine spaces"):
        fit_adapter("slerp", pairs, NEW, OLD_L2, {})


def test_a_low_rank_that_is_not_named_fits_versions_of_few_numbers(pairs: Pairs) -> None:
    weights = [fit_adapter("low_rank", pairs, NEW, OLD, options).weight for options in ({}, {"rank": 1})]

    assert [np.linalg.matrix_rank(weight, tol=1e-5) for weight in weights] == [min(NEW.dim, OLD.dim) // 2, 1]


def test_the_options_of_a_kind_are_its_numbers() -> None:
    assert {kind: legal_options(fit) for kind, fit in FITS.items()} == {
        "procrustes": {},
        "ridge": {"strength": 1e-3},
        "low_rank": {"rank": 64, "strength": 1e-3},
        "slerp": {},
    }
    assert legal_options(None) == {}
