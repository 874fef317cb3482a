from __future__ import annotations

import threading
from typing import Any
from urllib.parse import urljoin

import pytest
from sqlalchemy import select

from service.backfills import planning
from service.store.tables import backfill_chunk, item
from staging.api.steps import refusal
from staging.waiting import until

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    """Twenty items of v1, v2 current."""
    path = served.filled(pictures)
    served.deploy(path, "v2")
    return path


def start(served: Any, path: str, **fields: Any) -> Any:
    return served.http.post(f"{path}/backfills", json=fields)


def turn(served: Any, number: int, action: str) -> Any:
    return served.http.post(f"/backfills/{number}/{action}")


def shown(served: Any, number: int) -> dict[str, Any]:
    return served.http.get(f"/backfills/{number}").json()


def chunks_of(served: Any, number: int) -> list[Any]:
    with served.runtime.database.lookup() as connection:
        return list(connection.execute(select(backfill_chunk).where(backfill_chunk.c.backfill_id == number)))


class TestStart:
    def test_it_answers_with_a_place_to_watch(self, served: Any, filled: str) -> None:
        started = start(served, filled)

        assert started.status_code == 202
        body = started.json()
        below_a_prefix = f"https://host/prefix/v1{filled}/backfills"
        place = urljoin(below_a_prefix, started.headers["location"])
        assert place == f"https://host/prefix/v1/backfills/{body['id']}"
        assert body["active_seconds"] >= 0
        assert {**body, "id": 0, "created": 0, "active_seconds": 0} == {
            "id": 0,
            "gallery": filled.rpartition("/")[2],
            "version": "v2",
            "kind": "reencode",
            "order": "random",
            "state": "running",
            "planning": False,
            "total": 20,
            "done": 0,
            "skipped": 0,
            "failed": 0,
            "retrying": 0,
            "remaining": 20,
            "rate": None,
            "share": None,
            "limit": None,
            "origin": None,
            "filter": None,
            "attempts": 3,
            "created": 0,
            "finished": None,
            "active_seconds": 0,
            "items_per_second": None,
            "eta_seconds": None,
            "curve": None,
        }
        again = shown(served, body["id"])
        assert again == {**body, "active_seconds": again["active_seconds"]}
        (listed,) = served.http.get(f"{filled}/backfills").json()["backfills"]
        assert listed == {**body, "active_seconds": listed["active_seconds"]}

    def test_progress_and_time_left_are_shown_on_the_way(self, served: Any, filled: str) -> None:
        number = start(served, filled, chunk_size=5).json()["id"]
        served.work(1)

        halfway = shown(served, number)

        assert (halfway["done"], halfway["remaining"], halfway["state"]) == (5, 15, "running")
        assert halfway["eta_seconds"] > 0
        served.work()
        end = shown(served, number)
        assert (end["done"], end["remaining"], end["state"], end["eta_seconds"]) == (20, 0, "done", None)
        assert end["finished"] > end["created"]

    def test_a_rate_holds_from_the_first_chunk_on(self, served: Any, filled: str) -> None:
        """8 items a second: no more than 4 at a time, whatever was asked; the time left is that of the rate."""
        number = start(served, filled, chunk_size=20, rate=8).json()["id"]
        served.work(1)

        begun = shown(served, number)

        assert begun["done"] == 4
        assert begun["eta_seconds"] >= 16 / 8

    def test_without_anything_to_move_it_is_done_at_once(self, served: Any, filled: str) -> None:
        start(served, filled)
        served.work()

        again = start(served, filled).json()

        assert (again["state"], again["total"]) == ("done", 0)
        assert again["finished"] >= again["created"]

    def test_a_gallery_has_one_active_backfill(self, served: Any, filled: str) -> None:
        number = start(served, filled).json()["id"]

        assert refusal(start(served, filled))[:2] == (409, "backfill_active")
        turn(served, number, "pause")
        assert refusal(start(served, filled))[:2] == (409, "backfill_active")
        turn(served, number, "cancel")
        assert start(served, filled).status_code == 202

    def test_the_target_is_the_current_version(self, served: Any, filled: str) -> None:
        assert refusal(start(served, filled, version="v1")) == (409, "not_current", ["/version"])
        assert refusal(start(served, filled, version="v9")) == (404, "unknown_version", ["/version"])
        assert refusal(start(served, served.gallery(None)))[:2] == (409, "no_current_version")
        assert refusal(start(served, "/galleries/nowhere"))[:2] == (404, "unknown_gallery")
        assert start(served, filled, version="v2").status_code == 202

    def test_reencode_needs_an_encoder_and_transform_an_item_edge(self, served: Any, filled: str) -> None:
        assert refusal(start(served, served.gallery("plain"))) == (409, "no_encoder", ["/kind"])
        assert refusal(start(served, filled, kind="transform")) == (409, "no_route", ["/kind"])

    @pytest.mark.parametrize(
        ("fields", "pointer"),
        [
            ({"kind": "copy"}, "/kind"),
            ({"order": "best"}, "/order"),
            ({"chunk_size": 0}, "/chunk_size"),
            ({"chunk_size": 10**6}, "/chunk_size"),
            ({"rate": 0}, "/rate"),
            ({"rate": "fast"}, "/rate"),
            ({"speed": 1}, "/speed"),
        ],
    )
    def test_an_illegal_field_is_named(self, served: Any, filled: str, fields: dict[str, Any], pointer: str) -> None:
        assert refusal(start(served, filled, **fields)) == (422, "invalid_request", [pointer])
        assert served.http.get(f"{filled}/backfills").json() == {"backfills": []}


