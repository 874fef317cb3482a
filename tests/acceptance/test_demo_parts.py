"""The demo's own instruments: what counts as failed, lost, equal or not as expected."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image

from examples.demo import picture
from examples.demo import report as reporting
from examples.demo.engines import engine
from examples.demo.measure import Answer, as_row, difference, measure, same_answers, same_state
from examples.demo.pictures import Pictures, load_pictures
from examples.demo.steps import agreement
from examples.demo.traffic import Counts, Ledger, Outage, Traffic, wrong_answer
from examples.demo.upgrade import Point, Upgrade, Way
from index.evaluation.metrics import MEAN_AP
from regraft import Client, Problem, Unreachable
from regraft.models import DeleteResult, SearchResponse
from staging.answers import filled


def pictures(pairs: int = 1) -> Pictures:
    """Two items of digit 0, one of digit 1, and queries of 0 and 1 in turns."""
    return Pictures([], {"a": 0, "b": 1, "c": 0}, [b"", b""] * pairs, np.array([0, 1] * pairs), [])


def answer(*rows: str, scores: tuple[float, ...] = (0.9, 0.8, 0.7)) -> Answer:
    return Answer([list(row) for row in rows], [list(scores[: len(row)]) for row in rows], frozenset(), {})


def test_the_pictures_share_nothing_between_items_and_queries():
    drawn = load_pictures()

    assert len({item.id for item in drawn.items}) == len(drawn.items) == 577
    assert not {item.image for item in drawn.items} & set(drawn.queries)
    assert len(drawn.queries) == len(drawn.query_digits) == 320
    assert set(drawn.item_digits.values()) == set(range(10))


def test_metrics_are_those_of_the_ranking_by_hand():
    measured = measure(answer("abc", "acb"), pictures())

    assert measured.cmc(1) == 0.5
    assert measured.cmc(5) == 1.0
    assert measured.mean(MEAN_AP) == pytest.approx(((1 + 2 / 3) / 2 + 1 / 3) / 2)


def test_items_that_come_and_go_do_not_change_the_metrics():
    with_visitors = answer("xabyc", "axczb", scores=(1, 0.9, 0.8, 0.7, 0.6))

    assert as_row(measure(with_visitors, pictures())) == as_row(measure(answer("abc", "acb"), pictures()))


def test_a_difference_is_paired():
    better, base = measure(answer("abc", "bac"), pictures()), measure(answer("abc", "acb"), pictures())

    assert difference(better, base)["cmc1"]["value"] == 0.5
    assert difference(base, base)["map"] == {"value": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (answer("abc", "bca"), True),
        (answer("abc", "bca", scores=(0.9 + 1e-7, 0.8, 0.7)), True),
        (answer("abc", "bac"), False),
        (answer("abc", "bcd"), False),
        (answer("abc", "bc"), False),
        (answer("abc"), False),
        (answer("abc", "bca", scores=(0.9, 0.8, 0.71)), False),
    ],
)
def test_answers_are_the_same_when_items_and_scores_are(other, expected):
    assert same_answers(answer("abc", "bca"), other) is expected


def test_items_that_score_the_same_may_stand_in_any_order():
    tied = (0.9, 0.8, 0.8)

    assert same_answers(answer("abc", scores=tied), answer("acb", scores=tied))


def test_states_are_the_same_when_items_versions_and_numbers_are():
    state = {("a", "v1", "encoded", True): np.array([0.5, 0.5], np.float32)}

    assert same_state(state, copy.deepcopy(state))
    assert not same_state(state, {("a", "v1", "encoded", False): state["a", "v1", "encoded", True]})
    assert not same_state(state, {("a", "v1", "encoded", True): np.array([0.5, 0.6], np.float32)})
    assert not same_state(state, {})


def test_an_outage_excuses_exactly_the_requests_it_overlaps():
    outage = Outage()
    before = outage.token()
    assert not outage.excuses(before)
    with outage.held():
        during = outage.token()
        assert outage.excuses(before)
        assert outage.excuses(during)
    after = outage.token()

    assert outage.excuses(before)
    assert outage.excuses(during)
    assert not outage.excuses(after)


def test_the_ledger_promises_nothing_about_an_id_whose_deletion_is_not_acknowledged():
    ledger = Ledger()
    ledger.ingested(["a", "b", "c"])

    leaving = ledger.leaving(2)
    assert (leaving, ledger.present(), ledger.gone()) == (["a", "b"], ["c"], frozenset())

    ledger.deleted(leaving)
    assert ledger.gone() == {"a", "b"}


def body(*ids: str, degraded: Sequence[str] = ()) -> SearchResponse:
    matches = [{"id": i, "score": 1 - n / 10, "raw_score": 1 - n / 10} for n, i in enumerate(ids)]
    left_out = [{"version": version} for version in degraded]
    return answered([{"matches": matches}], left_out)


def answered(results: list, degraded: list = ()) -> SearchResponse:
    return SearchResponse(**filled(SearchResponse, {"results": list(results), "degraded": list(degraded)}))


@pytest.mark.parametrize(
    ("received", "fault"),
    [
        (body("a", "b"), ""),
        (body("a"), "matches"),
        (body("a", "a"), "different"),
        (body("a", "b", degraded=["v1"]), "left out"),
        (answered([]), "0 results"),
        (answered([{"matches": [{"id": "a", "score": 0.1}, {"id": "b", "score": 0.2}]}]), "order"),
    ],
)
def test_a_wrong_answer_is_recognised(received, fault):
    assert fault in wrong_answer(received, 1, 2)
    assert bool(wrong_answer(received, 1, 2)) is bool(fault)


class Answers:
    """A client that gives the next of several answers, or raises it."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def query(self, *_: object) -> object:
        given = self.answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    def delete_items(self, *_: object) -> object:
        return self.query()


