"""The rows of deleted items go in time, and whoever reads on from before that has forgotten them too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from service.backfills.states import BackfillState
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries.deletion import delete_gallery
from service.store.galleries.gallery import take_seq
from service.store.galleries.items import delete_items
from service.store.tables import backfill_curve, backfill_failure, embedding, gallery, item, item_traffic
from service.upgrades import tombstones
from service.upgrades.curves.points import CurveState
from service.upgrades.tombstones import TombstonePurger
from staging.inputs.builders import make_version
from staging.states.plans import Planning
from staging.states.replicated import ReplicatedWorld

DAY = 24 * 3600.0


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    upgrade(settings)
    with closing(Database(settings.database_url)) as made:
        yield made


def delete(database: Database, gallery_id: int, *names: str) -> None:
    with database.write() as connection:
        delete_items(connection, gallery_id, names)


def rows(database: Database) -> list[tuple[str, bool]]:
    with database.lookup() as connection:
        found = connection.execute(select(item.c.external_id, item.c.deleted).order_by(item.c.external_id))
        return [(row.external_id, row.deleted) for row in found]


def row_of(database: Database, gallery_id: int) -> Any:
    with database.lookup() as connection:
        return connection.execute(select(gallery).where(gallery.c.id == gallery_id)).one()


def wait(database: Database, seconds: float) -> None:
    """The time passes."""
    with database.write() as connection:
        connection.execute(update(gallery).values(settling_since=gallery.c.settling_since - seconds))


def purge(database: Database) -> None:
    TombstonePurger(database).look()


def purge_all(database: Database) -> None:
    """Of all that is deleted now."""
    purge(database)
    wait(database, DAY)
    purge(database)


def test_rows_of_deleted_items_go_after_a_day(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "BLOCK", 2)
    planning = Planning(database)
    path = planning.gallery(8)
    number = planning.start(path)
    planning.set_state(number, BackfillState.DONE)
    with database.write() as connection:
        connection.execute(insert(item_traffic).values(item_id=1, matches=1))
        failed = {"backfill_id": number, "reason": "", "at": 0.0}
        connection.execute(insert(backfill_failure).values(item_id=2, **failed))
    delete(database, path, "i0", "i1", "i2", "i3", "i4")

    purge(database)
    delete(database, path, "i5")
    purge(database)
    wait(database, DAY - 60)
    purge(database)
    assert sum(deleted for _, deleted in rows(database)) == 6

    wait(database, 60)
    purge(database)
    assert rows(database) == [("i5", True), ("i6", False), ("i7", False)]

    planning.store(path, ["i0"])
    wait(database, DAY)
    purge(database)
    assert rows(database) == [("i0", False), ("i6", False), ("i7", False)]


def test_they_stay_while_a_backfill_may_have_planned_the_items_and_its_curve_is_measured(
    database: Database,
) -> None:
    planning = Planning(database)
    number = planning.start(path := planning.gallery(3))
    delete(database, path, "i0")
    purge_all(database)
    assert ("i0", True) in rows(database)

    planning.set_state(number, BackfillState.CANCELLED)
    with database.write() as connection:
        curve = {"asked": {}, "chosen": [], "state": CurveState.MEASURING}
        connection.execute(insert(backfill_curve).values(backfill_id=number, **curve))
    purge_all(database)
    assert ("i0", True) in rows(database)

    with database.write() as connection:
        connection.execute(update(backfill_curve).values(state=CurveState.COMPLETE))
    purge_all(database)
    assert [name for name, _ in rows(database)] == ["i1", "i2"]


def test_each_gallery_is_purged_by_its_own_position(database: Database) -> None:
    planning = Planning(database)
    number, other = planning.start(planning.gallery(3)), planning.gallery(3)
    planning.set_state(number, BackfillState.DONE)
    planning.set_state(planning.start(other), BackfillState.DONE)
    with database.write() as connection:
        curve = {"asked": {}, "chosen": [], "state": CurveState.MEASURING}
        connection.execute(insert(backfill_curve).values(backfill_id=number, **curve))
    delete(database, planning.gallery(3), "i0")
    purge(database)
    wait(database, DAY)
    delete(database, other, "i1")

    purge(database)
    assert [name for name, deleted in rows(database) if deleted] == ["i1"]

    wait(database, DAY)
    purge(database)
    assert not any(deleted for _, deleted in rows(database))


def test_of_two_processes_that_find_a_gallery_due_the_second_changes_nothing(database: Database) -> None:
    planning = Planning(database)
    delete(database, path := planning.gallery(3), "i0")
    before = row_of(database, path)
    for _ in range(2):
        tombstones.purge(database, path, DAY, threading.Event())

    assert ("i0", True) in rows(database)
    assert (row_of(database, path).purged_seq, row_of(database, path).next_seq) == (0, before.next_seq)


def test_one_that_is_deleted_meanwhile_does_not_hold_up_the_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = Planning(database)
    paths = [planning.gallery(2), planning.gallery(2)]
    for path in paths:
        delete(database, path, "i0")
    purge(database)
    wait(database, DAY)
    with monkeypatch.context() as patch:

        def late(database: Database, gallery_id: int, *more: Any) -> None:
            if gallery_id == paths[0]:
                with database.write() as connection:
                    delete_gallery(connection, gallery_id)
            real(database, gallery_id, *more)

        real = tombstones.purge
        patch.setattr(tombstones, "purge", late)
        purge(database)

    assert [row_of(database, path).purged_seq > 0 for path in paths] == [False, True]
    assert sum(deleted for _, deleted in rows(database)) == 1


def test_a_process_that_ends_leaves_the_rest_to_the_next_time(database: Database) -> None:
    planning, stop = Planning(database), threading.Event()
    delete(database, path := planning.gallery(3), "i0", "i1")
    purge(database)
    wait(database, DAY)
    stop.set()
    tombstones.purge(database, path, DAY, stop)
    assert sum(deleted for _, deleted in rows(database)) == 2

    wait(database, DAY)
    purge(database)
    assert rows(database) == [("i2", False)]


def test_a_clock_that_was_ahead_keeps_them_no_longer_than_a_day(database: Database) -> None:
    planning = Planning(database)
    delete(database, planning.gallery(3), "i0")
    purge(database)
    wait(database, -1000 * DAY)

    purge(database)
    assert len(rows(database)) == 2


def test_a_process_that_has_not_followed_meanwhile_forgets_them_too(tmp_path: Path) -> None:
    world = ReplicatedWorld(tmp_path, make_version)
    path = world.create()
    world.store(path, 1, a=[1, 0], b=[0, 1], c=[0.6, 0.8])
    loaded = world.replica.find("g")
    with world.database.write() as connection:  # c can be searched by nobody
        connection.execute(update(item).where(item.c.id == 3).values(seq=take_seq(connection, path, 1)))
        connection.execute(update(embedding).where(embedding.c.item_id == 3).values(vector=b"damaged"))
    world.store(path, 1, d=[0.8, 0.6])
    world.replica.refresh(path)
    assert sorted(loaded.gallery.keys()) == [1, 2, 3, 4]

    world.delete(path, "a", "c")
    purge_all(world.database)
    world.store(path, 1, a=[0, 1])
    world.delete(path, "d")
    world.replica._poll()

    with world.database.lookup() as connection:
        assert sorted(connection.execute(select(item.c.id)).scalars()) == [2, 4, 5]
    assert sorted(loaded.gallery.keys()) == [2, 5]
    assert world.new_replica().find("g").gallery.items_by_version() == loaded.gallery.items_by_version() == {"v1": 2}
    world.database.close()
