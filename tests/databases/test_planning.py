"""A backfill is planned by ranges of keys: the same chunks whatever the size of a range, and no more keys at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, event, insert, select

from index.evaluation.ordering import ORDERS
from service.backfills import sweeps
from service.backfills.scores import NO_SCORES, ItemScores, sorted_scores
from service.backfills.sweeps import continue_sweep, new_sweep_columns
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.galleries import ranges
from service.store.galleries.gallery import take_seq
from service.store.rows import BackfillRow, one_of
from service.store.sql.arrays import key_range
from service.store.tables import backfill, backfill_chunk, embedding, gallery, item, item_traffic, version

ITEMS = 50


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    """Two galleries whose items came in turns; every third of them is transformed, every fifth was matched."""
    upgrade(settings)
    with closing(Database(settings.database_url)) as opened:
        with opened.write() as connection:
            for number, card in enumerate(({}, {"files": {"encoder.onnx": "0"}}), 1):
                values = {"id": number, "name": f"v{number}", "card": card, "card_sha256": "", "created": 0}
                connection.execute(insert(version).values(values))
            for number in (1, 2):
                connection.execute(insert(gallery).values(id=number, name=f"g{number}", next_seq=99, created=0))
            for n in range(2 * ITEMS):
                row = {"external_id": f"i{n}", "metadata": {"n": n % 7}, "seq": n, "deleted": False, "created": 0}
                connection.execute(insert(item).values(id=n + 1, gallery_id=1 + n % 2, blob=f"1/{n}", **row))
                origin = "encoded" if n % 3 else "transformed"
                held = {"item_id": n + 1, "version_id": 1 if n % 3 else 2, "origin": origin, "vector": b""}
                connection.execute(insert(embedding).values(held))
                if n % 5 == 0:
                    connection.execute(insert(item_traffic).values(item_id=n + 1, matches=n))
        yield opened


def made(database: Database, gallery_id: int = 1, **fields: Any) -> BackfillRow:
    """A backfill that is to be planned."""
    job = {"gallery_id": gallery_id, "version_id": 2, "kind": "reencode", "state": "running", "chunk_size": 4}
    job |= {"item_order": "oldest", "next_claim": 0, "created": 0, "attempts": 1, "total": 0}
    with database.write() as connection:
        values = {**job, **new_sweep_columns(take_seq(connection, gallery_id, 0)), **fields}
        return one_of(BackfillRow, connection.execute(insert(backfill).values(values).returning(backfill)))


def planned(database: Database, told: ItemScores = NO_SCORES, **fields: Any) -> list[list[int]]:
    """The chunks; nothing stays of it."""
    job = made(database, id=7, **fields)
    state = continue_sweep(database, job, [2, 1], lambda: told)
    with database.write() as connection:
        chunks = select(backfill_chunk.c.item_ids, backfill_chunk.c.state).where(backfill_chunk.c.backfill_id == 7)
        rows = connection.execute(chunks.order_by(backfill_chunk.c.number)).all()
        connection.execute(delete(backfill_chunk))
        row = connection.execute(delete(backfill).where(backfill.c.id == 7).returning(backfill)).one()
    cut = [ids for ids, _ in rows]
    assert row.total == sum(map(len, cut))
    assert {state for _, state in rows} <= {"todo"}
    assert row.sweep_seq is None
    assert state == row.state == ("running" if cut else "done")
    return cut


SCOPES: tuple[dict[str, Any], ...] = (
    {},
    {"filter": {"field": "n", "in": [4, 5, 6]}},
    {"share": 0.3},
    {"item_limit": 9},
)
"""Of all items of the gallery, of some, and of so many."""
PASSING = {n + 1 for n in range(0, 2 * ITEMS, 2)}, {n + 1 for n in range(0, 2 * ITEMS, 2) if n % 7 >= 4}


def test_chunks_are_the_same_by_ranges_of_any_size(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    told = sorted_scores([(np.arange(99, 30, -1), np.sin(np.arange(69)))])
    for order, scope in [*product(ORDERS, SCOPES[:2]), *product(("newest", "traffic"), SCOPES[2:])]:
        with monkeypatch.context() as patch:
            whole = planned(database, told, item_order=order, **scope)
            for module in (sweeps, ranges):
                patch.setattr(module, "KEYS_PER_RANGE", 7)
            assert planned(database, told, item_order=order, **scope) == whole, (order, scope)

        expected = PASSING["filter" in scope]
        keys = [key for chunk in whole for key in chunk]
        assert set(keys) <= expected
        assert len(keys) == len(set(keys)) == {"share": 15, "item_limit": 9}.get(next(iter(scope), ""), len(expected))
        assert all(len(chunk) == 4 for chunk in whole[:-1])
        if order in ("oldest", "newest"):
            assert keys == sorted(expected, reverse=order == "newest")[: len(keys)]


def test_a_range_reads_no_more_keys_than_it_gives(database: Database) -> None:
    statements: list[str] = []
    with database.read() as connection:
        event.listen(connection, "before_cursor_execute", lambda *given: statements.append(given[2]))
        for descending in (False, True):
            keys: list[int] = []
            for size in (20, 20, 10, 0):
                behind = keys[-1] if keys else None
                found = key_range(connection, item.c.id, item.c.gallery_id == 1, 20, behind, descending=descending)
                assert len(found) == size
                keys += found.tolist()
            assert keys == sorted(range(1, 2 * ITEMS, 2), reverse=descending)
        assert not len(key_range(connection, item.c.id, item.c.gallery_id == 3, 20))
    assert len(statements) == 9


def test_numbers_are_found_by_key() -> None:
    told = sorted_scores([(np.array([5, 3]), np.array([0.5, 0.3])), (np.array([4]), np.array([0.4]))])

    assert told.of(np.array([3, 4, 6, 5, 1]), -1.0).tolist() == [0.3, 0.4, -1.0, 0.5, -1.0]
    assert NO_SCORES.of(np.array([3]), 0.0).tolist() == [0.0]
