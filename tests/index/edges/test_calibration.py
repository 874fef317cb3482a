"""index.edges.calibration: a naive twin of isotonic regression, points by hand, and a map that keeps every order."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from index.edges.calibration import Calibration, calibration_from_json, fit_calibration, pool_adjacent_violators
from index.errors import InvalidArgument

numbers = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 2))


def naive_isotonic(values: list[float], weights: list[float]) -> list[float]:
    """The min-max formula: the largest over starts a <= i of the smallest over ends b >= i of the mean of a..b."""

    def mean(a: int, b: int) -> float:
        return sum(v * w for v, w in zip(values[a : b + 1], weights[a : b + 1], strict=True)) / sum(weights[a : b + 1])

    size = range(len(values))
    return [max(min(mean(a, b) for b in size if b >= i) for a in size if a <= i) for i in size]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(numbers, st.floats(0.1, 5)), min_size=1, max_size=12))
def test_pooling_equals_the_min_max_formula(pairs: list[tuple[float, float]]) -> None:
    values, weights = [p[0] for p in pairs], [p[1] for p in pairs]
    steps, step = pool_adjacent_violators(values, weights)
    np.testing.assert_allclose(steps[step], naive_isotonic(values, weights), atol=1e-9)
    assert (np.diff(steps) > 0).all()


@pytest.mark.parametrize("falls", ["answers", "last"])
def test_pooling_of_long_runs_and_of_a_last_value_that_joins_all_equals_the_formula(falls: str) -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(2, size=40).tolist() if falls == "answers" else [*range(30), -1e4]
    weights = generator.uniform(0.5, 2, size=len(values)).tolist()
    steps, step = pool_adjacent_violators(values, weights)
    np.testing.assert_allclose(steps[step], naive_isotonic(values, weights), atol=1e-9)
    assert (np.diff(steps) > 0).all()


def test_pooling_by_hand() -> None:
    """3 stands before 1, so they join at 2; 2 joins too, being equal; 5 stays."""
    steps, step = pool_adjacent_violators([3, 1, 2, 5], [1, 1, 4, 1])
    np.testing.assert_allclose(steps, [2, 5])
    np.testing.assert_array_equal(step, [0, 0, 0, 1])


def test_a_map_by_hand() -> None:
    """Four pairs at score 1, one right; four at 3, three right: (k + 1/2) / (n + 1) = 0.3 and 0.7, 1/2 between them."""
    fitted = fit_calibration([1] * 4 + [3] * 4, [1, 0, 0, 0, 1, 1, 1, 0], higher_is_better=True)
    np.testing.assert_allclose(fitted([1, 2, 3]), [0.3, 0.5, 0.7])
    step = np.log(0.7 / 0.3)
    np.testing.assert_allclose(fitted.log_odds([0, 4]), [-2 * step, 2 * step])


def test_weights_stand_for_so_many_pairs() -> None:
    generator = np.random.default_rng(0)
    scores, right, weights = (
        generator.normal(size=50),
        generator.integers(2, size=50),
        generator.integers(1, 5, size=50),
    )
    weighted = fit_calibration(scores, right, higher_is_better=True, weights=weights)
    repeated = fit_calibration(np.repeat(scores, weights), np.repeat(right, weights), higher_is_better=True)
    np.testing.assert_allclose(weighted.scores_K, repeated.scores_K)
    np.testing.assert_allclose(weighted.probabilities_K, repeated.probabilities_K)


def test_a_known_probability_is_found_from_pairs() -> None:
    generator = np.random.default_rng(0)
    scores = generator.normal(size=50_000)
    truth = lambda s: 1 / (1 + np.exp(4 - 3 * s))  # noqa: E731
    fitted = fit_calibration(scores, generator.random(50_000) < truth(scores), higher_is_better=True)
    at = np.linspace(-1, 2.5, 20)
    np.testing.assert_allclose(fitted(at), truth(at), atol=0.04)


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=40),
    asked=st.lists(numbers, min_size=2, max_size=20),
    higher=st.booleans(),
)
def test_the_order_inside_a_shard_never_changes(
    pairs: list[tuple[float, bool]], asked: list[float], higher: bool
) -> None:
    fitted = fit_calibration(*zip(*pairs, strict=True), higher_is_better=higher)
    at = np.unique(asked)
    rise = np.diff(fitted.log_odds(at)) * (1 if higher else -1)
    assert (rise > 0).all()
    assert ((fitted(at) >= 0) & (fitted(at) <= 1)).all()


def test_lower_is_better_is_the_mirror_image() -> None:
    generator = np.random.default_rng(1)
    scores, right = generator.normal(size=300), generator.integers(2, size=300)
    up, down = (fit_calibration(s * scores, right, higher_is_better=s > 0) for s in (1, -1))
    np.testing.assert_allclose(up(scores), down(-scores))
    assert up.slope == -down.slope > 0


def test_scores_that_say_nothing_give_the_share_of_right_pairs_and_still_an_order() -> None:
    fitted = fit_calibration([1, 2, 3, 4], [1, 1, 0, 0], higher_is_better=True)
    assert len(fitted.scores_K) == 1
    np.testing.assert_allclose(fitted(2.5), 0.5)
    np.testing.assert_allclose(fitted.log_odds(2.5 + np.sqrt(1.25)), 1.0)  # one per standard deviation
    same = fit_calibration([2, 2], [1, 0], higher_is_better=True)
    assert same(3) > same(2) > same(1)


def test_far_scores_round_to_certainty_without_a_warning() -> None:
    fitted = fit_calibration([0, 1], [0, 1], higher_is_better=True)
    assert fitted([-1e6, 1e6]).tolist() == [0, 1]
    assert np.diff(fitted.log_odds([1e6, 2e6])) > 0


def test_json_holds_the_whole_map() -> None:
    generator = np.random.default_rng(2)
    for higher in (True, False):
        fitted = fit_calibration(generator.normal(size=99), generator.integers(2, size=99), higher_is_better=higher)
        again = calibration_from_json(json.loads(json.dumps(fitted.as_json())))
        at = np.linspace(-4, 4, 30)
        np.testing.assert_array_equal(again.log_odds(at), fitted.log_odds(at))


def test_beyond_its_ends_a_map_goes_on_as_it_runs_over_all_of_them() -> None:
    scores, right = np.repeat([0.0, 1.0, 4.0], 10), np.concatenate([np.arange(10) < n for n in (1, 2, 9)])
    for sign in (1, -1):
        fitted = fit_calibration(sign * scores, right, higher_is_better=sign > 0)
        first, last, beyond = fitted.log_odds(sign * np.array([0.0, 4.0, 8.0]))
        assert beyond == pytest.approx(last + (last - first))


GOOD: dict[str, Any] = {"kind": "isotonic", "scores": [1, 2], "probabilities": [0.2, 0.4], "slope": 1.0}


@pytest.mark.parametrize(
    ("change", "pointer", "message"),
    [
        ({"kind": "platt"}, "/calibration", "must hold kind 'isotonic'"),
        ({"extra": 1}, "/calibration", "must hold kind"),
        ({"scores": [2, 1]}, "/calibration/scores", "rise strictly"),
        ({"scores": []}, "/calibration/scores", "finite numbers"),
        ({"scores": 5}, "/calibration/scores", "finite numbers"),
        ({"scores": [1, "2"]}, "/calibration/scores", "finite numbers"),
        ({"scores": [1, float("nan")]}, "/calibration/scores", "finite numbers"),
        ({"scores": [1, 10**400]}, "/calibration/scores", "finite numbers"),
        ({"slope": True}, "/calibration/slope", "finite numbers"),
        ({"slope": 0}, "/calibration/slope", "must not be 0"),
        ({"slope": -1}, "/calibration/probabilities", "fall where it is below"),
        ({"probabilities": [0.2]}, "/calibration/probabilities", "one for each score"),
        ({"probabilities": [0.2, 1]}, "/calibration/probabilities", "above 0 and below 1"),
        ({"probabilities": [0.2, 0.2]}, "/calibration/probabilities", "rise strictly"),
        ({"probabilities": [0.0, 0.4]}, "/calibration/probabilities", "above 0 and below 1"),
    ],
)
def test_a_map_that_is_none_is_refused_by_field(change: dict[str, Any], pointer: str, message: str) -> None:
    assert isinstance(calibration_from_json(GOOD), Calibration)
    with pytest.raises(InvalidArgument, match=message) as refused:
        calibration_from_json(GOOD | change)
    assert refused.value.pointer == pointer


@pytest.mark.parametrize("value", [None, 1, "isotonic", list(GOOD)])
def test_a_map_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match="must hold kind"):
        calibration_from_json(value)


def test_a_whole_number_of_more_than_64_bits_is_a_number() -> None:
    assert calibration_from_json(GOOD | {"scores": [-(10**20), 10**20]}).scores_K.tolist() == [-1e20, 1e20]


@pytest.mark.parametrize(
    "arguments",
    [
        {"scores": [], "relevant": []},
        {"scores": [1.0], "relevant": [1, 0]},
        {"scores": [[1.0]], "relevant": [[1]]},
        {"scores": [1.0, np.inf], "relevant": [1, 0]},
        {"scores": [1.0, 2.0], "relevant": [1, 0], "weights": [1.0, 0.0]},
        {"scores": [1.0, 2.0], "relevant": [1, 0], "weights": [1.0, np.inf]},
        {"scores": [1.0], "relevant": [1], "weights": [1.0, 1.0]},
    ],
)
def test_pairs_that_do_not_fit_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="a calibration needs"):
        fit_calibration(**arguments, higher_is_better=True)


def test_measuring_calibrating_and_following_edges_needs_nothing_but_numpy() -> None:
    """Training and the demo measure where neither FAISS nor onnxruntime nor a service is installed."""
    code = (
        "import sys\n"
        "for name in ('faiss', 'onnx', 'onnxruntime', 'pydantic', 'PIL', 'torch'): sys.modules[name] = None\n"
        "import index.edges.calibration, index.edges.graph, index.edges.transform, index.version_folder.folder\n"
        "from index.evaluation import gate, metrics, ordering, verification"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
