"""What the demo's traffic counts as failed, interrupted, lost or wrong."""

from __future__ import annotations

import numpy as np
import pytest

from examples.demo.pictures import Pictures
from examples.demo.traffic import Counts, Ledger, Outage, Traffic, wrong_answer
from regraft import Client, Problem, Unreachable
from regraft.models import DeleteResult, SearchResponse
from staging.inputs.demo_pictures import answered, body


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


def test_no_answer_in_an_outage_is_interrupted_and_sent_again_until_answered(monkeypatch):
    clients = traffic()
    token = clients.outage.token
    # As if every request had begun before an outage that is over.
    monkeypatch.setattr(clients.outage, "token", lambda: token() - 1)

    clients._query(Answers(Unreachable("gone"), Unreachable("gone"), served(*TEN)))

    counts = clients.counts
    assert (counts.queries_served, counts.queries_failed, counts.queries_interrupted) == (1, 0, 2)


@pytest.mark.parametrize("fault", [Problem(500, {}), Problem(409, {"detail": "no route"})])
def test_an_error_answer_is_a_failed_query_even_in_an_outage(fault, monkeypatch):
    clients = traffic()
    monkeypatch.setattr(clients.outage, "token", lambda: -1)

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
