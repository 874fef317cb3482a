"""Shadow: what is asked of both versions, and how it is counted."""

from __future__ import annotations

import itertools
import queue
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.registry.trial_counters import Counters, bucket, counters_from_json, exceeded_limit, quantile, summary
from service.replica.eviction import needed
from service.upgrades.trials import monitor as watching
from service.upgrades.trials.monitor import TrialMonitor
from staging.api.trials import ask, begin, broken, counted, shown, wait_for


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
        assert {"v1", "drifted"} <= needed(served.runtime.registry, served.runtime.replica.all())

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

    def test_each_query_of_a_request_counts(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        number = begin(served, filled, "twin", "shadow")
        files = [("images", (str(n), picture)) for n, picture in enumerate(pictures[:3])]
        assert served.http.post(f"{filled}/query", data={"k": 5}, files=files).status_code == 200

        trial = wait_for(served, filled, number, counted("shadow", "new", 1))["trial"]["shadow"]

        assert (trial["queries"], trial["compared"]) == ({"old": 3, "new": 3}, 3)

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
        number, compare, asked = begin(served, filled, "twin", "shadow"), TrialMonitor._compare, itertools.count()

        def late(self: TrialMonitor, job: Any) -> None:
            best = job.old.items[int(job.old.keys_QK[0, 0])].id
            if next(asked) % 2:
                assert served.http.delete(f"{filled}/items/{best}").status_code == 204
            else:
                assert served.ingest(filled, {f"copy of {best}": pictures[int(best[1:])]}).status_code == 200
            compare(self, job)

        monkeypatch.setattr(TrialMonitor, "_compare", late)
        for picture in pictures[:6:2]:
            ask(served, filled, picture)

        trial = wait_for(served, filled, number, counted("shadow", "new", 3))["trial"]["shadow"]

        assert (trial["compared"], trial["errors"]) == (3, 0)
        assert (trial["overlap"], trial["rank_correlation"], trial["first_match_flips"]) == (1.0, 1.0, 0)

    def test_a_trial_that_ends_between_two_looks_at_it_ends_no_other(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Ending:
            def __init__(self, loaded: Any) -> None:
                self.loaded, self.looks = loaded, iter([loaded.trial])

            def __getattr__(self, name: str) -> Any:
                return next(self.looks, None) if name == "trial" else getattr(self.loaded, name)

        compare = TrialMonitor._compare
        ending = lambda monitor, job: compare(monitor, replace(job, loaded=Ending(job.loaded)))  # noqa: E731
        monkeypatch.setattr(TrialMonitor, "_compare", ending)
        number = begin(served, filled, "twin", "shadow")
        for picture in pictures[:2]:
            ask(served, filled, picture)

        assert wait_for(served, filled, number, counted("shadow", "new", 2))["trial"]["shadow"]["compared"] == 2

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
        class Full(queue.Queue):
            def put_nowait(self, job: Any) -> None:
                raise queue.Full

        monkeypatch.setattr(served.runtime.trials, "_jobs", Full(64))
        number = begin(served, filled, "drifted", "shadow")
        ask(served, filled, pictures[0])

        assert wait_for(served, filled, number, counted("shadow", "old", 1))["trial"]["shadow"]["dropped"] == 1

    def test_queries_that_only_one_version_can_answer_take_no_part(self, served: Any, filled: str) -> None:
        number = begin(served, filled, "drifted", "canary", canary={"share": 1.0})
        body = {"version": "v1", "embeddings": [[1, 0, 0, 0]], "k": 3}

        assert served.http.post(f"{filled}/query", json=body).json()["version"] == "v1"
        assert shown(served, filled, number)["trial"] == {}


class TestTally:
    def test_sums_are_the_same_in_any_order(self) -> None:
        one, two = Counters(), Counters()
        for tally, times in ((one, [0.001, 0.002, 0.004]), (two, [0.1, 0.002])):
            for seconds in times:
                tally.add_latency("new", seconds)
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
            tally.add_error(ValueError("no"))
        report = tally.as_json()

        assert exceeded_limit({"max_error_rate": 0.9, "max_p99_ms": None, "min_queries": 5}, report) is None
        assert exceeded_limit({"max_error_rate": None, "max_p99_ms": 1.0, "min_queries": 4}, report) is None
        assert "100.0% of 4 queries" in str(exceeded_limit({"max_error_rate": 0.9, "min_queries": 4}, report))
