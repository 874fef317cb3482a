"""Deployments step by step: what is legal, who did it, ETags, rehearsals, retirement."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select, update

from service.store.embeddings import put_embeddings
from service.store.repository import take_seq
from service.store.tables import deployment, embedding, gallery, item
from service.upgrades.deployments.history import ON_ITS_WAY, DeploymentState
from service.upgrades.deployments.lifecycle import BEGINNINGS, TRANSITIONS

WAY = ("registered", "verified", "gated", "shadow", "canary", "current")


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    served.add("v3", 6, drift=0.1, edges=[("v2", "identity", 0.8)])
    served.add("blind", 4, encoder=False, edges=[("v1", "identity")])
    served.add("brittle", 4, edges=[("v1", "identity")])


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures, about=lambda n: {"digit": n % 5})


def deploy(served: Any, path: str, version: str = "v2", params: Any = None, headers: Any = None, **body: Any) -> Any:
    return served.http.post(
        f"{path}/deployments", json={"version": version, **body}, params=params or {}, headers=headers or {}
    )


def advance(served: Any, path: str, number: int, to: str, params: Any = None, headers: Any = None, **body: Any) -> Any:
    return served.http.post(
        f"{path}/deployments/{number}/advance", json={"to": to, **body}, params=params or {}, headers=headers or {}
    )


def rollback(served: Any, path: str, **options: Any) -> Any:
    return served.http.post(f"{path}/rollback", json={"reason": "a test"}, **options)


def gate(served: Any, path: str, version: str = "v2") -> int:
    made = served.http.post(f"{path}/gates", json={"version": version, "label": "digit"})
    assert made.status_code == 201, made.text
    return int(made.json()["id"])


def detail(served: Any, path: str, number: int) -> dict[str, Any]:
    shown = served.http.get(f"{path}/deployments/{number}")
    assert shown.status_code == 200, shown.text
    return dict(shown.json())


def state_of(served: Any, path: str) -> dict[str, Any]:
    """Everything a refused or rehearsed change must leave as it was."""
    listed = served.http.get(f"{path}/deployments")
    shown = served.http.get(path).json()
    return {"deployments": listed.json(), "etag": listed.headers["etag"], "mix": shown["mix"], "seq": shown["seq"]}


def at(served: Any, path: str, state: str) -> int:
    """A deployment of v2 in this state."""
    number = deploy(served, path, until="registered").json()["id"]
    for step in WAY[1 : WAY.index(state) + 1]:
        taken = advance(served, path, number, step, **({"gate": gate(served, path)} if step == "gated" else {}))
        assert taken.status_code == 200, taken.text
    return int(number)


def reencode(served: Any, path: str) -> None:
    assert served.http.post(f"{path}/backfills", json={}).status_code == 202
    served.work()


def held(served: Any, path: str, version: str) -> int:
    """Embeddings of a version in a gallery, by SQL."""
    with served.runtime.database.lookup() as connection:
        statement = (
            select(func.count())
            .select_from(embedding.join(item).join(gallery))
            .where(
                gallery.c.name == path.rpartition("/")[2],
                embedding.c.version_id == served.runtime.registry.named(version).id,
            )
        )
        return int(connection.execute(statement).scalar_one())


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
        made = deploy(served, filled, gate=gate(served, filled), reason="go").json()

        steps = detail(served, filled, made["id"])["transitions"]
        assert [s["after"] for s in steps] == ["registered", "verified", "gated", "current"]
        before = served.http.get(f"{filled}/deployments").json()["deployments"][0]
        assert detail(served, filled, before["id"])["transitions"][-1]["after"] == "superseded"

    @pytest.mark.parametrize("until", WAY)
    def test_one_call_goes_as_far_as_it_is_asked(self, served: Any, filled: str, until: str) -> None:
        named = gate(served, filled) if until in WAY[2:] else None

        made = deploy(served, filled, until=until, gate=named)

        assert made.json()["state"] == until
        assert served.http.get(filled).json()["current"] == ("v2" if until == "current" else "v1")

    @pytest.mark.parametrize("before", WAY)
    def test_only_the_steps_of_the_table_are_legal(self, served: Any, filled: str, before: str) -> None:
        number = at(served, filled, before)
        legal = {state.value for state in TRANSITIONS[DeploymentState(before)]}
        shown = state_of(served, filled)

        for to in set(WAY[1:]) - legal:
            refused = advance(served, filled, number, to)
            assert (refused.status_code, refused.json()["code"]) == (409, "illegal_transition")
            assert all(way in refused.json()["detail"] for way in legal)
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
        assert rollback(served, filled).json()["code"] == "nothing_to_roll_back"

    @pytest.mark.parametrize("name", ["card.json", "encoder.onnx"])
    def test_a_folder_that_changed_on_disk_is_refused(self, served: Any, filled: str, name: str) -> None:
        file = served.runtime.settings.versions / "brittle" / name
        before, whole = state_of(served, filled), file.read_bytes()
        file.write_bytes(whole[:-1] + b"x")
        refused = deploy(served, filled, "brittle")
        named = served.http.get("/versions/brittle").json()["problem"]
        file.write_bytes(whole)
        served.runtime.registry.look_again("brittle")

        assert (refused.status_code, refused.json()["code"]) == (503, "version_broken")
        assert name in refused.json()["detail"]
        assert name in named
        assert state_of(served, filled) == before

    def test_trials_need_a_current_version_and_an_encoder(self, served: Any, filled: str) -> None:
        empty = served.gallery(None)
        for until in ("shadow", "canary"):
            assert deploy(served, empty, until=until).json()["code"] == "no_current_version"
            assert deploy(served, filled, "blind", until=until).json()["code"] == "no_encoder"
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


class TestRetire:
    def retire(self, served: Any, path: str, version: str = "v1", **options: Any) -> Any:
        return served.http.post(f"{path}/retire", json={"version": version, "reason": "done"}, **options)

    def test_it_frees_embeddings_and_shards(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        deploy(served, filled)
        reencode(served, filled)
        before = served.query(filled, pictures[0], k=20).json()["results"]

        rehearsed = self.retire(served, filled, params={"dry_run": "true"})
        assert held(served, filled, "v1") == 20
        done = self.retire(served, filled)

        assert done.json() == rehearsed.json()
        assert (done.json()["embeddings"], done.json()["bytes"]) == (20, 20 * 4 * 4)
        assert (held(served, filled, "v1"), held(served, filled, "v2")) == (0, 20)
        first = served.http.get(f"{filled}/deployments").json()["deployments"][0]
        assert first["state"] == "retired"
        assert detail(served, filled, first["id"])["transitions"][-1]["why"] == "done"
        assert served.query(filled, pictures[0], k=20).json()["results"] == before
        live = served.runtime.replica.find(filled.rpartition("/")[2])
        assert {version for version, _ in live.gallery._shards.serving()} == {"v2"}
        with served.runtime.database.lookup() as connection:
            assert connection.execute(select(deployment.c.to_free).where(deployment.c.to_free.is_not(None))).all() == []

    def test_it_is_refused_while_items_depend_on_it_and_says_what_would_help(self, served: Any, filled: str) -> None:
        stuck = {"items": [{"id": "e", "embedding": [1, 0, 0, 0]}], "version": "v1"}
        assert served.http.post(f"{filled}/items", json=stuck).status_code == 200
        deploy(served, filled)

        refused = self.retire(served, filled)

        assert (refused.status_code, refused.json()["code"]) == (409, "version_in_use")
        assert "21 items depend on version 'v1'" in refused.json()["detail"]
        assert "a reencode backfill to 'v2' would move 20 of them" in refused.json()["detail"]
        assert "1 can only be deleted, or ingested again" in refused.json()["detail"]
        assert held(served, filled, "v1") == 21

    def test_a_current_or_coming_version_is_in_use_and_an_unknown_one_unknown(self, served: Any, filled: str) -> None:
        at(served, filled, "shadow")

        assert self.retire(served, filled, "v1").json()["code"] == "version_in_use"
        assert self.retire(served, filled, "v2").json()["code"] == "version_in_use"
        assert self.retire(served, filled, "v3").json()["code"] == "nothing_to_retire"
        assert self.retire(served, filled, "v9").status_code == 404

    def test_there_is_no_way_back_to_a_retired_version_but_to_deploy_it_anew(self, served: Any, filled: str) -> None:
        deploy(served, filled)
        reencode(served, filled)
        self.retire(served, filled)

        refused = rollback(served, filled)
        assert (refused.status_code, refused.json()["code"]) == (409, "nothing_to_roll_back")
        assert "'v1' was retired" in refused.json()["detail"]
        assert deploy(served, filled, "v1").status_code == 201

    def test_what_was_rolled_back_can_be_retired(self, served: Any, filled: str) -> None:
        deploy(served, filled)
        reencode(served, filled)
        rollback(served, filled)

        assert self.retire(served, filled, "v2").json()["embeddings"] == 20
        assert served.http.get(filled).json()["mix"] == {"v1": 20}
        assert rollback(served, filled).status_code == 409

    def test_what_a_backfill_gave_up_is_not_said_to_be_movable(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        blobs = blobs_of(served, filled, ["i0", "i1", "i2"])
        served.runtime.blobs.remove(blobs)
        deploy(served, filled)
        reencode(served, filled)

        said = self.retire(served, filled).json()["detail"]
        assert "3 items depend on version 'v1'" in said
        assert "would move" not in said
        assert "a reencode backfill gave up 3 of them, and its failures say why" in said
        assert "3 can only be deleted, or ingested again" in said
        served.http.delete(f"{filled}/items/i1")
        for name in ("i0", "i2"):
            assert served.ingest(filled, {name: pictures[0]}).status_code == 200
        assert self.retire(served, filled).json()["embeddings"] == 17

    def test_embeddings_that_came_with_items_after_it_can_be_freed_again(self, served: Any, filled: str) -> None:
        deploy(served, filled)
        reencode(served, filled)
        self.retire(served, filled)
        late = {"version": "v1", "items": [{"id": "late", "embedding": [1, 0, 0, 0]}]}
        assert served.http.post(f"{filled}/items", json=late).status_code == 200
        assert self.retire(served, filled).json()["code"] == "version_in_use"
        hold_v2(served, filled)

        again = self.retire(served, filled)

        assert (again.status_code, again.json()["embeddings"]) == (200, 1)
        assert held(served, filled, "v1") == 0
        assert self.retire(served, filled).json()["code"] == "nothing_to_retire"
        assert detail(served, filled, again.json()["deployments"][0])["state"] == "retired"
        assert served.http.get(filled).json()["current"] == "v2"
        # No more than a record: it was never current, and is nothing to go back to.
        assert rollback(served, filled).json()["code"] == "nothing_to_roll_back"

    def test_those_of_a_version_that_was_never_deployed_here_can_be_freed(self, served: Any, filled: str) -> None:
        deploy(served, filled)
        path = served.gallery("v2")
        late = {"version": "v1", "items": [{"id": "late", "embedding": [1, 0, 0, 0]}]}
        assert served.http.post(f"{path}/items", json=late).status_code == 200
        hold_v2(served, path)

        rehearsed = self.retire(served, path, params={"dry_run": "true"})

        assert (rehearsed.json()["embeddings"], held(served, path, "v1")) == (1, 1)
        assert self.retire(served, path).json()["embeddings"] == 1
        assert held(served, path, "v1") == 0
        assert rollback(served, path).json()["code"] == "nothing_to_roll_back"


def blobs_of(served: Any, path: str, names: list[str]) -> list[str]:
    mine = (item.c.external_id.in_(names), gallery.c.name == path.rpartition("/")[2])
    with served.runtime.database.lookup() as connection:
        return list(connection.execute(select(item.c.blob).join(gallery).where(*mine)).scalars())


def hold_v2(served: Any, path: str) -> None:
    """Move the item `late` to v2 as a transform would: it keeps what it came with."""
    with served.runtime.database.write() as connection:
        late = select(item).join(gallery).where(item.c.external_id == "late", gallery.c.name == path.rpartition("/")[2])
        row = connection.execute(late).one()
        version_id = served.runtime.registry.named("v2").id
        put_embeddings(connection, version_id, "transformed", [row.id], np.eye(6, dtype=np.float32)[:1])
        seq = take_seq(connection, row.gallery_id, 1)
        connection.execute(update(item).where(item.c.id == row.id).values(seq=seq))
