"""Two changes that meet: the second sees what the first did, no statement fails half-way, and nobody waits in a circle.

A hook on the database brings the second change in between two statements of the first. SQLite, which has one writer at
a time, is tried where the order of locks is not the point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import event, func, select, text

from service.backfills.scores import NO_SCORES
from service.backfills.sweeps import continue_sweep
from service.backfills.traffic import Traffic
from service.errors import UnknownGallery
from service.registry.registry import Registry
from service.registry.trial_counters import Counters
from service.registry.trial_records import add_counters
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries.deletion import delete_gallery, free_items
from service.store.rows import BackfillRow
from service.store.tables import item_traffic
from service.upgrades.deployments.retiring import VersionInUse, precheck, retire
from service.upgrades.deployments.transition import TransitionRequest
from staging.api.served import Served, problem, serving
from staging.api.steps import held
from staging.inputs.builders import image_bytes, make_image
from staging.states.plans import ORDER, Planning

WAIT_SECONDS = 0.5
"""How long the first change is kept at its statement: enough for the second to arrive where it has to wait."""
on_postgresql = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)


@pytest.fixture
def pictures() -> list[bytes]:
    return [image_bytes(make_image(number, number)) for number in range(5)]


@pytest.fixture
def served(settings: Settings) -> Iterator[Served]:
    with serving(settings) as running:
        yield running


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    with closing(Database(settings.database_url)) as opened:
        yield opened


def mix(served: Served, path: str) -> Any:
    return served.http.get(path).json()["mix"]


def meanwhile(database: Database, beginning: str, change: Callable[[], Any]) -> threading.Thread:
    """A thread that makes a change when a statement that begins so was executed, which waits for it for a moment."""
    thread = threading.Thread(target=change, daemon=True)

    def executed(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(beginning) and thread.ident is None:
            thread.start()
            thread.join(WAIT_SECONDS)

    event.listen(database._writer, "after_cursor_execute", executed)
    return thread


def upgradable(served: Served, pictures: list[bytes], new: str = "") -> str:
    """A gallery of v1 beside v2; then `new`, if any, becomes current."""
    served.add("v1", 4)
    served.add("v2", 6, edges=[("v1", "truncate")])
    return served.filled(pictures, new=new)


def test_a_retirement_knows_of_an_edge_that_another_process_removed(
    served: Served, settings: Settings, pictures: list[bytes]
) -> None:
    served.add("v1", 4)
    served.add("plain", 4, encoder=False)
    path = served.filled(pictures)
    served.add("v3", 6, edges=[("v1", "truncate"), ("plain", "truncate")])
    served.deploy(path, "v3")
    beside = {"version": "plain", "items": [{"id": f"i{n}", "embedding": [1, n, 0, 1]} for n in range(5)]}
    assert served.http.post(f"{path}/items", json=beside).status_code == 200
    assert mix(served, path) == {"plain": 5}
    with closing(Database(settings.database_url)) as database:
        elsewhere = Registry(database, settings)
        elsewhere.sync()
        counted = precheck(database, elsewhere, path.rpartition("/")[2], elsewhere.named("v1"), None)
        assert served.remove("/edges/v3/plain/truncate").status_code == 200
        assert mix(served, path) == {"v1": 5}

        version, who = elsewhere.named("v1"), TransitionRequest("me", served.runtime.replica)
        gallery_id = served.runtime.replica.find(path.rpartition("/")[2]).id

        with database.write() as connection, pytest.raises(VersionInUse, match="5 items depend"):
            retire(connection, elsewhere, gallery_id, version, who, counted)

    assert held(served, path, "v1") == 5


@on_postgresql
def test_what_went_at_once_is_not_counted_on_before_replicas_heard_of_it(
    served: Served, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.add("v1", 4)
    served.add("v2", 6, edges=[("v1", "truncate")], encoder=False)
    path = served.filled(pictures, new="v2")
    beside = {"version": "v2", "items": [{"id": f"i{n}", "embedding": [1, n, 0, 1, 0, 2]} for n in range(5)]}
    assert served.http.post(f"{path}/items", json=beside).status_code == 200
    with monkeypatch.context() as killed:
        killed.setattr(served.runtime.reaper, "free", lambda *_: None)
        assert served.http.post(f"{path}/retire", json={"version": "v1"}).status_code == 200
    assert held(served, path, "v1") == 0

    refused = served.http.post(f"{path}/deployments", json={"version": "v1"})
    gone_back = served.http.post(f"{path}/rollback", json={})

    assert (refused.status_code, refused.json()["code"]) == (409, "no_route")
    assert gone_back.status_code == 409
    assert mix(served, path) == {"v2": 5}


@on_postgresql
def test_a_gallery_is_deleted_while_a_backfill_of_it_is_planned(database: Database) -> None:
    stage, ended = Planning(database), []
    gallery_id = stage.gallery(6)
    job = BackfillRow(*stage.row(stage.start(gallery_id, planned=False)))

    def plan() -> None:
        with pytest.raises(UnknownGallery) as raised:
            continue_sweep(database, job, ORDER, lambda: NO_SCORES)
        ended.append(raised.type)

    planning = meanwhile(database, "DELETE FROM backfill_chunk", plan)
    with database.write() as connection:
        delete_gallery(connection, gallery_id)
    planning.join()

    assert ended == [UnknownGallery]


@on_postgresql
def test_a_gallery_is_deleted_while_a_backfill_of_it_that_runs_is_resumed(
    served: Served, settings: Settings, pictures: list[bytes]
) -> None:
    path = upgradable(served, pictures, new="v2")
    number, gallery_id = served.backfill(path), served.runtime.replica.find(path.rpartition("/")[2]).id

    def delete() -> None:
        with closing(Database(settings.database_url)) as elsewhere, elsewhere.write() as connection:
            delete_gallery(connection, gallery_id)

    deleting = meanwhile(served.runtime.database, "SELECT backfill.", delete)
    resumed = served.http.post(f"/backfills/{number}/resume")
    deleting.join()

    problem(resumed, 404, "unknown_backfill")


@on_postgresql
def test_a_canary_is_changed_while_its_counts_are_added_up(
    served: Served, settings: Settings, pictures: list[bytes]
) -> None:
    path = upgradable(served, pictures)
    number = served.deploy(path, "v2", until="canary", canary={"share": 0.5})["id"]
    counters, answers = Counters(), []
    counters.add(new=1)
    with closing(Database(settings.database_url)) as elsewhere:
        with elsewhere.write() as connection:
            add_counters(connection, number, "canary", counters)

        def change() -> None:
            other = {"to": "canary", "canary": {"share": 0.2}}
            answers.append(served.http.post(f"{path}/deployments/{number}/advance", json=other))

        changing = meanwhile(elsewhere, "SELECT deployment.settings", change)
        with elsewhere.write() as connection:
            add_counters(connection, number, "canary", counters)
        changing.join()

    assert [answer.status_code for answer in answers] == [200]


@on_postgresql
def test_a_gallery_is_deleted_while_what_its_canary_counted_is_added_up(
    served: Served, settings: Settings, pictures: list[bytes]
) -> None:
    path = upgradable(served, pictures)
    number = served.deploy(path, "v2", until="canary", canary={"share": 0.5})["id"]
    counters, added = Counters(), []
    counters.add(new=1)

    def add_up() -> None:
        with served.runtime.database.write() as connection:
            added.append(add_counters(connection, number, "canary", counters))

    with closing(Database(settings.database_url)) as elsewhere:
        adding = meanwhile(elsewhere, "DELETE FROM trial_report", add_up)
        with elsewhere.write() as connection:
            delete_gallery(connection, served.runtime.replica.find(path.rpartition("/")[2]).id)
        adding.join()

    assert added == [None]


def test_matches_of_an_item_add_up_and_those_of_removed_items_are_left_out(
    database: Database, settings: Settings
) -> None:
    upgrade(settings)
    stage = Planning(database)
    first, second = (row.id for row in stage.items(stage.gallery(2)).values())
    traffic = Traffic(database, flush_seconds=60)

    for found in ([first, second, first], [first], [first + 1_000, second + 1_000]):
        traffic.count(found)
        traffic.flush()

    with database.lookup() as connection:
        counted = dict(tuple(row) for row in connection.execute(select(item_traffic)))
    assert counted == {first: 3, second: 1}


@on_postgresql
def test_matches_of_others_are_counted_when_items_went_while_they_were_written(database: Database) -> None:
    stage = Planning(database)
    gone, kept = stage.gallery(4), stage.gallery(3)
    traffic = Traffic(database, flush_seconds=60)
    with database.write() as connection:
        delete_gallery(connection, gone)
    for each in (gone, kept):
        traffic.count([row.id for row in stage.items(each).values()])
    writing = threading.Thread(target=traffic.flush, daemon=True)
    with database.write() as connection:
        free_items(connection, gone, 0, 10)
        writing.start()
        until_blocked(database)
    writing.join()

    with database.lookup() as connection:
        assert connection.execute(select(func.count()).select_from(item_traffic)).scalar_one() == 3


@on_postgresql
def test_a_deleted_gallery_is_freed_while_matches_of_its_items_are_written(database: Database) -> None:
    stage = Planning(database)
    gone = stage.gallery(4)
    traffic = Traffic(database, flush_seconds=60)
    traffic.count([row.id for row in stage.items(gone).values()])
    with database.write() as connection:
        delete_gallery(connection, gone)

    writing = meanwhile(database, "DELETE FROM item_traffic", traffic.flush)
    with database.write() as connection:
        free_items(connection, gone, 0, 10)
    writing.join()

    assert stage.items(gone) == {}


def until_blocked(database: Database) -> None:
    """Until some connection waits for a lock."""
    waiting = text("select count(*) from pg_stat_activity where wait_event_type = 'Lock'")
    blocked = 0
    while not blocked:
        with database.lookup() as connection:
            blocked = connection.execute(waiting).scalar_one()
