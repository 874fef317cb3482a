"""Engines elsewhere: rows of galleries that are not there, and rows there that the database knows nothing of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
from sqlalchemy import Connection

from index.engines.base import Keys
from index.engines.remote import Collection, EngineUnavailable, held_there, metric_of
from index.errors import InvalidArgument
from index.query_plan import ShardKey
from index.space import Space, space_from_json
from service.doctor.findings import Context, Finding
from service.registry.registry import Registry
from service.replica.engine_writer import write_block
from service.replica.engines import Engines, name_of
from service.replica.feed import sort
from service.store.contents import contents
from service.store.repository import feed_of, index_of
from service.store.rows import GalleryRow

Wanted = dict[ShardKey, list[tuple[Keys, Keys, Keys]]]
"""By version and origin blocks of keys, digests and numbers, each (N,)."""


def check(context: Context, fix: bool) -> list[Finding]:
    """`engine_away`, `engine_rows_missing`, `engine_rows_unknown`."""
    away = Finding(
        "engine_away", "error", "engines that galleries lie in do not answer", "nothing is lost; start the engine"
    )
    missing = Finding(
        "engine_rows_missing",
        "error",
        "vectors are not in the engine that they were brought to, or are others there",
        "--fix writes them again",
        fixable=True,
    )
    unknown = Finding(
        "engine_rows_unknown",
        "info",
        "rows in engines are of no item that is there: they are never shown",
        "--fix removes them",
        fixable=True,
    )
    with closing(Engines(context.settings)) as engines:
        for row in context.galleries():
            if index_of(row).kind.elsewhere:
                try:
                    _Examined(context, engines, row).compare(missing, unknown, fix=fix)
                except (EngineUnavailable, InvalidArgument) as error:
                    away.add(f"{row.name}: {error.message}")
    return [away, missing, unknown]


class _Examined:
    """One gallery beside its collections."""

    def __init__(self, context: Context, engines: Engines, row: GalleryRow) -> None:
        self._registry: Registry = context.registry
        self._database, self._row, self._kind = context.database, row, index_of(row).kind
        self._engine, self._open = engines.get(self._kind), partial(engines.of(row), self._kind)

    def compare(self, missing: Finding, unknown: Finding, *, fix: bool) -> None:
        with self._database.read() as connection:
            wanted = self._wanted(connection)
            versions = {version.name for version in self._registry.all()}  # others were deleted, and are swept
            there = {place for place in self._engine.places(name_of(self._row)) if place[0] in versions}
            for place in sorted({*wanted, *there}):
                collection, space = self._collection(place)
                blocks = wanted.get(place, [])
                lost = list(_lost(collection, blocks))
                strays = list(
                    _strays(collection, np.concatenate([np.empty(0, np.int64), *(keys for keys, *_ in blocks)]))
                )
                for finding, parts in ((missing, [len(part) for part in lost]), (unknown, [len(s[0]) for s in strays])):
                    if sum(parts):
                        finding.add(f"{self._row.name}: {sum(parts)} of {'/'.join(place)}", sum(parts))
                        finding.fixed += sum(parts) if fix else 0
                for keys, numbers in strays if fix else ():
                    collection.delete(keys, numbers)
                for keys in lost if fix else ():
                    self._write_again(connection, collection, place, space, keys)

    def _wanted(self, connection: Connection) -> Wanted:
        """What the database holds."""
        found: Wanted = {}
        for block in contents(connection, self._row.id, lambda number: self._registry.by_id(number).name):
            for place, (items, digests) in block.held.items():
                found.setdefault(place, []).append((block.keys_N[items], digests, block.seqs_N[items]))
        return found

    def _collection(self, place: ShardKey) -> tuple[Collection, Space]:
        card = self._registry.named(place[0]).card
        space = space_from_json(dict(card.space))
        return self._open(place, space.width(card.dim), metric_of(space)), space

    def _write_again(
        self, connection: Connection, collection: Collection, place: ShardKey, space: Space, keys: Keys
    ) -> None:
        for block in feed_of(connection, self._row.id, keys.tolist()):
            mine = np.array(sorted({row[0] for row in block}))
            found = collection.entries(mine)  # of the same number, so that they would stay
            collection.delete(found.keys_N, found.numbers_N)
            write_block(collection, place, space, block, sort(self._registry, [block]))


def _lost(collection: Collection, blocks: list[tuple[Keys, Keys, Keys]]) -> Iterator[Keys]:
    """Of what the collection covers the keys that it does not have as they are."""
    covers = collection.covers()
    for block in blocks:
        due = block[2] <= covers
        keys, digests, numbers = (column[due] for column in block)
        held = held_there(collection, keys, digests, numbers)
        if not held.all():
            yield keys[~held]


def _strays(collection: Collection, known: Keys) -> Iterator[tuple[Keys, Keys]]:
    """Keys that it has and nobody knows, and their numbers."""
    after = -1
    while len((found := collection.listed(after, collection.capabilities.max_rows)).keys_N):
        stray = ~np.isin(found.keys_N, known) & (found.numbers_N <= collection.covers())
        if stray.any():
            yield found.keys_N[stray], found.numbers_N[stray]
        after = int(found.keys_N[-1])
