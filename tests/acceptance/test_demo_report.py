"""What the demo reports: which expectation does not hold, the summary and the picture."""

from __future__ import annotations

import copy

import pytest
from PIL import Image

from examples.demo import picture
from examples.demo import report as reporting
from examples.demo.measure import measure
from examples.demo.pictures import load_pictures
from examples.demo.traffic import Counts
from examples.demo.upgrade import Point, Upgrade, Way
from staging.inputs.demo_pictures import answer, pictures


def upgraded(name: str, edge: str) -> Upgrade:
    rankings = (("bca", "cab"), ("abc", "cab"), ("acb", "bac"))
    old, mixed, new = (measure(answer(*(row * 8)), pictures(8)) for row in rankings)
    return Upgrade(
        way=Way(name, f"v2-{name}", edge),
        old_old=old,
        new_old=mixed,
        new_new=new,
        at_deploy=mixed,
        gate={},
        curve=[Point(n / 20, 0.6, 1.0, 0.5) for n in range(21)],
        live={
            "state": "complete",
            "error": None,
            "area": 0.52,
            "points": [{"share": n, "value": 0.52} for n in (0, 1)],
        },
        routes={},
        rollback={"answers_equal_old_old": True, "forward_answers_equal_new_new": True},
        kill=None,
        counts=Counts(queries_served=5, seconds=[0.01]),
        seconds={"rollback": 0.01},
    )


KILL = {
    "moved": 0.5,
    "done_before": 3,
    "done_after": 3,
    "seconds_down": 1.0,
    "state_equal": True,
    "answers_equal": True,
}


def counted(old: int, new: int, **more: object) -> dict:
    return {"queries": {"old": old, "new": new}, "errors": 0, **more}


AGREED = {"overlap": 0.5, "rank_correlation": 0.1, "first_match_flips": 1}
STEPS = {
    "version": "v2",
    "items": 9,
    "shadow": {
        "asked": 4,
        "answered_by": {"v1": 4},
        "counted": counted(4, 4, compared=4, **AGREED),
        "seen_when_current": AGREED,
    },
    "canary": {"asked": 6, "answered_by": {"v1": 4, "v2": 2}, "counted": counted(4, 2)},
    "backfill": {
        "workers": ["remote"],
        "worker_key_refused_elsewhere": True,
        "moved_remotely": 9,
        "pause": {"at_start": {"done": 3}, "at_end": {"done": 3}, "work_given": False},
        "rollback": {"state": "cancelled", "done": 5, "total": 9, "rankings_equal": True},
        "forward": {"items_forward": 5, "done": 4, "mix": {"v2": 9}},
    },
}


def good_report() -> reporting.Report:
    upgrades = [upgraded("bct", "identity"), upgraded("fct", "forward")]
    return reporting.build(upgrades, dict(KILL), [], {"total": 1.0}, copy.deepcopy(STEPS))


def test_a_good_run_meets_every_expectation():
    assert reporting.unmet(good_report()) == []


@pytest.mark.parametrize("name", ["failed_queries", "failed_writes", "lost_items", "resurrected_items"])
def test_one_failure_is_one_too_many(name):
    (sentence,) = reporting.unmet({**good_report(), name: 1})

    assert sentence.startswith(f"{name} is 1")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("differences", "fct", "new_old - old_old", "cmc1", "low"), 0.0, "fct: new_old - old_old"),
        (("differences", "bct", "new_new - new_old", "cmc1", "low"), 0.0, "bct: new_new - new_old"),
        (("rollback", "bct", "answers_equal_old_old"), False, "bct: after the rollback"),
        (("rollback", "fct", "forward_answers_equal_new_new"), False, "fct: deployed again"),
        (("kill", "done_after"), 2, "stood behind"),
        (("kill", "state_equal"), False, "final state differs"),
        (("kill", "answers_equal"), False, "final answers differ"),
        (("queries_served",), 0, "no query"),
        (("curves", "bct", 10, "moved"), 0.75, "bct: the curve has a gap of 30%"),
        (("live_curves", "bct", "state"), "stopped", "bct: the service's curve is stopped"),
        (("live_curves", "fct", "area"), 0.6, "fct: areas under the curves of service and client are 10.0% apart"),
        (("steps", "shadow", "counted", "rank_correlation"), 0.2, "foretold"),
        (("steps", "shadow", "answered_by"), {"v1": 3, "v2": 1}, "in the shadow"),
        (("steps", "shadow", "counted", "compared"), 3, "compared 3"),
        (("steps", "shadow", "counted", "errors"), 1, "errors in the shadow: 1"),
        (("steps", "shadow", "counted", "overlap"), 0.6, "foretold"),
        (("steps", "shadow", "counted", "first_match_flips"), 2, "foretold"),
        (("steps", "canary", "answered_by"), {"v1": 6}, "the canary counted"),
        (("steps", "canary", "counted", "errors"), 1, "errors in the canary: 1"),
        (("steps", "backfill", "worker_key_refused_elsewhere"), False, "worker key"),
        (("steps", "backfill", "workers"), ["remote", "worker"], "workers were"),
        (("steps", "backfill", "moved_remotely"), 8, "moved 8 of 9"),
        (("steps", "backfill", "pause", "at_end"), {"done": 4}, "during the pause"),
        (("steps", "backfill", "pause", "work_given"), True, "got work"),
        (("steps", "backfill", "rollback", "done"), 3, "after the resumption"),
        (("steps", "backfill", "rollback", "state"), "done", "not in the middle"),
        (("steps", "backfill", "rollback", "done"), 9, "not in the middle"),
        (("steps", "backfill", "rollback", "rankings_equal"), False, "rankings differ"),
        (("steps", "backfill", "forward", "items_forward"), 4, "did not come back"),
        (("steps", "backfill", "forward", "mix"), {"v1": 1, "v2": 8}, "the mix is"),
    ],
)
def test_what_does_not_hold_is_said(path, value, said):
    report = good_report()
    place = report
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value

    assert any(said in sentence for sentence in reporting.unmet(report))


def test_the_summary_names_the_counts():
    report = good_report()

    assert "10 served, 0 failed" in reporting.summary(report)
    assert reporting.table(report).row_count == 6


def test_the_picture_shows_queries_that_the_upgrade_changed_first(tmp_path):
    drawn = load_pictures(items=40, queries=8)
    by_digit = {digit: item for item, digit in drawn.item_digits.items()}
    right = [by_digit[int(digit)] for digit in drawn.query_digits]
    wrong = [by_digit[(int(digit) + 1) % 10] for digit in drawn.query_digits]
    before = [*wrong[:2], *right[2:]]
    at_deploy = [right[0], wrong[1], right[2], wrong[3], *right[4:]]
    found = {"before": before, "at_deploy": at_deploy, "after": right}

    shown = picture.examples({stage: [[i] * 5 for i in ids] for stage, ids in found.items()}, drawn)

    assert [row["query"] for row in shown] == [0, 3, 1, 2, 4, 5]
    assert shown[0] == {"query": 0, "before": [wrong[0]] * 5, "at_deploy": [right[0]] * 5, "after": [right[0]] * 5}
    built = reporting.build([upgraded("bct", "identity"), upgraded("oca", "truncate")], KILL, [], {}, STEPS)
    picture.draw({**built, "examples": shown}, drawn, tmp_path / "story.png")
    with Image.open(tmp_path / "story.png") as image:
        assert min(image.size) > 1000
