"""Canary: who is answered by the new version, and when it ends by itself."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sqlalchemy.exc import OperationalError

from index.version import Version
from regraft.client import Client
from service.registry.trial_counters import Counters, exceeded_limit
from service.registry.trial_records import add_counters
from service.upgrades.deployments.lifecycle import roll_back
from service.upgrades.trials import monitor as watching
from service.upgrades.trials.monitor import share_of
from staging.api.trials import ask, begin, broken, counted, shown, wait_for
from staging.inputs.builders import add_text, make_version


def added(served: Any, number: int, answers: int, errors: int) -> str | None:
    """The limit that a canary exceeds once these answers of its version are counted too."""
    counters = Counters()
    counters.add(new=answers, errors=errors)
    with served.runtime.database.write() as connection:
        found = add_counters(connection, number, "canary", counters)
    assert found is not None
    return exceeded_limit(*found)


class TestCanary:
    def test_a_key_stays_with_one_version_and_the_share_is_about_right(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        number = begin(served, filled, "drifted", "canary", canary={"share": 0.5})
        keys = [f"user{n}" for n in range(24)]
        trial = SimpleNamespace(deployment=number)

        first = {key: ask(served, filled, pictures[0], key)["version"] for key in keys}
        with Client(str(served.http.base_url.join("/"))) as client:
            name = filled.rpartition("/")[2]
            again = {key: client.query(name, [pictures[1]], query_key=key).version for key in keys}

        assert first == again
        assert first == {key: "drifted" if share_of(trial, key.encode()) < 0.5 else "v1" for key in keys}
        assert len(set(first.values())) == 2
        counts = Counter(first.values())
        sides = [counted("canary", "old", 2 * counts["v1"]), counted("canary", "new", 2 * counts["drifted"])]
        found = wait_for(served, filled, number, lambda found: all(side(found) for side in sides))
        assert found["trial"]["canary"]["queries"] == {"old": 2 * counts["v1"], "new": 2 * counts["drifted"]}

    def test_what_the_current_version_cannot_embed_takes_no_part(
        self, served: Any, filled: str, versions: dict[str, Version], tmp_path: Path
    ) -> None:
        words = {"north": np.eye(4)[0], "east": np.eye(4)[1]}
        reads = add_text(make_version(tmp_path / "reads", "reads", 4, edges=[(versions["v1"], "identity")]), words)
        assert served.register(reads).status_code == 201
        begin(served, filled, "reads", "canary", canary={"share": 1.0})

        asked = [served.http.post(f"{filled}/query", json={"texts": [word]}) for word in words]

        assert [(one.status_code, one.json()["code"]) for one in asked] == [(422, "no_text_entrance")] * 2

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

    def test_each_query_of_a_request_counts(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(served.runtime.registry.named("drifted"), "images", broken)
        limits = {"share": 1.0, "max_error_rate": 0.5, "min_queries": 3}
        number = begin(served, filled, "drifted", "canary", canary=limits)
        files = [("images", (str(n), picture)) for n, picture in enumerate(pictures[:3])]
        assert served.http.post(f"{filled}/query", data={"k": 5}, files=files).json()["version"] == "v1"

        found = wait_for(served, filled, number, lambda found: found["state"] != "canary")

        assert found["transitions"][-1]["why"] == "error rate 100.0% of 3 queries is above the limit of 50.0%"

    def test_a_version_that_breaks_late_passes_a_limit_by_its_newest_answers(self, served: Any, filled: str) -> None:
        """A thousand good answers would hide sixty errors."""
        number = begin(served, filled, "drifted", "canary", canary={"max_error_rate": 0.1, "min_queries": 2})

        assert [added(served, number, 25, 1) for _ in range(40)] == [None] * 40
        assert added(served, number, 60, 60) == "error rate 26.2% of 260 queries is above the limit of 10.0%"
        assert added(served, number, 0, 0), "where it could not be ended at once"
        assert shown(served, filled, number)["trial"]["canary"]["queries"]["new"] == 1060

    def test_a_version_with_half_the_errors_of_its_limit_does_not_pass_it_by_chance(
        self, served: Any, filled: str
    ) -> None:
        errors = np.random.default_rng(0).binomial(1000, 0.005, size=200)
        number = begin(served, filled, "drifted", "canary", canary={"max_error_rate": 0.01, "min_queries": 100})

        assert {added(served, number, 1000, one) for one in errors.tolist()} == {None}

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

    @pytest.mark.parametrize("least", [1, 2])
    def test_one_that_hardly_anybody_asked_is_told_when_it_becomes_current(
        self, served: Any, filled: str, pictures: list[bytes], least: int
    ) -> None:
        number = begin(served, filled, "drifted", "canary", canary={"share": 1.0, "min_queries": least})
        ask(served, filled, pictures[0])
        wait_for(served, filled, number, counted("canary", "new", 1))

        told = served.http.post(f"{filled}/deployments/{number}/advance", json={"to": "current"}).json()["notes"]

        early = [note for note in told if "canary" in note]
        assert [note.split(",")[0] for note in early] == ["the canary answered 1 queries"][: least - 1]

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
