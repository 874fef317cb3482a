"""modes: the merge mode that a simulated backfill is served best by; and maps drawn towards raw scores."""

from __future__ import annotations

import numpy as np
import pytest

from index.edges.calibration import Calibration, blend, calibration_from_json
from index.errors import InvalidArgument
from index.evaluation.measures import first_items
from index.evaluation.metrics import MEAN_AP, Compared
from index.evaluation.modes import choose_merge_mode, decide_mode
from index.evaluation.relevance import LabelRelevance, RankingRelevance
from index.evaluation.score_maps import fit_maps
from index.query.merge import Mode
from index.space import Cosine, Euclidean

COSINE = Cosine()


def versions(crowded: float, count: int = 200) -> tuple[Compared, Compared, LabelRelevance]:
    """A noisy old version, crowded into a cone or not, and a better new one, over the same items of twenty classes."""
    draw = np.random.default_rng(1)
    codes = draw.integers(20, size=count)
    centres = draw.normal(size=(20, 12))
    made = []
    for noise, lift in ((1.2, crowded), (0.6, 0.0)):
        noisy = centres[codes] + noise * draw.normal(size=(count, 12)) + lift
        x = COSINE.normalise(noisy.astype(np.float32))
        made.append(Compared(x, x, COSINE))
    return made[0], made[1], LabelRelevance(codes, codes, np.arange(count))


@pytest.mark.parametrize("safe", [Mode.RAW, Mode.CALIBRATED])
@pytest.mark.parametrize("labelled", [True, False])
def test_scores_that_mean_different_things_are_calibrated(safe: Mode, labelled: bool) -> None:
    old, new, right = versions(4.0)
    told = right if labelled else RankingRelevance(first_items(new, 10, right.self_Q), 200, right.self_Q)

    found = choose_merge_mode(old, new, told, default=safe)

    assert (found.mode, found.queries) == (Mode.CALIBRATED, 200)
    assert found.areas["calibrated"] > found.areas["raw"] + 0.05
    assert found.gains["raw"].low > 0


def test_spaces_of_two_kinds_are_not_ranked_by_raw_scores() -> None:
    old, new, right = versions(0.0)
    found = choose_merge_mode(Compared(old.queries, old.items, Euclidean()), new, right, default=Mode.RAW)
    assert set(found.areas) == {"calibrated", "rank"}


def test_nothing_to_find_chooses_nothing() -> None:
    old, new, _ = versions(0.0)
    apart = LabelRelevance(np.arange(200), np.arange(200), np.arange(200))
    assert choose_merge_mode(old, new, apart, default=Mode.RAW) is None


def test_maps_need_a_query_and_an_item() -> None:
    old, _, right = versions(0.0)
    for shard, rows in ((old, []), (Compared(old.queries, old.items[:0], COSINE), [0])):
        with pytest.raises(InvalidArgument, match="at least one query and one item"):
            fit_maps([shard], right, np.array(rows, np.int64))


def test_a_gallery_larger_than_what_is_simulated_is_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index.evaluation.modes.QUERIES", 60)
    monkeypatch.setattr("index.evaluation.modes.ITEMS", 120)
    old, new, right = versions(4.0)
    for told in (right, RankingRelevance(first_items(new, 1, right.self_Q), 200, right.self_Q)):
        found = choose_merge_mode(old, new, told, default=Mode.RAW)
        assert found.queries <= 60


def areas(**gains: float) -> dict[Mode, np.ndarray]:
    """100 queries around 0.5; `gains` are means over raw, with a half-width of about 0.02."""
    noise = np.random.default_rng(0).normal(size=100)
    noise -= noise.mean()
    return {Mode.RAW: np.full(100, 0.5), **{Mode(mode): 0.5 + gain + 0.1 * noise for mode, gain in gains.items()}}


@pytest.mark.parametrize(
    ("first", "second", "mode"),
    [
        ({"calibrated": 0.05}, {"calibrated": 0.0}, "calibrated"),
        ({"calibrated": 0.012}, {"calibrated": 0.012}, "calibrated"),
        ({"calibrated": 0.005}, {"calibrated": 0.005}, "raw"),
        ({"calibrated": -0.05}, {"calibrated": 0.2}, "raw"),
        ({"calibrated": 0.03, "rank": 0.05}, {"calibrated": 0.0, "rank": 0.0}, "rank"),
    ],
)
def test_the_safe_mode_yields_to_evidence_by_both_metrics(
    first: dict[str, float], second: dict[str, float], mode: str
) -> None:
    found = decide_mode({"cmc@1": areas(**first), MEAN_AP: areas(**second)}, Mode.RAW)
    assert (found.mode, found.metric) == (mode, "cmc@1")


def test_few_queries_leave_the_order_of_raw_scores_and_many_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same two ways, seen by all queries and by four: the fewer, the nearer the two maps are to each other."""
    old, new, right = versions(4.0)
    at = np.linspace(-0.2, 0.95, 20)

    def apart(rows: np.ndarray) -> float:
        before, after = fit_maps([old, new], right, rows)
        return float(np.abs(before.log_odds(at) - after.log_odds(at)).mean())

    few, many = apart(np.arange(4)), apart(np.arange(200))
    monkeypatch.setattr("index.evaluation.score_maps.FEW", 0)
    free = apart(np.arange(4))

    assert few < 0.5 * free
    assert few < many


def test_a_blend_is_the_mean_in_log_odds_and_can_be_kept() -> None:
    steep = Calibration(np.array([0.0, 0.5]), np.array([0.1, 0.9]), 400.0)
    flat = Calibration(np.array([0.4, 0.9]), np.array([0.2, 0.6]), 3.0)

    found = blend(steep, flat, 0.25)

    kept = calibration_from_json(found.as_json())
    at = np.array([0.0, 0.2, 0.4, 0.45, 0.5])
    np.testing.assert_allclose(kept.log_odds(at), 0.75 * steep.log_odds(at) + 0.25 * flat.log_odds(at), atol=1e-6)
    assert (np.diff(kept.log_odds(np.linspace(-2, 3, 500))) > 0).all()
    falling = blend(
        Calibration(np.array([1.0]), np.array([0.5]), -2.0), Calibration(np.array([3.0]), np.array([0.5]), -4.0), 0.5
    )
    np.testing.assert_allclose(calibration_from_json(falling.as_json()).log_odds([0.0, 2.0, 5.0]), [7.0, 1.0, -8.0])


def test_steep_maps_that_lie_far_apart_blend_to_one_that_still_orders() -> None:
    near, far = (Calibration(np.array([knot]), np.array([0.5]), 1e4) for knot in (0.0, 1.0))

    kept = calibration_from_json(blend(near, far, 0.5).as_json())

    assert (np.diff(kept.log_odds(np.linspace(-1, 2, 50))) > 0).all()
