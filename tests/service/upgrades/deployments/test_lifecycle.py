"""Deployments step by step: what is legal, who did it, ETags, rehearsals, retirement."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from index.version import Version
from regraft import Client
from service.upgrades.deployments.history import ON_ITS_WAY, DeploymentState
from service.upgrades.deployments.steps import BEGINNINGS, TRANSITIONS
from staging.api.served import problem
from staging.api.steps import WAY, advance, at, deploy, detail, gate_id, reencode, rollback, state_of
from staging.inputs.builders import make_version


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    served.add("v3", 6, drift=0.1, edges=[("v2", "identity", 0.8)])
    served.add("blind", 4, encoder=False, edges=[("v1", "identity")])
    served.add("brittle", 4, edges=[("v1", "identity")])


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures, about=lambda n: {"digit": n % 5})


class TestTable:
    def test_every_state_is_reached_from_a_beginning_and_every_one_before_the_end_can_be_rolled_back(self) -> None:
        reached, waiting = set(), list(BEGINNINGS)
        for state in waiting:
            reached.add(state)
            waiting += [after for after in TRANSITIONS[state] if after not in waiting]

        assert reached == set(DeploymentState) == set(TRANSITIONS)
        assert {s for s in DeploymentState if DeploymentState.ROLLED_BACK in TRANSITIONS[s]} == {
            *ON_ITS_WAY,
            DeploymentState.CURRENT,
        }

    def test_nothing_leads_back_from_current_to_a_state_on_the_way(self) -> None:
        for state in set(DeploymentState) - set(ON_ITS_WAY):
            assert not set(TRANSITIONS[state]) & set(ON_ITS_WAY)


class TestSteps:
    def test_the_whole_way_is_recorded_with_who_when_why_and_evidence(self, served: Any, filled: str) -> None:
        number = at(served, filled, "canary")
        advance(served, filled, number, "current", reason="looks good")

        shown = detail(served, filled, number)
        steps = shown["transitions"]
        assert [(s["before"], s["after"]) for s in steps] == list(zip([None, *WAY], WAY, strict=False))
        assert {s["who"] for s in steps} == {"local"}
        assert steps[-1]["why"] == "looks good"
        assert [s["at"] for s in steps] == sorted(s["at"] for s in steps)
        assert steps[1]["evidence"]["card_sha256"] == steps[0]["evidence"]["card_sha256"]
        assert steps[2]["evidence"]["gate"] == shown["gate"]
        assert steps[4]["evidence"]["settings"]["share"] == 0.05
        assert (shown["state"], shown["previous"], shown["since"]) == (
            "current",
            "v1",
            pytest.approx(steps[-1]["at"], 5),
        )
        assert served.http.get(filled).json()["current"] == "v2"

    def test_one_call_walks_the_steps(self, served: Any, filled: str) -> None:
        made = deploy(served, filled, gate=gate_id(served, filled), reason="go").json()

        steps = detail(served, filled, made["id"])["transitions"]
        assert [s["after"] for s in steps] == ["registered", "verified", "gated", "current"]
        before = served.http.get(f"{filled}/deployments").json()["deployments"][0]
        assert detail(served, filled, before["id"])["transitions"][-1]["after"] == "superseded"

    @pytest.mark.parametrize("until", WAY)
    def test_one_call_goes_as_far_as_it_is_asked(self, served: Any, filled: str, until: str) -> None:
        named = gate_id(served, filled) if until in WAY[2:] else None

        made = deploy(served, filled, until=until, gate=named)

        assert made.json()["state"] == until
        assert served.http.get(filled).json()["current"] == ("v2" if until == "current" else "v1")

    @pytest.mark.parametrize("before", WAY)
    def test_only_the_steps_of_the_table_are_legal(self, served: Any, filled: str, before: str) -> None:
        number = at(served, filled, before)
        legal = {state.value for state in TRANSITIONS[DeploymentState(before)]} & {*WAY}
        shown = state_of(served, filled)

        for to in set(WAY[1:]) - legal:
            refused = advance(served, filled, number, to)
            assert (refused.status_code, refused.json()["code"]) == (409, "illegal_transition")
            told = refused.json()["detail"]
            assert all(way in told for way in legal)
            assert ("rolled_back" in told or "superseded" in told, "a rollback" in told) == (False, True)
        assert state_of(served, filled) == shown

    @pytest.mark.parametrize("state", WAY)
    def test_it_can_be_rolled_back_from_each_state_in_one_call(
        self, served: Any, filled: str, pictures: list[bytes], state: str
    ) -> None:
        before = served.query(filled, pictures[3], k=20).json()["results"]
        number = at(served, filled, state)

        back = rollback(served, filled)

        assert back.status_code == 201
        assert detail(served, filled, number)["state"] == "rolled_back"
        assert detail(served, filled, number)["transitions"][-1]["why"] == "a test"
        assert served.http.get(filled).json()["current"] == "v1"
        assert served.query(filled, pictures[3], k=20).json()["results"] == before
        assert deploy(served, filled).status_code == 201

    def test_a_trial_that_was_rolled_back_is_nothing_to_return_to(self, served: Any, filled: str) -> None:
        at(served, filled, "shadow")
        rollback(served, filled)
        deploy(served, filled, "v2")

        assert rollback(served, filled).json()["version"] == "v1"
        refused = rollback(served, filled).json()
        assert (refused["code"], refused["detail"].partition("; ")[2]) == (
            "nothing_to_roll_back",
            "'v2' was rolled back: deploy it to return",
        )

    @pytest.mark.parametrize("name", ["card.json", "encoder.onnx"])
    def test_a_folder_that_changed_on_disk_is_refused(self, served: Any, filled: str, name: str) -> None:
        file = served.runtime.settings.versions / "brittle" / name
        before, whole = state_of(served, filled), file.read_bytes()
        file.write_bytes(whole[:-1] + b"x")
        refused = deploy(served, filled, "brittle")
        named = served.http.get("/versions/brittle").json()["problem"]
        file.write_bytes(whole)
        served.runtime.registry.recover("brittle")

        assert (refused.status_code, refused.json()["code"]) == (503, "version_broken")
        assert name in refused.json()["detail"]
        assert name in named
        assert state_of(served, filled) == before

    def test_an_edge_that_was_removed_with_its_old_version_hinders_no_deployment(
        self, served: Any, versions: dict[str, Version], tmp_path: Path
    ) -> None:
        old = make_version(tmp_path / "gone", "gone", 4)
        heir = make_version(tmp_path / "heir", "heir", 6, edges=[(old, "truncate"), (versions["v1"], "truncate")])
        assert [served.register(version).status_code for version in (old, heir)] == [201, 201]
        assert served.remove("/edges/heir/gone/truncate").status_code == 200
        assert served.remove("/versions/gone").status_code == 204

        assert deploy(served, served.gallery("v1"), "heir").status_code == 201

    def test_trials_need_a_current_version_and_queries_that_both_versions_embed(self, served: Any, filled: str) -> None:
        served.add("seeing", 8, edges=[("blind", "truncate")])
        empty, unseen = served.gallery(None), served.gallery("blind")
        for until in ("shadow", "canary"):
            assert deploy(served, empty, until=until).json()["code"] == "no_current_version"
            assert deploy(served, filled, "blind", until=until).json()["code"] == "no_encoder"
            assert deploy(served, unseen, "seeing", until=until).json()["code"] == "no_encoder"
        assert served.http.get(f"{empty}/deployments").json() == {"deployments": []}

    def test_an_unknown_deployment_or_one_of_another_gallery_is_not_found(self, served: Any, filled: str) -> None:
        foreign = deploy(served, served.gallery("v1"), until="registered").json()["id"]
        for number in (foreign, 10**9):
            assert served.http.get(f"{filled}/deployments/{number}").json()["code"] == "unknown_deployment"
            assert advance(served, filled, number, "verified").json()["code"] == "unknown_deployment"

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({"until": "retired"}, "/until"),
            ({"until": "soon"}, "/until"),
            ({"shadow": {"share": 0}}, "/shadow/share"),
            ({"shadow": {"share": 1.5}}, "/shadow/share"),
            ({"shadow": {"rate": 1}}, "/shadow/rate"),
            ({"canary": {"share": "half"}}, "/canary/share"),
            ({"canary": {"max_error_rate": -1}}, "/canary/max_error_rate"),
            ({"canary": {"max_p99_ms": 0}}, "/canary/max_p99_ms"),
            ({"canary": {"min_queries": 0}}, "/canary/min_queries"),
            ({"reason": "x" * 1025}, "/reason"),
        ],
    )
    def test_illegal_fields_are_named(self, served: Any, filled: str, body: dict[str, Any], pointer: str) -> None:
        refused = deploy(served, filled, **body)

        assert refused.status_code == 422
        assert [error["pointer"] for error in refused.json()["errors"]] == [pointer]


class TestConcurrency:
    def test_a_second_deployment_waits_until_the_first_is_over(self, served: Any, filled: str) -> None:
        at(served, filled, "shadow")

        refused = deploy(served, filled, "v3")

        assert (refused.status_code, refused.json()["code"]) == (409, "deployment_active")
        assert "'v2' is shadow" in refused.json()["detail"]

    def test_of_many_at_once_one_wins(self, served: Any, filled: str) -> None:
        together, answers = threading.Barrier(6), []

        def attempt(version: str) -> None:
            together.wait()
            answers.append(deploy(served, filled, version, until="verified").status_code)

        threads = [threading.Thread(target=attempt, args=(version,), daemon=True) for version in ("v2", "v3") * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert sorted(answers) == [201, 409, 409, 409, 409, 409]
        states = [d["state"] for d in served.http.get(f"{filled}/deployments").json()["deployments"]]
        assert states == ["current", "verified"]

    def test_of_many_that_saw_the_same_state_one_may_change_it(self, served: Any, filled: str) -> None:
        number = at(served, filled, "verified")
        seen = {"If-Match": served.http.get(f"{filled}/deployments/{number}").headers["etag"]}
        together, answers = threading.Barrier(3), []

        def attempt(change: Callable[[], Any]) -> None:
            together.wait()
            answers.append(change().status_code)

        changes = (
            lambda: advance(served, filled, number, "shadow", headers=seen),
            lambda: advance(served, filled, number, "current", headers=seen),
            lambda: rollback(served, filled, headers=seen),
        )
        threads = [threading.Thread(target=attempt, args=(change,), daemon=True) for change in changes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert sorted(answers)[1:] == [412, 412]
        assert min(answers) < 300

    def test_an_etag_holds_until_any_deployment_of_the_gallery_changes(self, served: Any, filled: str) -> None:
        first = served.http.get(f"{filled}/deployments").headers["etag"]
        made = deploy(served, filled, until="registered", headers={"If-Match": f'"x", {first}'})
        second = made.headers["etag"]
        number = made.json()["id"]

        deploy(served, served.gallery("v1"), "v2")  # of another gallery
        assert first != second == served.http.get(f"{filled}/deployments/{number}").headers["etag"]
        for stale in (
            deploy(served, filled, "v3", headers={"If-Match": first}),
            advance(served, filled, number, "verified", headers={"If-Match": first}),
            rollback(served, filled, headers={"If-Match": first}),
            served.http.post(f"{filled}/retire", json={"version": "v2"}, headers={"If-Match": first}),
        ):
            assert (stale.status_code, stale.json()["code"]) == (412, "changed_meanwhile")
        assert advance(served, filled, number, "verified", headers={"If-Match": "*"}).status_code == 200


class TestRehearsal:
    def test_it_answers_as_the_change_would_and_changes_nothing(self, served: Any, filled: str) -> None:
        before, dry = state_of(served, filled), {"dry_run": "true"}

        rehearsed = deploy(served, filled, params=dry)
        assert (rehearsed.status_code, rehearsed.json()["id"], rehearsed.json()["state"]) == (200, None, "current")
        assert deploy(served, filled, "plain", params=dry).json()["code"] == "no_route"
        assert state_of(served, filled) == before

        number = at(served, filled, "verified")
        before = state_of(served, filled)
        assert advance(served, filled, number, "current", params=dry).json()["state"] == "current"
        assert rollback(served, filled, params=dry).json()["state"] == "rolled_back"
        assert state_of(served, filled) == before

    def test_a_rollback_says_how_many_items_would_return(self, served: Any, filled: str) -> None:
        deploy(served, filled)
        reencode(served, filled)
        before = state_of(served, filled)

        rehearsed = rollback(served, filled, params={"dry_run": "true"}).json()

        assert (rehearsed["version"], rehearsed["activated"]) == ("v1", 20)
        assert state_of(served, filled) == before

    def test_its_etag_is_that_of_the_state_it_started_from(self, served: Any, filled: str) -> None:
        deploy(served, filled)
        reencode(served, filled)
        dry = {"dry_run": "true"}
        rehearsals = [
            lambda: served.http.post(f"{filled}/retire", json={"version": "v1"}, params=dry),
            lambda: deploy(served, filled, "v1", params=dry),
            lambda: rollback(served, filled, params=dry),
        ]

        seen = {rehearse().headers["etag"] for rehearse in rehearsals}

        assert seen == {served.http.get(f"{filled}/deployments").headers["etag"]}
        # Somebody else's change: what was rehearsed is not what there is now.
        deploy(served, filled, "v3", until="registered")
        late = served.http.post(f"{filled}/retire", json={"version": "v1"}, headers={"If-Match": seen.pop()})
        assert late.status_code == 412


def test_histories_are_cut_to_the_newest(served: Any, filled: str) -> None:
    for _ in range(2):
        gate_id(served, filled)
        deploy(served, filled)
        reencode(served, filled)
        rollback(served, filled)

    name, url = filled.rpartition("/")[2], served.url
    with Client(url) as client:
        for listed in (client.gates, client.deployments, client.backfills):
            everything = listed(name)
            assert len(everything) >= 2
            assert listed(name, limit=1) == everything[-1:]
            assert listed(name, limit=1000) == everything
    for kind in ("gates", "deployments", "backfills"):
        problem(served.http.get(f"{filled}/{kind}", params={"limit": 0}), 422, "invalid_request", "/limit")
