"""`Planning`: a database with a gallery, without version folders, to plan backfills."""

from __future__ import annotations

from itertools import chain, count
from typing import Any

import numpy as np
from sqlalchemy import insert, select, update

from service.backfills import chunks, leasing
from service.backfills.chunks import Chunk
from service.backfills.outcome import EmbeddedItems, Failed
from service.backfills.scores import NO_SCORES, ItemScores
from service.backfills.states import BackfillState, Kind
from service.backfills.sweeps import begin_next_sweep, continue_sweep, new_sweep_columns
from service.store.database.connections import Database
from service.store.galleries.gallery import take_seq
from service.store.galleries.items import NewItem, store_items
from service.store.rows import BackfillRow
from service.store.tables import backfill, backfill_chunk, backfill_failure, edge, embedding, gallery, item, version

V1 = 1


V2 = 2


V3 = 3
ORDER = (V3, V2, V1)
NAMES = count()


LEASE = 30.0


ONE = np.ones(2, np.float32)


def moved_of(seen: list[tuple[int, int]]) -> list[EmbeddedItems]:
    """A worker's results for items (key, seq), in two parts, like the batches of an encoder."""
    steps = (seen[:2], seen[2:])
    return [EmbeddedItems([k for k, _ in s], [n for _, n in s], np.tile(2 * ONE, (len(s), 1))) for s in steps]


class Clock:
    """The time for the code under test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now


class Planning:
    """A database with versions 1 to 3, and an item edge from 1 to 3."""

    def __init__(self, database: Database) -> None:
        self.database = database
        with database.write() as connection:
            for name in ("v1", "v2", "v3"):
                row = {"name": name, "card": {"files": {"encoder.onnx": "0"}}, "card_sha256": name, "created": 0.0}
                connection.execute(insert(version).values(row))
            known = {"origin": "registered", "evidence": {}, "made": {}, "files": {}, "created": 0}
            connection.execute(insert(edge).values(new_id=V3, old_id=V1, kind="forward", **known))
            connection.execute(insert(edge).values(new_id=V3, old_id=V2, kind="identity", **known))

    def gallery(self, items: int = 10, version_id: int = V1, **new: Any) -> int:
        with self.database.write() as connection:
            row = {"name": f"g{next(NAMES)}", "created": 0.0, "next_seq": 1}
            gallery_id: int = connection.execute(insert(gallery).values(row).returning(gallery.c.id)).scalar_one()
        self.store(gallery_id, [f"i{n}" for n in range(items)], version_id, **new)
        return gallery_id

    def store(self, gallery_id: int, ids: list[str], version_id: int = V1, **new: Any) -> None:
        made = {"metadata": {}, "origin": "encoded", "vector": ONE, "blob": "b", **new}
        with self.database.write() as connection:
            first = take_seq(connection, gallery_id, len(ids))
            store_items(connection, gallery_id, version_id, [NewItem(external_id=i, **made) for i in ids], first)

    def start(
        self,
        gallery_id: int,
        kind: Kind = Kind.REENCODE,
        version_id: int = V2,
        told: ItemScores = NO_SCORES,
        *,
        planned: bool = True,
        **fields: Any,
    ) -> int:
        with self.database.write() as connection:
            row = {
                "gallery_id": gallery_id,
                "version_id": version_id,
                "kind": kind,
                "item_order": "oldest",
                "state": BackfillState.RUNNING,
                "chunk_size": 4,
                "next_claim": 0.0,
                "total": 0,
                "created": 0.0,
                **new_sweep_columns(take_seq(connection, gallery_id, 0)),
                **fields,
            }
            made = BackfillRow(*connection.execute(insert(backfill).values(row).returning(backfill)).one())
        if planned:
            continue_sweep(self.database, made, ORDER, lambda: told)
        return made.id

    def claim(self, owner: str = "w") -> Chunk | None:
        with self.database.write() as connection:
            return leasing.claim(connection, owner, LEASE)

    def read(self, chunk: Chunk) -> list[tuple[int, int]]:
        with self.database.read() as connection:
            return [(row.id, row.seq) for row in chunks.read_contents(connection, chunk)]

    def taken(self, owner: str = "w") -> tuple[Chunk, list[tuple[int, int]]]:
        """The next chunk, which must be there, and what a worker reads of it."""
        chunk = self.claim(owner)
        assert chunk
        return chunk, self.read(chunk)

    def commit(self, chunk: Chunk, moved: list[tuple[int, int]], failed: Any = ()) -> dict[str, int]:
        with self.database.write() as connection:
            made = moved_of(moved)
            return chunks.commit(connection, chunk, made, [Failed(key, seq, "why") for key, seq in failed])

    def finish(self, backfill_id: int) -> BackfillState | None:
        with self.database.write() as connection:
            job = begin_next_sweep(connection, backfill_id)
        return continue_sweep(self.database, job, ORDER, lambda: NO_SCORES) if job else None

    def set_state(self, backfill_id: int, state: BackfillState) -> None:
        with self.database.write() as connection:
            connection.execute(update(backfill).where(backfill.c.id == backfill_id).values(state=state))

    def row(self, backfill_id: int) -> Any:
        with self.database.lookup() as connection:
            return connection.execute(select(backfill).where(backfill.c.id == backfill_id)).one()

    def planned(self, backfill_id: int) -> list[list[str]]:
        """External ids, chunk by chunk."""
        with self.database.lookup() as connection:
            names = dict(tuple(row) for row in connection.execute(select(item.c.id, item.c.external_id)))
            mine = select(backfill_chunk.c.item_ids).where(backfill_chunk.c.backfill_id == backfill_id)
            cut = connection.execute(mine.order_by(backfill_chunk.c.number)).scalars()
            return [[names[key] for key in keys] for keys in cut]

    def items(self, gallery_id: int) -> dict[str, Any]:
        with self.database.lookup() as connection:
            rows = connection.execute(select(item).where(item.c.gallery_id == gallery_id))
            return {row.external_id: row for row in rows}

    def origins(self, gallery_id: int, version_id: int) -> dict[str, str]:
        with self.database.lookup() as connection:
            held = select(item.c.external_id, embedding.c.origin).join(embedding, embedding.c.item_id == item.c.id)
            mine = (item.c.gallery_id == gallery_id, embedding.c.version_id == version_id)
            return {row.external_id: row.origin for row in connection.execute(held.where(*mine))}

    def everything(self) -> list[list[Any]]:
        with self.database.lookup() as connection:
            tables = (gallery, item, embedding, backfill, backfill_chunk, backfill_failure)
            return [list(connection.execute(select(table).order_by(*table.primary_key))) for table in tables]


def flat(planned: list[list[str]]) -> list[str]:
    return list(chain.from_iterable(planned))
