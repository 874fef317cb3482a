from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from service.errors import DeletedMeanwhile
from service.settings import Settings
from service.store.database.checkpoints import LEAST_BYTES, Checkpoints
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.tables import gallery, item


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    settings = Settings(data=tmp_path / "new" / "folder")
    upgrade(settings)
    opened = Database(settings.database_url)
    yield opened
    opened.close()


def add_gallery(database: Database, name: str) -> None:
    with database.write() as connection:
        connection.execute(insert(gallery).values(name=name, next_seq=1, created=0))


def count(database: Database) -> int:
    with database.lookup() as connection:
        return len(connection.execute(select(gallery.c.id)).all())


def test_a_write_that_raises_leaves_nothing(database: Database) -> None:
    def fail() -> None:
        with database.write() as connection:
            connection.execute(insert(gallery).values(name="g", next_seq=1, created=0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert count(database) == 0


def test_a_read_sees_one_moment_while_others_write(database: Database) -> None:
    with database.read() as connection:
        before = connection.execute(select(gallery.c.id)).all()
        add_gallery(database, "g")
        after = connection.execute(select(gallery.c.id)).all()

    assert before == after == []
    assert count(database) == 1


def test_a_lookup_sees_the_newest_commit(database: Database) -> None:
    with database.lookup() as connection:
        assert connection.execute(select(gallery.c.id)).all() == []
        add_gallery(database, "g")
        assert len(connection.execute(select(gallery.c.id)).all()) == 1


def test_writers_of_several_processes_take_turns(database: Database, tmp_path: Path) -> None:
    add_gallery(database, "g")
    others = [Database(Settings(data=tmp_path / "new" / "folder").database_url) for _ in range(3)]

    def work(mine: Database) -> None:
        for _ in range(20):
            with mine.write() as connection:
                seen = connection.execute(select(gallery.c.next_seq)).scalar_one()
                connection.execute(update(gallery).values(next_seq=seen + 1))

    threads = [threading.Thread(target=work, args=(mine,), daemon=True) for mine in (database, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.lookup() as connection:
        assert connection.execute(select(gallery.c.next_seq)).scalar_one() == 81
    for other in others:
        other.close()


def test_every_connection_keeps_keys_and_survives_a_power_cut(database: Database) -> None:
    with database.write() as connection:
        pragmas = {name: connection.execute(text(f"pragma {name}")).scalar() for name in PRAGMAS}

    assert pragmas == PRAGMAS
    row = {"external_id": "a", "metadata": {}, "seq": 1, "deleted": False, "created": 0}
    with pytest.raises(DeletedMeanwhile), database.write() as connection:
        connection.execute(insert(item).values(gallery_id=9, **row))


def test_a_row_that_others_refer_to_is_not_deleted_and_says_nothing_of_a_lost_one(database: Database) -> None:
    add_gallery(database, "g")
    row = {"external_id": "a", "metadata": {}, "seq": 1, "deleted": True, "created": 0, "gallery_id": 1}
    with database.write() as connection:
        connection.execute(insert(item).values(**row))
    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(delete(gallery))


PRAGMAS = {"foreign_keys": 1, "journal_mode": "wal", "synchronous": 2}


def test_the_number_of_a_deleted_gallery_is_not_given_again(database: Database) -> None:
    add_gallery(database, "g")
    with database.write() as connection:
        connection.execute(gallery.delete())

    add_gallery(database, "h")

    with database.lookup() as connection:
        assert connection.execute(select(gallery.c.id)).scalar_one() == 2


def test_the_log_is_written_back_while_nobody_writes_and_no_writer_waits_for_a_reader(database: Database) -> None:
    checkpoints = Checkpoints(database)
    with database.write() as connection:
        connection.execute(text("create table large as select randomblob(:bytes) as content"), {"bytes": LEAST_BYTES})

    checkpoints.look()
    assert database.wal_bytes() > LEAST_BYTES  # it was written since the look before
    with database.read() as reading:
        before = reading.execute(select(gallery.c.id)).all()
        add_gallery(database, "beside")
        checkpoints.look()
        checkpoints.look()
        assert database.wal_bytes() > LEAST_BYTES
        add_gallery(database, "again")
        assert reading.execute(select(gallery.c.id)).all() == before
    checkpoints.look()
    checkpoints.look()

    assert database.wal_bytes() == 0
    assert count(database) == 2
    with database.lookup() as connection:
        (timeout,) = connection.execute(text("PRAGMA busy_timeout")).one()
        assert timeout == 30_000
