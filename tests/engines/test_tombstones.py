"""The rows of deleted items go in time, and whoever reads on from before that has forgotten them too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update

from service.backfills.planner import BackfillState
from service.settings import Settings
from service.store.database import Database, upgrade
from service.store.repository import delete_items, take_seq
from service.store.tables import backfill_curve, backfill_failure, embedding, gallery, item, item_traffic
from service.upgrades import tombstones
from service.upgrades.curves.points import CurveState
from service.upgrades.tombstones import TombstonePurger
from staging.builders import make_version
from staging.plans import Planning
from staging.replicated import ReplicatedWorld

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
    live = world.replica.find("g")
    with world.database.write() as connection:  # c can be searched by nobody
        connection.execute(update(item).where(item.c.id == 3).values(seq=take_seq(connection, path, 1)))
        connection.execute(update(embedding).where(embedding.c.item_id == 3).values(vector=b"damaged"))
    world.store(path, 1, d=[0.8, 0.6])
    world.replica.refresh(path)
    assert sorted(live.gallery.keys()) == [1, 2, 3, 4]

    world.delete(path, "a", "c")
    purge_all(world.database)
    world.store(path, 1, a=[0, 1])
    world.delete(path, "d")
    world.replica._poll()

    with world.database.lookup() as connection:
        assert sorted(connection.execute(select(item.c.id)).scalars()) == [2, 4, 5]
    assert sorted(live.gallery.keys()) == [2, 5]
    assert world.new_replica().find("g").gallery.items_by_version() == live.gallery.items_by_version() == {"v1": 2}
    world.database.close()