def traffic() -> Traffic:
    made = Traffic(lambda: Client("http://nowhere"), "g", Pictures([], {}, [b"1", b"2"], np.array([0, 1]), []))
    made.ledger.ingested(["a", "b"])
    return made


def served(*ids: str) -> SearchResponse:
    row = body(*ids).results[0].model_dump()
    return answered([row, row])


TEN = [f"i{n}" for n in range(10)]


def test_no_answer_without_an_outage_is_a_failed_query():
    clients = traffic()

    clients._query(Answers(Unreachable("gone")))

    assert (clients.counts.queries_failed, clients.counts.queries_interrupted) == (1, 0)


def test_no_answer_in_an_outage_is_interrupted_and_sent_again_until_answered():
    clients = traffic()
    token = clients.outage.token
    clients.outage.token = lambda: token() - 1  # as if every request had begun before an outage that is over

    clients._query(Answers(Unreachable("gone"), Unreachable("gone"), served(*TEN)))

    counts = clients.counts
    assert (counts.queries_served, counts.queries_failed, counts.queries_interrupted) == (1, 0, 2)


@pytest.mark.parametrize("fault", [Problem(500, {}), Problem(409, {"detail": "no route"})])
def test_an_error_answer_is_a_failed_query_even_in_an_outage(fault):
    clients = traffic()
    clients.outage.token = lambda: -1

    clients._query(Answers(fault))

    assert clients.counts.queries_failed == 1


def test_a_deleted_item_in_an_answer_is_seen():
    clients = traffic()
    clients.ledger.deleted(["i3"])

    clients._query(Answers(served(*TEN)))

    assert clients.counts.deleted_seen == {"i3"}


def test_an_acknowledged_item_that_its_deletion_cannot_find_was_lost():
    clients = traffic()

    clients._delete(Answers(DeleteResult(deleted=1, missing=["b"])), 2)

    assert clients.counts.missed_on_deletion == {"b"}


def test_counts_add_up():
    total = Counts(queries_served=1, deleted_seen={"a"}, seconds=[0.1])

    total.add(Counts(queries_served=2, deleted_seen={"b"}, seconds=[0.2]))

    assert (total.queries_served, total.deleted_seen, total.seconds) == (3, {"a", "b"}, [0.1, 0.2])


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


def test_a_shadow_is_held_against_what_a_client_sees():
    old, new = ([body(*ids) for ids in rows] for rows in (("ab", "cd"), ("ba", "ce")))

    assert agreement(old, new) == {"overlap": 0.75, "rank_correlation": pytest.approx(-1 / 3), "first_match_flips": 1}


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


@pytest.mark.parametrize(
    ("name", "given", "settings"),
    [
        (None, {}, {}),
        ("pgvector", {"REGRAFT_PGVECTOR_URL": "p"}, {"REGRAFT_PGVECTOR_URL": "p"}),
        ("milvus", {"REGRAFT_MILVUS_URI": "m", "MILVUS_TEST_URI": "t"}, {"REGRAFT_MILVUS_URI": "m"}),
        (
            "milvus",
            {"MILVUS_TEST_URI": "t", "MILVUS_TEST_TOKEN": "a:b"},
            {"REGRAFT_MILVUS_URI": "t", "REGRAFT_MILVUS_TOKEN": "a:b"},
        ),
    ],
)
def test_an_engine_is_the_server_that_the_caller_names(name, given, settings, tmp_path, monkeypatch):
    for variable in ("REGRAFT_PGVECTOR_URL", "REGRAFT_MILVUS_URI", "MILVUS_TEST_URI"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)

    with engine(name, tmp_path) as known:
        assert known == settings
    assert list(tmp_path.iterdir()) == []
