"""Shadow and canary: who is asked, what is counted, and when a canary is rolled back by itself."""

from __future__ import annotations

import itertools
import queue
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sqlalchemy.exc import OperationalError

from service.registry.rollout_records import Counters, bucket, counters_from_json, exceeded, quantile, summary
from service.upgrades.rollouts import monitor as watching
from service.upgrades.rollouts.monitor import RolloutMonitor, share_of


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    served.add("drifted", 4, drift=2.0, edges=[("v1", "identity")])
    served.add("twin", 4, edges=[("v1", "identity")])


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures)


def begin(served: Any, path: str, version: str, until: str, **body: Any) -> int:
    made = served.http.post(f"{path}/deployments", json={"version": version, "until": until, **body})
    assert made.status_code == 201, made.text
    return int(made.json()["id"])


def ask(served: Any, path: str, picture: bytes, key: str = "", **fields: Any) -> dict[str, Any]:
    data = {"k": 5, **fields}
    headers = {"X-Query-Key": key} if key else {}
    answer = served.http.post(f"{path}/query", data=data, files=[("images", ("q", picture))], headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def shown(served: Any, path: str, number: int) -> dict[str, Any]:
    return dict(served.http.get(f"{path}/deployments/{number}").json())


def wait_for(served: Any, path: str, number: int, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The deployment once it is as wanted: counting happens behind the response."""
    deadline = time.monotonic() + 60
    while not holds(found := shown(served, path, number)):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def counted(phase: str, side: str, most: int) -> Callable[[dict[str, Any]], bool]:
    return lambda found: found["trial"].get(phase, {}).get("queries", {}).get(side, 0) >= most


def tau(old: list[str], new: list[str]) -> float:
    """Kendall's tau-a over all ids, those that a list lacks tied behind it: as a client computes it."""

    def order(ids: list[str], a: str, b: str) -> int:
        places = [ids.index(one) if one in ids else len(ids) for one in (a, b)]
        return (places[0] > places[1]) - (places[0] < places[1])

    pairs = list(itertools.combinations({*old, *new}, 2))
    return sum(order(old, a, b) * order(new, a, b) for a, b in pairs) / len(pairs)


class TestShadow:
    def test_the_old_version_answers_and_the_new_one_is_compared(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        before = [ask(served, filled, picture)["results"] for picture in pictures[:6]]
        number = begin(served, filled, "drifted", "shadow")

        answers = [ask(served, filled, picture) for picture in pictures[:6]]

        assert [answer["results"] for answer in answers] == before
        assert {answer["version"] for answer in answers} == {"v1"}
        trial = wait_for(served, filled, number, counted("shadow", "new", 6))["trial"]["shadow"]
        assert (trial["queries"], trial["compared"], trial["errors"], trial["dropped"]) == (
            {"old": 6, "new": 6},
            6,
            0,
            0,
        )
        assert trial["latency_ms"]["old"]["p50"] > 0
        assert trial["latency_ms"]["new"]["p99"] > 0
        served.http.post(f"{filled}/rollback")
        served.http.post(f"{filled}/deployments", json={"version": "drifted"})
        new = [ask(served, filled, picture)["results"][0]["matches"] for picture in pictures[:6]]
        lists = [
            ([m["id"] for m in old[0]["matches"]], [m["id"] for m in found])
            for old, found in zip(before, new, strict=True)
        ]
        assert trial["overlap"] == pytest.approx(np.mean([len(set(a) & set(b)) / 5 for a, b in lists]))
        assert trial["first_match_flips"] == sum(a[0] != b[0] for a, b in lists)
        assert 0 < trial["overlap"] < 1
        assert trial["rank_correlation"] == pytest.approx(np.mean([tau(a, b) for a, b in lists]))
        assert -1 < trial["rank_correlation"] < 1

    def test_the_same_embeddings_agree_in_everything(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        number = begin(served, filled, "twin", "shadow")
        ask(served, filled, pictures[0])

        trial = wait_for(served, filled, number, counted("shadow", "new", 1))["trial"]["shadow"]

        assert (trial["overlap"], trial["rank_correlation"], trial["first_match_flips"]) == (1.0, 1.0, 0)

    def test_queries_that_nothing_can_match_are_not_compared(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        number = begin(served, filled, "twin", "shadow")
        ask(served, filled, pictures[0])
        ask(served, filled, pictures[1], filter='{"field": "colour", "eq": "none"}')

        trial = wait_for(served, filled, number, counted("shadow", "new", 2))["trial"]["shadow"]

        assert (trial["compared"], trial["overlap"]) == (1, 1.0)

    def test_what_is_written_between_the_two_answers_is_no_difference(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        number, compare, asked = begin(served, filled, "twin", "shadow"), RolloutMonitor._compare, itertools.count()

        def late(self: RolloutMonitor, job: Any) -> None:
            best = job.old.items[int(job.old.keys_QK[0, 0])].id
            if next(asked) % 2:
                assert served.http.delete(f"{filled}/items/{best}").status_code == 204
            else:
                assert served.ingest(filled, {f"copy of {best}": pictures[int(best[1:])]}).status_code == 200
            compare(self, job)

        monkeypatch.setattr(RolloutMonitor, "_compare", late)
        for picture in pictures[:6:2]:
            ask(served, filled, picture)

        trial = wait_for(served, filled, number, counted("shadow", "new", 3))["trial"]["shadow"]

        assert (trial["compared"], trial["errors"]) == (3, 0)
        assert (trial["overlap"], trial["rank_correlation"], trial["first_match_flips"]) == (1.0, 1.0, 0)

    def test_a_new_version_that_fails_is_counted_and_nobody_notices(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(served.runtime.registry.named("drifted"), "images", broken)
        number = begin(served, filled, "drifted", "shadow")

        assert ask(served, filled, pictures[0])["version"] == "v1"

        trial = wait_for(served, filled, number, counted("shadow", "new", 1))["trial"]["shadow"]
        assert (trial["errors"], trial["error_rate"], trial["compared"]) == (1, 1.0, 0)
        assert "out of order" in trial["last_errors"][0]["error"]

    def test_what_there_is_no_room_for_is_dropped_and_counted(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watching, "MAX_WAITING_BYTES", 1)
        number = begin(served, filled, "drifted", "shadow")
        for picture in pictures[:3]:
            ask(served, filled, picture)

        trial = wait_for(served, filled, number, counted("shadow", "old", 3))["trial"]["shadow"]

        assert (trial["dropped"], trial["queries"]["new"]) == (3, 0)

    def test_a_full_queue_drops_without_waiting(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Full(queue.Queue):  # type: ignore[type-arg]
            def put_nowait(self, job: Any) -> None:
                raise queue.Full

        monkeypatch.setattr(served.runtime.rollouts, "_jobs", Full(64))
        number = begin(served, filled, "drifted", "shadow")
        ask(served, filled, pictures[0])

        assert wait_for(served, filled, number, counted("shadow", "old", 1))["trial"]["shadow"]["dropped"] == 1

    def test_queries_that_only_one_version_can_answer_take_no_part(self, served: Any, filled: str) -> None:
        number = begin(served, filled, "drifted", "canary", canary={"share": 1.0})
        body = {"version": "v1", "embeddings": [[1, 0, 0, 0]], "k": 3}

        assert served.http.post(f"{filled}/query", json=body).json()["version"] == "v1"
        assert shown(served, filled, number)["trial"] == {}


class TestCanary:
    def test_a_key_stays_with_one_version_and_the_share_is_about_right(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        number = begin(served, filled, "drifted", "canary", canary={"share": 0.5})
        keys = [f"user{n}" for n in range(24)]
        trial = SimpleNamespace(deployment=number)

        first = {key: ask(served, filled, pictures[0], key)["version"] for key in keys}
        again = {key: ask(served, filled, pictures[1], key)["version"] for key in keys}

        assert first == again
        assert first == {key: "drifted" if share_of(trial, key.encode()) < 0.5 else "v1" for key in keys}
        assert len(set(first.values())) == 2
        counts = Counter(first.values())
        found = wait_for(served, filled, number, counted("canary", "new", 2 * counts["drifted"]))
        assert found["trial"]["canary"]["queries"] == {"old": 2 * counts["v1"], "new": 2 * counts["drifted"]}

    def test_without_a_key_the_content_decides(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        begin(served, filled, "drifted", "canary", canary={"share": 0.5})

        first, again = ([ask(served, filled, picture)["version"] for picture in pictures] for _ in range(2))

        assert first == again
        assert set(first) == {"v1", "drifted"}

    def test_a_larger_share_keeps_those_who_are_in(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        number = begin(served, filled, "drifted", "canary", canary={"share": 0.3})
        first = [ask(served, filled, picture)["version"] == "drifted" for picture in pictures]

        more = {"to": "canary", "canary": {"share": 0.7}}
        assert served.http.post(f"{filled}/deployments/{number}/advance", json=more).status_code == 200
        wider = [ask(served, filled, picture)["version"] == "drifted" for picture in pictures]

        assert sum(first) < sum(wider)
        assert all(w for f, w in zip(first, wider, strict=True) if f)

    def test_the_shares_of_a_key_are_uniform(self) -> None:
        shares = [share_of(SimpleNamespace(deployment=7), str(n).encode()) for n in range(4000)]

        assert 0 <= min(shares) < 0.01
        assert 0.99 < max(shares) < 1
        assert np.histogram(shares, bins=10, range=(0, 1))[0] == pytest.approx(400, abs=100)

    def test_another_canary_draws_other_clients(self) -> None:
        keys = [str(n).encode() for n in range(4000)]
        early, late = ({k for k in keys if share_of(SimpleNamespace(deployment=d), k) < 0.1} for d in (7, 8))

        assert len(early & late) < 0.2 * len(early)

    def test_what_the_new_version_cannot_answer_the_old_one_does_until_the_limit_ends_it(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(served.runtime.registry.named("drifted"), "images", broken)
        limits = {"share": 1.0, "max_error_rate": 0.5, "min_queries": 5}
        number = begin(served, filled, "drifted", "canary", canary=limits)

        for picture in pictures[:4]:
            assert ask(served, filled, picture)["version"] == "v1"
        wait_for(served, filled, number, counted("canary", "new", 4))
        assert shown(served, filled, number)["state"] == "canary"
        ask(served, filled, pictures[4])

        found = wait_for(served, filled, number, lambda found: found["state"] != "canary")
        last = found["transitions"][-1]
        assert (found["state"], last["who"]) == ("rolled_back", "canary")
        assert last["why"] == "error rate 100.0% of 5 queries is above the limit of 50.0%"
        assert last["evidence"]["canary"]["errors"] == 5
        assert ask(served, filled, pictures[5])["version"] == "v1"
        assert served.http.get(filled).json()["current"] == "v1"

    def test_a_slow_version_is_rolled_back(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        limits = {"share": 1.0, "max_p99_ms": 0.001, "min_queries": 2}
        number = begin(served, filled, "drifted", "canary", canary=limits)
        for picture in pictures[:2]:
            ask(served, filled, picture)

        found = wait_for(served, filled, number, lambda found: found["state"] != "canary")

        assert found["transitions"][-1]["why"].endswith("of 2 queries is above the limit of 0.001 ms")

    def test_a_canary_that_could_not_be_ended_at_once_ends_later_and_nothing_is_counted_twice(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = itertools.count()
        roll_back = watching.roll_back

        def locked_at_first(*args: Any) -> Any:
            if next(calls) < 2:
                raise OperationalError("UPDATE", None, Exception("database is locked"))
            return roll_back(*args)

        monkeypatch.setattr(watching, "roll_back", locked_at_first)
        limits = {"share": 1.0, "max_p99_ms": 0.001, "min_queries": 2}
        number = begin(served, filled, "drifted", "canary", canary=limits)
        for picture in pictures[:2]:
            ask(served, filled, picture)

        found = wait_for(served, filled, number, lambda found: found["state"] != "canary")

        last = found["transitions"][-1]
        assert (next(calls), last["evidence"]["canary"]["queries"]) == (3, {"old": 0, "new": 2})
        assert last["why"].endswith("of 2 queries is above the limit of 0.001 ms")

    def test_a_request_that_neither_can_answer_is_the_callers_fault(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        limits = {"share": 1.0, "max_error_rate": 0.0, "min_queries": 1}
        number = begin(served, filled, "drifted", "canary", canary=limits)

        bad = served.http.post(f"{filled}/query", data={"k": 5}, files=[("images", ("q", b"no image"))])

        assert bad.json()["code"] == "invalid_image"
        ask(served, filled, pictures[0])
        found = wait_for(served, filled, number, counted("canary", "new", 1))
        assert (found["state"], found["trial"]["canary"]["queries"]) == ("canary", {"old": 0, "new": 1})
        assert found["trial"]["canary"]["errors"] == 0

    def test_the_numbers_of_a_trial_stay_with_the_step_that_ended_it(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        number = begin(served, filled, "drifted", "canary", canary={"share": 1.0})
        ask(served, filled, pictures[0])
        wait_for(served, filled, number, counted("canary", "new", 1))

        to_current = served.http.post(f"{filled}/deployments/{number}/advance", json={"to": "current"})

        assert to_current.status_code == 200
        assert shown(served, filled, number)["transitions"][-1]["evidence"]["canary"]["queries"]["new"] == 1
        assert ask(served, filled, pictures[0])["version"] == "drifted"

    def test_what_a_change_of_a_canary_does_not_name_stays(self, served: Any, filled: str) -> None:
        limits = {"share": 0.3, "max_error_rate": 0.5, "max_p99_ms": 800.0, "min_queries": 7}
        number = begin(served, filled, "drifted", "canary", canary=limits)

        def settings(**body: Any) -> Any:
            asked = {"to": "canary", **body}
            assert served.http.post(f"{filled}/deployments/{number}/advance", json=asked).status_code == 200
            return shown(served, filled, number)["settings"]

        assert settings(canary={"share": 0.6}) == {**limits, "share": 0.6}
        assert settings(reason="a look") == {**limits, "share": 0.6}
        assert settings(canary={"max_p99_ms": None}) == {**limits, "share": 0.6, "max_p99_ms": None}

    def test_a_canary_after_a_shadow_begins_with_its_own_share(self, served: Any, filled: str) -> None:
        number = begin(served, filled, "drifted", "shadow", shadow={"share": 0.9})

        served.http.post(f"{filled}/deployments/{number}/advance", json={"to": "canary"})

        assert shown(served, filled, number)["settings"]["share"] == 0.05

    def test_what_a_shadow_and_an_earlier_canary_counted_can_still_be_read(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        number = begin(served, filled, "drifted", "shadow")
        ask(served, filled, pictures[0])
        shadow = wait_for(served, filled, number, counted("shadow", "new", 1))["trial"]["shadow"]
        whole = {"to": "canary", "canary": {"share": 1.0}}
        served.http.post(f"{filled}/deployments/{number}/advance", json=whole)
        for picture in pictures[:2]:
            ask(served, filled, picture)
        canary = wait_for(served, filled, number, counted("canary", "new", 2))["trial"]["canary"]
        served.http.post(f"{filled}/deployments/{number}/advance", json=whole)

        found = shown(served, filled, number)
        kept = [step["evidence"] for step in found["transitions"][-2:]]

        assert (kept[0]["shadow"], kept[1]["canary"]) == (shadow, canary)
        assert "shadow" not in kept[1]
        assert found["trial"] == {"shadow": shadow}


class TestTally:
    def test_sums_are_the_same_in_any_order(self) -> None:
        one, two = Counters(), Counters()
        for tally, times in ((one, [0.001, 0.002, 0.004]), (two, [0.1, 0.002])):
            for seconds in times:
                tally.took("new", seconds)
                tally.add(new=1, overlap=0.25)
        ab, ba = Counters(), Counters()
        for part in (one, two):
            ab += counters_from_json(part.as_json())
        for part in (two, one):
            ba += counters_from_json(part.as_json())

        assert ab.as_json() == ba.as_json()
        assert ab.counts == {"new": 5, "overlap": 1.25}

    def test_quantiles_are_right_to_five_per_cent(self) -> None:
        times = np.random.default_rng(0).lognormal(3, 1, 5000)
        histogram = Counter(bucket(t) for t in times)

        for q in (0.5, 0.9, 0.99):
            assert quantile(histogram, q) == pytest.approx(np.quantile(times, q), rel=0.06)
        assert quantile({}, 0.5) is None

    def test_an_empty_report_says_that_nothing_is_known(self) -> None:
        found = summary(Counters().as_json())

        assert (found["error_rate"], found["overlap"], found["rank_correlation"]) == (None, None, None)
        assert found["latency_ms"]["new"] == {"p50": None, "p99": None}

    def test_limits_wait_for_enough_queries_and_only_those_set_count(self) -> None:
        tally = Counters()
        for _ in range(4):
            tally.add(new=1)
            tally.fail(ValueError("no"))
        report = tally.as_json()

        assert exceeded({"max_error_rate": 0.9, "max_p99_ms": None, "min_queries": 5}, report) is None
        assert exceeded({"max_error_rate": None, "max_p99_ms": 1.0, "min_queries": 4}, report) is None
        assert "100.0% of 4 queries" in str(exceeded({"max_error_rate": 0.9, "min_queries": 4}, report))


def broken() -> Any:
    raise RuntimeError("the encoder is out of order")
