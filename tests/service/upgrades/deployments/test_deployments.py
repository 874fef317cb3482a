from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from service.registry.placement import preference
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import take_seq
from service.store.tables import gallery, gate_report, item
from service.upgrades.deployments.history import rollback_chain as standing_of
from staging.api.steps import deploy, refusal, rollback


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    """v3 reaches v2 and through it v1; `other` has an encoder and no edge; `weak` measured better on v1 than on v2."""
    served.add("v3", 6, drift=0.1, edges=[("v2", "identity", 0.8)])
    served.add("other", 5, seed=9)
    served.add("weak", 6, seed=3, edges=[("v1", "zero_pad", 0.7), ("v2", "identity", 0.6)])


def shown(served: Any, path: str) -> dict[str, Any]:
    return served.http.get(path).json()


def start_backfill(served: Any, path: str) -> int:
    return served.backfill(path)


def matches(served: Any, path: str, picture: bytes, k: int) -> list[tuple[str, float, str]]:
    (answered,) = served.query(path, picture, k=k).json()["results"]
    return [(m["id"], m["score"], m["version"]) for m in answered["matches"]]


def feed(served: Any, path: str) -> Sequence[Any]:
    with served.runtime.database.lookup() as connection:
        mine = select(gallery.c.id).where(gallery.c.name == path.rpartition("/")[2]).scalar_subquery()
        statement = select(item.c.external_id, item.c.seq).where(item.c.gallery_id == mine).order_by(item.c.seq)
        return connection.execute(statement).all()


def add_gate(served: Any, path: str, version: str, current: str, verdict: str) -> int:
    """A stored report, as a gate with this verdict leaves it."""
    registered = served.runtime.registry.named(version)
    with served.runtime.database.write() as connection:
        mine = select(gallery.c.id).where(gallery.c.name == path.rpartition("/")[2]).scalar_subquery()
        report = {"version": version, "current": current}
        row = {"gallery_id": mine, "version_id": registered.id, "verdict": verdict, "report": report, "created": 0.0}
        return connection.execute(gate_report.insert().values(row).returning(gate_report.c.id)).scalar_one()


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures)