class TestSteering:
    def test_a_paused_one_moves_nothing_until_it_is_resumed(self, served: Any, filled: str) -> None:
        number = start(served, filled, chunk_size=5).json()["id"]
        served.work(1)

        assert turn(served, number, "pause").json()["state"] == "paused"
        served.work()
        assert served.http.get(filled).json()["mix"] == {"v1": 15, "v2": 5}
        assert turn(served, number, "resume").json()["state"] == "running"
        served.work()
        assert served.http.get(filled).json()["mix"] == {"v2": 20}

    def test_a_cancelled_one_keeps_what_it_moved_and_moves_no_more(self, served: Any, filled: str) -> None:
        number = start(served, filled, chunk_size=5).json()["id"]
        served.work(1)

        ended = turn(served, number, "cancel").json()
        served.work()

        assert (ended["state"], ended["done"]) == ("cancelled", 5)
        assert ended["finished"] > ended["created"]
        assert served.http.get(filled).json()["mix"] == {"v1": 15, "v2": 5}

    def test_saying_it_twice_changes_nothing(self, served: Any, filled: str) -> None:
        number = start(served, filled).json()["id"]

        for action in ("pause", "resume", "cancel"):
            once, twice = turn(served, number, action), turn(served, number, action)
            assert once.status_code == twice.status_code == 200
            passing = {"eta_seconds": 0, "active_seconds": 0}
            assert {**once.json(), **passing} == {**twice.json(), **passing}

    def test_one_that_ended_cannot_be_steered(self, served: Any, filled: str) -> None:
        number = start(served, filled).json()["id"]
        served.work()

        for action in ("pause", "resume", "cancel"):
            assert refusal(turn(served, number, action))[:2] == (409, "backfill_ended")
        assert shown(served, number)["state"] == "done"

    @pytest.mark.parametrize("number", [10**9, 0, -1, 1 << 70])
    def test_an_unknown_one_is_not_found(self, served: Any, number: int) -> None:
        asked = [turn(served, number, action) for action in ("pause", "resume", "cancel")]
        asked += [served.http.get(f"/backfills/{number}"), served.http.get(f"/backfills/{number}/failures")]

        assert {response.status_code for response in asked} == {404 if number == 10**9 else 422}


class TestFailures:
    def test_items_that_cannot_be_moved_are_listed_and_the_rest_goes_on(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        with served.runtime.database.lookup() as connection:
            newest = select(item.c.blob).where(item.c.external_id.in_(["i3", "i7"])).order_by(item.c.id.desc()).limit(2)
            seven, three = connection.execute(newest).scalars()
        served.runtime.blobs.remove([three])
        path = served.runtime.settings.data / "blobs" / seven
        path.write_bytes(pictures[7][:40])
        number = start(served, filled, chunk_size=4).json()["id"]

        served.work()

        ended = shown(served, number)
        assert (ended["state"], ended["done"], ended["failed"]) == ("done", 18, 2)
        listed = served.http.get(f"/backfills/{number}/failures").json()
        assert [f["item"] for f in listed["failures"]] == ["i3", "i7"]
        missing, broken = (f["reason"] for f in listed["failures"])
        assert missing == "the stored image is missing"
        assert "not a readable image" in broken
        assert listed["failed"] == 2
        assert listed["next"] is None
        first = served.http.get(f"/backfills/{number}/failures?limit=1").json()
        second = served.http.get(f"/backfills/{number}/failures", params={"cursor": first["next"]}).json()
        assert (first["failures"], second["failures"]) == (listed["failures"][:1], listed["failures"][1:])
        for cursor in ("?", "LTE=", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5"):  # no number, -1, more than fits
            refused = served.http.get(f"/backfills/{number}/failures", params={"cursor": cursor})
            assert refusal(refused)[:2] == (422, "invalid_argument")
        answer = served.query(filled, pictures[3], k=20).json()
        assert (answer["mix"], answer["degraded"]) == ({"v1": 2, "v2": 18}, [])

    def test_a_later_backfill_tries_them_again(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        with served.runtime.database.lookup() as connection:
            blob = connection.execute(select(item.c.blob).order_by(item.c.id.desc()).limit(1)).scalar_one()
        path = served.runtime.settings.data / "blobs" / blob
        path.unlink()
        start(served, filled)
        served.work()
        path.write_bytes(pictures[19])

        assert start(served, filled).json()["total"] == 1
        served.work()

        assert served.http.get(filled).json()["mix"] == {"v2": 20}


def test_deleting_a_gallery_takes_its_backfills_along(served: Any, filled: str) -> None:
    number = start(served, filled).json()["id"]

    assert served.remove(filled).status_code == 204

    assert served.http.get(f"/backfills/{number}").status_code == 404
    assert chunks_of(served, number) == []
    served.work()


@pytest.mark.parametrize("small", [19, 20])
def test_large_galleries_are_planned_beside_the_request_and_chunks_go_after_the_end(
    served: Any, filled: str, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(planning, "KEYS_PER_RANGE", small)
    threads, plan = [], planning.plan
    monkeypatch.setattr(
        planning, "plan", lambda *given: threads.append(threading.current_thread().name) or plan(*given)
    )
    number = start(served, filled).json()["id"]
    until(lambda: not shown(served, number)["planning"])
    assert (threads == ["planning"]) is (small < 20)
    served.work()
    assert shown(served, number)["state"] == "done"
    served.runtime.planner.look()
    until(lambda: not chunks_of(served, number))


def test_a_backfill_whose_planning_fails_is_kept(
    served: Any, filled: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planning, "plan", lambda *_: 1 / 0)
    started = start(served, filled)
    assert (started.status_code, started.json()["planning"]) == (202, True)
    assert "planning_failed" in caplog.text
    assert turn(served, started.json()["id"], "cancel").status_code == 200
