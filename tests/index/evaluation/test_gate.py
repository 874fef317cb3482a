"""index.evaluation.gate: the three answers and what they rest on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from index.errors import InvalidArgument
from index.evaluation.gate import MIN_QUERIES, GateVerdict, gate
from index.evaluation.measures import FIRST, PerQuery, tar
from index.evaluation.metrics import Compared, Retrieval
from index.space import Cosine
from naive import unit


def answers(right: np.ndarray, valid: np.ndarray | None = None) -> Retrieval:
    """A retrieval whose first match is right where `right` says, with AP 1 there and 0.5 elsewhere."""
    right = np.asarray(right, bool)
    return Retrieval({1: right}, np.where(right, 1.0, 0.5), np.ones(len(right), bool) if valid is None else valid)


def first_right(count: int, of: int = 200) -> Retrieval:
    return answers(np.arange(of) < count)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (100, 130, GateVerdict.PASS),
        (130, 100, GateVerdict.REFUSE),
        (100, 102, GateVerdict.WARN),
        (100, 100, GateVerdict.WARN),
    ],
)
def test_the_interval_of_the_difference_decides(old: int, new: int, expected: GateVerdict) -> None:
    verdict = gate(first_right(old), first_right(new))
    assert verdict.verdict is expected
    assert verdict.difference.value == pytest.approx((new - old) / 200)
    assert (verdict.difference.low > 0) is (expected is GateVerdict.PASS)
    assert (verdict.difference.high < 0) is (expected is GateVerdict.REFUSE)


def test_only_queries_that_both_can_answer_are_compared() -> None:
    old = answers(np.arange(200) < 100, valid=np.arange(200) >= 50)
    new = answers(np.arange(200) < 100, valid=np.arange(200) < 150)

    verdict = gate(old, new)

    assert (verdict.queries, verdict.old_old.value, verdict.new_old.value) == (100, 0.5, 0.5)


def test_the_same_answers_are_a_warning_with_no_width() -> None:
    """A dual route: M(new/old) is M(old/old) itself."""
    verdict = gate(first_right(100), first_right(100))
    assert (verdict.difference.low, verdict.difference.high) == (0, 0)
    assert verdict.negative_flips == 0


def test_pairing_decides_where_unpaired_intervals_overlap() -> None:
    verdict = gate(first_right(100), first_right(112))
    assert verdict.verdict is GateVerdict.PASS
    assert verdict.old_old.high > verdict.new_old.low


def test_flips_are_counted_on_valid_queries_only() -> None:
    old, new = np.array([1, 1, 1, 0]), np.array([0, 1, 0, 1])
    valid = np.array([True, True, False, True])
    verdict = gate(answers(old, valid), answers(new, valid))
    assert verdict.negative_flips == 1
    assert verdict.queries == 3
    assert verdict.old_old.value == pytest.approx(2 / 3)


def test_another_metric_decides_but_flips_stay_those_of_the_first_match() -> None:
    old = Retrieval({1: np.array([True] * 50)}, np.full(50, 0.2), np.ones(50, bool))
    new = Retrieval({1: np.array([False] * 50)}, np.full(50, 0.4), np.ones(50, bool))
    assert gate(old, new).verdict is GateVerdict.REFUSE
    verdict = gate(old, new, metric="mAP@1.0")
    assert verdict.verdict is GateVerdict.PASS
    assert verdict.difference.value == pytest.approx(0.2)
    assert verdict.negative_flips == 50


def test_the_gap_closed_needs_new_new_and_a_gain() -> None:
    assert gate(first_right(100), first_right(130)).gap_closed is None
    verdict = gate(first_right(100), first_right(130), first_right(160))
    assert verdict.gap_closed == pytest.approx(0.5)
    assert verdict.new_new.value == pytest.approx(0.8)
    assert gate(first_right(100), first_right(90), first_right(160)).gap_closed is None
    for best in (100, 90):  # there is no whole of which that could be a share
        assert gate(first_right(100), first_right(130), first_right(best)).gap_closed is None


@pytest.mark.parametrize("queries", [1, MIN_QUERIES - 1, MIN_QUERIES])
def test_few_queries_that_agree_decide_nothing(queries: int) -> None:
    worse, better = first_right(0, queries), first_right(queries, queries)

    decided = {gate(worse, better).verdict, gate(better, worse).verdict}

    some = {GateVerdict.WARN} if queries < MIN_QUERIES else {GateVerdict.PASS, GateVerdict.REFUSE}
    assert decided == some


def test_the_seed_makes_a_verdict_repeatable() -> None:
    first = [gate(first_right(100), answers(np.arange(200) % 2), seed=seed) for seed in (0, 0, 1)]
    assert first[0] == first[1]
    assert first[0].difference != first[2].difference


def test_a_verdict_travels_as_json() -> None:
    told = json.loads(json.dumps(gate(first_right(100), first_right(130), first_right(160)).as_json(), allow_nan=False))
    assert told["verdict"] == "pass"
    assert set(told["difference"]) == {"value", "low", "high"}
    assert told["new_new"]["value"] == pytest.approx(0.8)


def test_a_gate_refuses_what_cannot_be_compared() -> None:
    with pytest.raises(InvalidArgument, match="the same queries, not 200 and 100"):
        gate(first_right(10), first_right(10, of=100))
    with pytest.raises(InvalidArgument, match="at least one query"):
        gate(answers(np.ones(3), np.zeros(3, bool)), answers(np.ones(3), np.zeros(3, bool)))
    with pytest.raises(InvalidArgument, match="metric must be one of"):
        gate(first_right(10), first_right(10), metric="accuracy")


def test_intervals_of_tar_hold_the_rate_of_all_queries() -> None:
    """A tenth of the queries is drawn, again and again; the items are all."""
    generator, far, name = np.random.default_rng(1), 0.0005, "TAR@FAR=0.0005"
    labels = np.arange(800) % 20
    centres = unit(generator.normal(size=(20, 16)))[labels]
    old, new = (unit(centres + 0.25 * generator.normal(size=(800, 16))) for _ in range(2))

    def measured(x: np.ndarray, rows: np.ndarray) -> PerQuery:
        return tar(Compared(x[rows], x, Cosine()), labels[rows], labels, far, rows)

    before, after = (measured(x, np.arange(800)).per_query(name).mean() for x in (old, new))
    held = np.zeros(2)
    for _ in range(100):
        rows = generator.permutation(800)[:80]
        verdict = gate(measured(old, rows), measured(new, rows), metric=name)
        scores, true = (verdict.old_old, verdict.difference), (before, after - before)
        held += [score.low <= rate <= score.high for score, rate in zip(scores, true, strict=True)]

    assert held.min() >= 88


@pytest.mark.parametrize(("false_accepts", "verdict"), [(9, GateVerdict.WARN), (10, GateVerdict.REFUSE)])
def test_tar_at_a_rate_of_few_false_accepts_decides_nothing(false_accepts: int, verdict: GateVerdict) -> None:
    """40 queries of two classes have 40 x 20 pairs of different classes; the new version tells nothing apart."""
    labels, far = np.arange(40) % 2, (false_accepts + 0.5) / 800
    old, new = np.eye(2, dtype=np.float32)[labels], unit(np.random.default_rng(0).normal(size=(40, 2)))
    before, after = (tar(Compared(x, x, Cosine()), labels, labels, far, np.arange(40)) for x in (old, new))

    assert gate(before, after, metric=f"TAR@FAR={far:g}").verdict is verdict


def test_a_slice_that_gets_worse_turns_a_pass_into_a_warning() -> None:
    old = np.arange(200) % 2 == 0
    new = old | (np.arange(200) >= 50)
    new[:20] = False
    slices = ["bad" if n < 20 else "rest" for n in range(200)]

    assert gate(answers(old), answers(new)).verdict is GateVerdict.PASS
    verdict = gate(answers(old), answers(new), slice_of=slices)

    assert verdict.verdict is GateVerdict.WARN
    assert [(s.value, s.queries) for s in verdict.slices] == [("bad", 20), ("rest", 180)]
    assert verdict.slices[0].difference.value == pytest.approx(-0.5)


def test_intervals_of_slices_end_where_differences_can() -> None:
    nearly_all, none = first_right(19, 20), first_right(0, 20)

    (gained,), (lost,) = (gate(*pair, slice_of=["a"] * 20).slices for pair in ((none, nearly_all), (nearly_all, none)))

    assert (gained.difference.high, lost.difference.low) == (1.0, -1.0)


@pytest.mark.parametrize(("count", "size"), [(20, 5), (20, 30)])
@pytest.mark.parametrize("metric", ["cmc@1", "mAP@1.0"])
def test_of_many_slices_that_are_no_worse_none_looks_worse_by_chance(count: int, size: int, metric: str) -> None:
    """A fifth of the first matches change, or all average precisions, beside a slice that gains."""
    verdicts = []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        hits_2Q = draw.random((2, count * size)) < 0.5
        hits_2Q[1] = np.where(draw.random(count * size) < 0.2, hits_2Q[1], hits_2Q[0])
        means_2Q = draw.random(count * size) + draw.normal(0, 0.1, (2, count * size))
        values_2Q = hits_2Q.astype(float) if metric == "cmc@1" else means_2Q.clip(0, 1)
        old, new = (
            PerQuery({metric: q, FIRST: q}, np.ones(len(q), bool))
            for q in np.hstack([values_2Q, np.broadcast_to([[0.0], [1.0]], (2, count * size))])
        )
        slices = [str(n // size) for n in range(count * size)] + ["gains"] * (count * size)
        verdicts.append(gate(old, new, metric=metric, slice_of=slices).verdict)

    assert verdicts.count(GateVerdict.PASS) >= 18


def test_slices_count_valid_queries_and_small_ones_are_left_out() -> None:
    right = np.ones(20, bool)
    valid = np.arange(20) >= 4
    slices = ["a"] * 8 + [None] * 4 + ["b"] * 8

    verdict = gate(answers(right, valid), answers(right, valid), slice_of=slices)

    assert [(s.value, s.queries) for s in verdict.slices] == [("b", 8)]


def test_thousands_of_slices_are_told_apart_without_comparing_each_with_each() -> None:
    compared = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(f"s{n // MIN_QUERIES}") for n in range(1500)]
    verdict = gate(first_right(700, 1500), first_right(720, 1500), slice_of=names)

    assert len(verdict.slices) == 300
    assert compared < 10 * len(names)