class TestDeploy:
    def test_the_first_deployment_into_an_empty_gallery_needs_no_gate(self, served: Any) -> None:
        path = served.gallery(None)

        deployed = deploy(served, path, "v1")

        assert deployed.status_code == 201
        assert {**deployed.json(), "id": 0, "created": 0} == {
            "id": 0,
            "version": "v1",
            "previous": None,
            "state": "current",
            "gate": None,
            "reason": "",
            "created": 0,
            "activated": 0,
            "notes": [],
        }
        assert shown(served, path)["current"] == "v1"

    def test_the_next_query_goes_through_the_new_version_over_old_items(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        assert deploy(served, filled, "v2").json()["previous"] == "v1"

        answer = served.query(filled, pictures[0], k=20).json()

        assert (answer["version"], answer["mix"], answer["degraded"]) == ("v2", {"v1": 20}, [])
        assert {tuple(m["route"]) for m in answer["results"][0]["matches"]} == {("truncate",)}

    def test_a_version_that_is_current_is_refused(self, served: Any, filled: str) -> None:
        assert refusal(deploy(served, filled, "v1")) == (409, "already_current", ["/version"])

    def test_an_unknown_version_or_gallery_is_refused(self, served: Any, filled: str) -> None:
        assert refusal(deploy(served, filled, "v9")) == (404, "unknown_version", ["/version"])
        assert deploy(served, "/galleries/nowhere", "v1").status_code == 404

    def test_without_a_route_nothing_changes_and_the_versions_are_named(self, served: Any, filled: str) -> None:
        before = shown(served, filled)

        refused = deploy(served, filled, "plain")

        assert refusal(refused) == (409, "no_route", ["/version"])
        assert "'v1' (20 items)" in refused.json()["detail"]
        assert shown(served, filled) == before
        assert len(served.http.get(f"{filled}/deployments").json()["deployments"]) == 1

    def test_items_that_hold_an_embedding_in_reach_need_no_route_to_where_they_lie(
        self, served: Any, filled: str
    ) -> None:
        with served.runtime.database.write() as connection:
            mine = select(item.c.id).join(gallery).where(gallery.c.name == filled.rpartition("/")[2])
            keys = list(connection.execute(mine.order_by(item.c.id)).scalars())
            vectors = np.arange(60, dtype=np.float32).reshape(20, 3)
            plain = served.runtime.registry.named("plain").id
            gallery_id = connection.execute(select(item.c.gallery_id).where(item.c.id == keys[0])).scalar_one()

        def put(rows: slice) -> None:
            with served.runtime.database.write() as connection:
                seq = take_seq(connection, gallery_id, 20)
                put_embeddings(connection, gallery_id, plain, "supplied", keys[rows], vectors[rows])
                mine = update(item).where(item.c.gallery_id == gallery_id)
                connection.execute(mine.values(seq=seq + item.c.id - keys[0]))

        put(slice(1, None))
        refused = deploy(served, filled, "plain")
        assert refusal(refused) == (409, "no_route", ["/version"])
        assert "'v1' (1 items)" in refused.json()["detail"]
        put(slice(0, 1))
        verified = deploy(served, filled, "plain", until="verified").json()
        current = served.http.post(f"{filled}/deployments/{verified['id']}/advance", json={"to": "current"}).json()

        assert (verified["state"], current["state"], current["activated"]) == ("verified", "current", 20)
        assert shown(served, filled)["mix"] == {"plain": 20}

    def test_the_old_encoder_is_route_enough(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        before = [found[:2] for found in matches(served, filled, pictures[3], 20)]

        assert deploy(served, filled, "other").status_code == 201

        assert [found[:2] for found in matches(served, filled, pictures[3], 20)] == before

    def test_a_change_of_version_takes_a_number_of_the_feed(self, served: Any, filled: str) -> None:
        before = shown(served, filled)["seq"]

        deploy(served, filled, "v2")

        assert shown(served, filled)["seq"] == before + 1

    def test_unknown_fields_and_wrong_types_are_named(self, served: Any, filled: str) -> None:
        assert refusal(deploy(served, filled, "v2", gate="one"))[2] == ["/gate"]
        assert refusal(deploy(served, filled, "v2", gates=1))[2] == ["/gates"]
        assert refusal(deploy(served, filled, "v2", override="\0"))[2] == ["/override"]
        assert refusal(deploy(served, filled, "v2", gate=1 << 70))[2] == ["/gate"]


class TestGates:
    def test_a_refusal_needs_a_written_reason(self, served: Any, filled: str) -> None:
        gate = add_gate(served, filled, "v2", "v1", "refuse")

        assert refusal(deploy(served, filled, "v2", gate=gate)) == (422, "gate_refused", ["/override"])
        assert refusal(deploy(served, filled, "v2", gate=gate, override="  "))[1] == "gate_refused"

        deployed = deploy(served, filled, "v2", gate=gate, override="known outliers").json()
        assert (deployed["gate"], deployed["reason"]) == (gate, "known outliers")

    @pytest.mark.parametrize("verdict", ["pass", "warn"])
    def test_other_verdicts_let_pass(self, served: Any, filled: str, verdict: str) -> None:
        gate = add_gate(served, filled, "v2", "v1", verdict)

        assert deploy(served, filled, "v2", gate=gate).json()["gate"] == gate

    def test_a_gate_of_another_gallery_version_or_current_version_does_not_count(
        self, served: Any, filled: str
    ) -> None:
        elsewhere = add_gate(served, served.gallery("v1"), "v2", "v1", "pass")
        for_v3 = add_gate(served, filled, "v3", "v1", "pass")
        over_v3 = add_gate(served, filled, "v2", "v3", "pass")

        for gate in (elsewhere, for_v3, over_v3, 10**9):
            assert refusal(deploy(served, filled, "v2", gate=gate)) == (422, "invalid_argument", ["/gate"])


class TestRollback:
    def test_there_is_nothing_before_the_first_deployment(self, served: Any, filled: str) -> None:
        assert refusal(rollback(served, filled)) == (409, "nothing_to_roll_back", [])
        assert refusal(rollback(served, served.gallery(None))) == (409, "nothing_to_roll_back", [])

    def test_it_answers_as_before_the_deployment_and_forward_again_as_after_it(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        old = [matches(served, filled, picture, 20) for picture in pictures[:4]]
        deploy(served, filled, "v2")
        start_backfill(served, filled)
        served.work()
        deploy_state = shown(served, filled)["mix"]
        new = [matches(served, filled, picture, 20) for picture in pictures[:4]]

        back = rollback(served, filled).json()
        assert [matches(served, filled, picture, 20) for picture in pictures[:4]] == old
        forward = deploy(served, filled, "v2").json()

        assert (back["version"], back["previous"], back["reason"], back["activated"]) == ("v1", "v2", "a test", 20)
        assert (forward["previous"], forward["activated"]) == ("v1", 20)
        assert deploy_state == shown(served, filled)["mix"] == {"v2": 20}
        assert [matches(served, filled, picture, 20) for picture in pictures[:4]] == new

    def test_it_needs_no_body(self, served: Any, filled: str) -> None:
        deploy(served, filled, "v2")

        assert served.http.post(f"{filled}/rollback").json()["reason"] == ""

    def test_items_that_came_meanwhile_stay_reachable_through_their_encoder(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        deploy(served, filled, "v2")
        served.ingest(filled, {"late": pictures[7]})

        rollback(served, filled)

        answer = served.query(filled, pictures[7], k=21).json()
        assert (answer["mix"], answer["degraded"]) == ({"v1": 20, "v2": 1}, [])
        assert [m["id"] for m in answer["results"][0]["matches"] if m["version"] == "v2"] == ["late"]
        assert ["dual"] in [m["route"] for m in answer["results"][0]["matches"]]

    def test_it_goes_back_step_by_step(self, served: Any, filled: str) -> None:
        for version in ("v2", "v1", "v3"):
            deploy(served, filled, version)

        went = [rollback(served, filled).json()["version"] for _ in range(3)]

        assert went == ["v1", "v2", "v1"]
        assert rollback(served, filled).status_code == 409
        states = [d["state"] for d in served.http.get(f"{filled}/deployments").json()["deployments"]]
        assert states == [
            "superseded",
            "superseded",
            "superseded",
            "rolled_back",
            "rolled_back",
            "rolled_back",
            "current",
        ]

    def test_an_item_returns_to_the_best_version_it_holds_when_it_never_had_the_old_one(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        deploy(served, filled, "v2")
        before = [matches(served, filled, picture, 20) for picture in pictures[:3]]
        deploy(served, filled, "v3")
        start_backfill(served, filled)
        served.work()
        assert deploy(served, filled, "other").json()["activated"] == 0

        rollback(served, filled)
        rollback(served, filled)

        assert shown(served, filled)["mix"] == {"v1": 20}
        assert [matches(served, filled, picture, 20) for picture in pictures[:3]] == before


class TestBackfillsOfOthers:
    @pytest.mark.parametrize("change", [rollback, lambda served, path: deploy(served, path, "v3")])
    @pytest.mark.parametrize("action", ["pause", None])
    def test_a_change_of_version_cancels_an_active_backfill(
        self, served: Any, filled: str, change: Callable[..., Any], action: str | None
    ) -> None:
        deploy(served, filled, "v2")
        number = start_backfill(served, filled)
        if action:
            served.http.post(f"/backfills/{number}/{action}")

        told = change(served, filled)

        assert told.status_code == 201
        assert told.json()["notes"][-1].startswith("this cancels an unfinished backfill to another version")
        ended = served.http.get(f"/backfills/{number}").json()
        assert ended["state"] == "cancelled"
        assert ended["finished"] >= ended["created"]
        served.work()
        assert shown(served, filled)["mix"] == {"v1": 20}


class TestPlacement:
    def test_no_item_is_written_and_one_number_of_the_feed_is_taken(self, served: Any, filled: str) -> None:
        deploy(served, filled, "v2")
        start_backfill(served, filled)
        served.work()
        served.http.delete(f"{filled}/items/i4")
        before = shown(served, filled)["seq"]

        assert rollback(served, filled).json()["activated"] == 19

        assert [row for row in feed(served, filled) if row.seq > before] == []
        assert (shown(served, filled)["seq"], shown(served, filled)["mix"]) == (before + 1, {"v1": 19})

    def test_a_deleted_item_does_not_come_back_and_a_foreign_gallery_is_left_alone(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        neighbour = served.gallery("v1")
        served.ingest(neighbour, {"n": pictures[0]})
        for path in (filled, neighbour):
            deploy(served, path, "v2")
            start_backfill(served, path)
        served.work()
        served.http.delete(f"{filled}/items/i0")

        rollback(served, filled)

        assert shown(served, filled)["mix"] == {"v1": 19}
        assert shown(served, neighbour)["mix"] == {"v2": 1}

    def test_the_better_measured_route_wins_then_the_shorter_then_the_newer_version_and_dual_is_last(
        self, served: Any
    ) -> None:
        registry = served.runtime.registry

        def order(current: str) -> list[str]:
            return [held.name for held in preference(registry, registry.named(current))]

        assert order("v3")[:3] == ["v3", "v2", "v1"]
        assert order("weak")[:3] == ["weak", "v1", "v2"]
        assert order("v1") == ["v1", "weak", "other", "v3", "v2", "plain"]
        assert order("plain")[0] == "plain"

    def test_a_deployment_moves_items_to_a_version_that_reaches_them_better(self, served: Any, filled: str) -> None:
        deploy(served, filled, "v2")
        start_backfill(served, filled)
        served.work()

        assert deploy(served, filled, "weak").json()["activated"] == 20
        assert shown(served, filled)["mix"] == {"v1": 20}
        assert rollback(served, filled).json()["activated"] == 20
        assert shown(served, filled)["mix"] == {"v2": 20}


@pytest.mark.parametrize(
    ("states", "standing"),
    [
        ([], []),
        (["current"], [0]),
        (["superseded", "current"], [0, 1]),
        (["superseded", "rolled_back", "current"], [2]),
        (["superseded", "rolled_back", "superseded", "current"], [2, 3]),
        (["superseded", "superseded", "rolled_back", "rolled_back", "current"], [4]),
        (["superseded", "superseded", "rolled_back", "superseded", "rolled_back", "current"], [0, 5]),
    ],
)
def test_a_rollback_takes_the_place_of_what_it_returned_to(states: list[str], standing: list[int]) -> None:
    undone = [number if state == "rolled_back" else None for number, state in enumerate(states)]
    history: list[Any] = [
        SimpleNamespace(id=number, since=0.0, undoes_id=undoes) for number, undoes in enumerate([None, *undone[:-1]])
    ][: len(states)]
    never_current: Any = SimpleNamespace(id=99, since=None, undoes_id=None)

    assert [row.id for row in standing_of([*history[:1], never_current, *history[1:]])] == standing
