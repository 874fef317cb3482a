"""Choosing among kinds on a part of the fitting share, and what more pairs would gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from index.errors import InvalidArgument
from index.evaluation.adapter_choice import (
    ChosenKind,
    Search,
    choose_kind,
    learning_curve,
    recommendation,
    serving_map,
)
from index.evaluation.fitting import FITS, Pairs, fit_adapter, measure, split_pairs
from index.evaluation.metrics import Retrieval
from index.space import Cosine
from index.version import ENCODER, Card

OLD, NEW = Card("v1", 8, {"kind": "cosine"}, files={ENCODER: "0" * 64}), Card("v2", 8, {"kind": "cosine"})
BARE = replace(OLD, files={})


def search(kind: str, pairs: Pairs) -> Search:
    return serving_map(fit_adapter(kind, pairs, NEW, OLD, {"rank": 2} if kind == "low_rank" else {}), OLD)


def drawn(linear: Callable[[np.random.Generator], np.ndarray], count: int = 300, labelled: bool = False) -> Pairs:
    """Pairs whose old side is a linear map of the new one, with some noise."""
    generator = np.random.default_rng(0)
    new = generator.standard_normal((count, 8))
    old = new @ linear(generator) + 0.05 * generator.standard_normal((count, 8))
    unit_new, unit_old = (Cosine().normalise(x.astype(np.float32)) for x in (new, old))
    return split_pairs(unit_new, unit_old, np.arange(count) % 3 if labelled else None)


def rotation(generator: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(generator.standard_normal((8, 8)))[0]


def stretched(generator: np.random.Generator) -> np.ndarray:
    return rotation(generator) * np.geomspace(0.2, 5, 8)


def test_the_kind_that_suits_is_chosen_and_holds_on_pairs_that_nobody_saw() -> None:
    for linear, expected in ((rotation, {"procrustes", "ridge"}), (stretched, {"ridge"})):
        pairs = drawn(linear)
        choice = choose_kind(FITS, search, pairs, OLD)
        hidden = {kind: measure(search(kind, pairs)(pairs.new_QM, pairs.old_QN), pairs, OLD) for kind in choice.reached}

        assert choice.kind in expected
        assert hidden[choice.kind].cmc(1) >= max(measured.cmc(1) for measured in hidden.values()) - 0.02
        assert set(choice.reached) == {"procrustes", "ridge", "low_rank"}
        assert "slerp" in choice.left_out


@pytest.mark.parametrize(("good", "chosen"), [({"low_rank"}, "low_rank"), ({"procrustes", "low_rank"}, "procrustes")])
def test_the_best_is_chosen_and_of_equals_the_first(good: set[str], chosen: str) -> None:
    def fit(kind: str, _: Pairs) -> Search:
        return lambda new_QM, old_QN: old_QN if kind in good else -old_QN

    assert choose_kind(["ridge", "procrustes", "low_rank"], fit, drawn(rotation), OLD).kind == chosen


def test_kinds_are_fitted_from_the_new_version_to_the_old_one() -> None:
    new = np.random.default_rng(0).standard_normal((60, 12)).astype(np.float32)
    fitted: list[tuple[int, int]] = []

    def fit(kind: str, some: Pairs) -> Search:
        fitted.append((some.new_SM.shape[1], some.old_SN.shape[1]))
        return serving_map(fit_adapter(kind, some, replace(NEW, dim=12), OLD, {}), OLD)

    choose_kind(["ridge"], fit, split_pairs(new, new[:, :8], None), OLD)

    assert fitted == [(12, 8)]


def test_the_pairs_that_measure_have_no_say_in_the_choice() -> None:
    pairs = drawn(stretched)
    blind = replace(pairs, new_QM=np.zeros_like(pairs.new_QM), new_items_IM=np.zeros_like(pairs.new_items_IM))

    one, other = (choose_kind(FITS, search, some, OLD) for some in (pairs, blind))

    assert one.as_json() == other.as_json()
    assert len(next(iter(one.reached.values())).valid) == len(pairs.new_SM) // 5


def test_what_would_not_serve_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = drawn(rotation, labelled=True)
    assert set(choose_kind(FITS, search, pairs, OLD).reached) == set(FITS)
    assert "has none" in choose_kind(FITS, search, pairs, BARE).left_out["slerp"]
    monkeypatch.setattr("index.evaluation.adapter_choice.MAX_COMPARED_PAIRS", 100)
    assert "at most 100" in choose_kind(FITS, search, pairs, OLD).left_out["slerp"]
    lone = replace(pairs, labels_S=np.arange(len(pairs.new_SM)))
    with pytest.raises(InvalidArgument, match="too few pairs of one label"):
        choose_kind(FITS, search, lone, OLD)
    with pytest.raises(InvalidArgument, match="no kind can be fitted"):
        choose_kind(["slerp"], search, pairs, BARE)


def test_a_curve_ends_in_what_was_measured_and_says_whether_more_would_help() -> None:
    for count, mixed_up, told in ((2000, 0, "hardly help"), (40, 0, "cannot be told"), (2000, 800, "probably help")):
        pairs = drawn(rotation, count)
        halved = replace(pairs, new_SM=np.concatenate([pairs.new_SM[:mixed_up][::-1], pairs.new_SM[mixed_up:]]))
        whole = measure(search("ridge", pairs)(pairs.new_QM, pairs.old_QN), pairs, OLD)
        curve = learning_curve("ridge", search, halved, OLD, whole)

        fitted = len(pairs.new_SM)
        assert list(curve.scores) == [fitted // 4, fitted // 2, fitted]
        assert curve.as_json()[-1]["cmc@1"]["value"] == pytest.approx(whole.cmc(1))
        assert told in curve.in_words()
    tiny = replace(pairs, new_SM=pairs.new_SM[:3], old_SN=pairs.old_SN[:3])
    assert "Too few pairs" in learning_curve("ridge", search, tiny, OLD, whole).in_words()


@pytest.mark.parametrize(("least", "fitted_on"), [(5, [6, 12, 24]), (7, [12, 24]), (13, [24])])
def test_a_curve_has_no_point_where_so_few_pairs_determine_no_map(least: int, fitted_on: list[int]) -> None:
    def fit(kind: str, some: Pairs) -> Search:
        if len(some.new_SM) < least:
            raise InvalidArgument("so few pairs do not determine such a map")
        return search(kind, some)

    pairs = drawn(rotation, 30)
    whole = measure(search("ridge", pairs)(pairs.new_QM, pairs.old_QN), pairs, OLD)

    curve = learning_curve("ridge", fit, pairs, OLD, whole)

    assert list(curve.scores) == fitted_on
    assert ("Too few pairs" in curve.in_words()) is (fitted_on == [24])


def test_a_curve_of_a_kind_that_needs_labels_has_them_at_every_point() -> None:
    pairs = drawn(rotation, labelled=True)
    whole = measure(search("slerp", pairs)(pairs.new_QM, pairs.old_QN), pairs, OLD)

    assert len(learning_curve("slerp", search, pairs, OLD, whole).scores) == 3


def ranked(right: float) -> Retrieval:
    hit = np.arange(200) < 200 * right
    return Retrieval({1: hit}, hit.astype(float), np.ones(200, bool))


@pytest.mark.parametrize(
    ("reached", "told"),
    [
        ({"ridge": 0.9}, "ridge is the only kind that could be fitted."),
        ({"low_rank": 0.3, "ridge": 0.9, "slerp": 0.5}, "ridge was chosen, 40.0% of queries ahead of slerp."),
        ({"ridge": 0.5, "slerp": 0.5}, "ridge was chosen, 0.0% of queries ahead of slerp, which may be chance."),
    ],
)
def test_the_kind_chosen_is_told_beside_the_next_best(reached: dict[str, float], told: str) -> None:
    assert ChosenKind("ridge", {kind: ranked(right) for kind, right in reached.items()}, {}).in_words() == told


@pytest.mark.parametrize(
    ("kind", "new_old", "old_old", "told"),
    [
        ("ridge", 0.9, 0.5, "Worth deploying"),
        ("ridge", 0.5, 0.9, "found worse"),
        ("ridge", 0.5, 0.5, "As good as before"),
        ("ridge", 0.5, None, "find their own item first"),
        ("ridge", 0.02, None, "2.0% of held-out queries find their own item first"),
        ("ridge", 0.015, None, "Only 3 of 200 held-out queries find their own item first, which may be chance"),
        ("slerp", 0.0, None, "of the same inputs, row by row?"),
        ("slerp", 0.9, 0.5, "encoded by both"),
    ],
)
def test_a_measured_edge_is_judged_in_words(kind: str, new_old: float, old_old: float | None, told: str) -> None:
    said = recommendation(kind, ranked(new_old), None if old_old is None else ranked(old_old))

    assert told in said
    assert ("encoded by both" in said) is (kind == "slerp")
