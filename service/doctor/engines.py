"""Engines elsewhere: rows of galleries that are not there, and rows there that the database knows nothing of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
from sqlalchemy import Connection

from index.contents import Contents, ShardColumns
from index.engines.base import Keys
from index.engines.remote import Collection, EngineUnavailable, find_up_to_date, metric_of
from index.errors import InvalidArgument
from index.space import Space, space_from_json
from index.version import ShardKey
from service.doctor.findings import Context, Finding
from service.registry.registry import Registry
from service.replica.engine_writer import write_block
from service.replica.engines import Engines, name_of
from service.replica.feed import gather_changes
from service.store.contents import contents
from service.store.repository import feed_of, index_of
from service.store.rows import GalleryRow

Range = tuple[int, int | None]
"""Keys behind the one and up to the other; None: all behind."""
NONE = np.empty(0, np.int64)


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
            if index_of(row).kind.is_remote:
                try:
                    _Examined(context, engines, row, fix=fix).compare(missing, unknown)
                except (EngineUnavailable, InvalidArgument) as error:
                    away.add(f"{row.name}: {error.message}")
    return [away, missing, unknown]


class _Examined:
    """One gallery beside its collections."""

    def __init__(self, context: Context, engines: Engines, row: GalleryRow, *, fix: bool) -> None:
        self._registry: Registry = context.registry
        self._database, self._row, self._kind, self._fix = context.database, row, index_of(row).kind, fix
        self._engine, self._open = engines.get(self._kind), partial(engines.of(row), self._kind)
        self._collections: dict[ShardKey, tuple[Collection, Space]] = {}
        self._missing: Counter[ShardKey] = Counter()
        self._unknown: Counter[ShardKey] = Counter()

    def compare(self, missing: Finding, unknown: Finding) -> None:
        """Go through both, some keys at a time."""
        versions = {version.name for version in self._registry.all()}  # others were deleted, and are swept
        places = {place for place in self._engine.places(name_of(self._row)) if place[0] in versions}
        behind = -1
        with self._database.read() as connection:
            for block in contents(connection, self._row.id, lambda number: self._registry.by_id(number).name):
                last, places = int(block.keys_N[-1]), places | set(block.embeddings)
                for place in sorted(places):
                    self._compare_some(connection, place, block, (behind, last))
                behind = last
        for place in sorted(places):
            self._sweep(place, NONE, (behind, None))
        for finding, counted in ((missing, self._missing), (unknown, self._unknown)):
            for place, count in sorted((+counted).items()):
                finding.add(f"{self._row.name}: {count} of {'/'.join(place)}", count)
                finding.fixed += count if self._fix else 0

    def _compare_some(self, connection: Connection, place: ShardKey, block: Contents, keys: Range) -> None:
        items, digests = block.embeddings.get(place, ShardColumns(NONE, NONE))
        known = block.keys_N[items]
        self._sweep(place, known, keys)
        lost = _lost(self._collection(place)[0], known, digests, block.seqs_N[items])
        self._missing[place] += len(lost)
        if self._fix and len(lost):
            self._write_again(connection, place, lost)

    def _sweep(self, place: ShardKey, known: Keys, among: Range) -> None:
        """Count what nobody knows, and remove it if it is to be mended."""
        collection = self._collection(place)[0]
        for keys, numbers in _strays(collection, known, among):
            self._unknown[place] += len(keys)
            if self._fix:
                collection.delete(keys, numbers)

    def _collection(self, place: ShardKey) -> tuple[Collection, Space]:
        if place not in self._collections:
            card = self._registry.named(place[0]).card
            space = space_from_json(dict(card.space))
            self._collections[place] = self._open(place, space.width(card.dim), metric_of(space)), space
        return self._collections[place]

    def _write_again(self, connection: Connection, place: ShardKey, keys: Keys) -> None:
        collection, space = self._collection(place)
        for block in feed_of(connection, self._row.id, keys.tolist()):
            mine = np.array(sorted({row[0] for row in block}))
            found = collection.entries(mine)  # of the same number, so that they would stay
            collection.delete(found.keys_N, found.seqs_N)
            write_block(collection, place, space, block, gather_changes(self._registry, [block]))


def _lost(collection: Collection, keys: Keys, digests: Keys, numbers: Keys) -> Keys:
    """Of what the collection covers the keys that it does not have as they are."""
    due = numbers <= collection.covered_seq()
    keys, digests, numbers = (column[due] for column in (keys, digests, numbers))
    return keys[~find_up_to_date(collection, keys, digests, numbers)]


def _strays(collection: Collection, known: Keys, among: Range) -> Iterator[tuple[Keys, Keys]]:
    """Of a range the keys that it has and nobody knows, and their numbers."""
    after, last = among
    while len((found := collection.listed(after, collection.capabilities.max_rows)).keys_N):
        mine = np.full(len(found.keys_N), True) if last is None else found.keys_N <= last
        stray = mine & ~np.isin(found.keys_N, known) & (found.seqs_N <= collection.covered_seq())
        if stray.any():
            yield found.keys_N[stray], found.seqs_N[stray]
        if not mine.all():
            return
        after = int(found.keys_N[-1])
