"""Check external engines: missing rows of galleries, and rows of no item in the database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
from sqlalchemy import Connection

from index.contents import Contents, ShardColumns
from index.engines.base import Keys
from index.engines.remote.base import Collection, EngineUnavailable, find_up_to_date, metric_of
from index.errors import InvalidArgument
from index.space import Space, space_from_json
from index.version import ShardKey
from service.doctor.findings import Context, Finding
from service.registry.registry import Registry
from service.replica.engine_writer import write_block
from service.replica.engines import Engines, name_of
from service.replica.feed import gather_changes
from service.store.galleries.change_feed import feed_of
from service.store.galleries.contents import gallery_contents
from service.store.galleries.gallery import index_of
from service.store.rows import GalleryRow

Range = tuple[int, int | None]
"""Keys above the first and up to the second; None: no upper limit."""
NO_KEYS = np.empty(0, np.int64)


def check(context: Context, fix: bool) -> list[Finding]:
    """`engine_away`, `engine_rows_missing`, `engine_rows_unknown`."""
    away = Finding("engine_away", "error", "engines of galleries do not answer", "nothing is lost; start the engine")
    missing = Finding(
        "engine_rows_missing",
        "error",
        "vectors are missing in their engine or differ there",
        "--fix writes them again",
        fixable=True,
    )
    unknown = Finding(
        "engine_rows_unknown",
        "info",
        "rows in engines belong to no existing item; queries never return them",
        "--fix removes them",
        fixable=True,
    )
    with closing(Engines(context.settings)) as engines:
        for row in context.galleries():
            if index_of(row).kind.is_remote:
                try:
                    _Comparison(context, engines, row, fix=fix).compare(missing, unknown)
                except (EngineUnavailable, InvalidArgument) as error:
                    away.add(f"{row.name}: {error.message}")
    return [away, missing, unknown]


class _Comparison:
    """Compares one gallery with its collections."""

    def __init__(self, context: Context, engines: Engines, row: GalleryRow, *, fix: bool) -> None:
        self._registry: Registry = context.registry
        self._database, self._row, self._kind, self._fix = context.database, row, index_of(row).kind, fix
        self._engine, self._open = engines.get(self._kind), partial(engines.of(row), self._kind)
        self._collections: dict[ShardKey, tuple[Collection, Space]] = {}
        self._missing: Counter[ShardKey] = Counter()
        self._unknown: Counter[ShardKey] = Counter()

    def compare(self, missing: Finding, unknown: Finding) -> None:
        """Compare both in blocks of keys."""
        versions = {version.name for version in self._registry.all()}  # the service sweeps others, of deleted versions
        places = {place for place in self._engine.places(name_of(self._row)) if place[0] in versions}
        after = -1
        with self._database.read() as connection:
            for block in gallery_contents(connection, self._row.id, lambda number: self._registry.by_id(number).name):
                last, places = int(block.keys_N[-1]), places | set(block.embeddings)
                for place in sorted(places):
                    self._compare_block(connection, place, block, (after, last))
                after = last
        for place in sorted(places):
            self._sweep(place, NO_KEYS, (after, None))
        for finding, counted in ((missing, self._missing), (unknown, self._unknown)):
            for place, count in sorted((+counted).items()):
                finding.add(f"{self._row.name}: {count} of {'/'.join(place)}", count)
                finding.fixed += count if self._fix else 0

    def _compare_block(self, connection: Connection, place: ShardKey, block: Contents, keys: Range) -> None:
        items, digests = block.embeddings.get(place, ShardColumns(NO_KEYS, NO_KEYS))
        known = block.keys_N[items]
        self._sweep(place, known, keys)
        missing = _missing_keys(self._collection(place)[0], known, digests, block.seqs_N[items])
        self._missing[place] += len(missing)
        if self._fix and len(missing):
            self._rewrite(connection, place, missing)

    def _sweep(self, place: ShardKey, known: Keys, key_range: Range) -> None:
        """Count rows of no item; with `fix`, remove them."""
        collection = self._collection(place)[0]
        for keys, seqs in _unknown_rows(collection, known, key_range):
            self._unknown[place] += len(keys)
            if self._fix:
                collection.delete(keys, seqs)

    def _collection(self, place: ShardKey) -> tuple[Collection, Space]:
        if place not in self._collections:
            card = self._registry.named(place[0]).card
            space = space_from_json(dict(card.space))
            self._collections[place] = self._open(place, space.width(card.dim), metric_of(space)), space
        return self._collections[place]

    def _rewrite(self, connection: Connection, place: ShardKey, keys: Keys) -> None:
        collection, space = self._collection(place)
        for block in feed_of(connection, self._row.id, keys.tolist()):
            block_keys = np.array(sorted({row[0] for row in block}))
            entries = collection.entries(block_keys)  # deletions need the rows' own feed numbers to take effect
            collection.delete(entries.keys_N, entries.seqs_N)
            write_block(collection, place, space, block, gather_changes(self._registry, [block]))


def _missing_keys(collection: Collection, keys: Keys, digests: Keys, seqs: Keys) -> Keys:
    """The keys whose rows the collection covers but lacks, or has with another vector."""
    covered = seqs <= collection.covered_seq()
    keys, digests, seqs = (column[covered] for column in (keys, digests, seqs))
    return keys[~find_up_to_date(collection, keys, digests, seqs)]


def _unknown_rows(collection: Collection, known: Keys, key_range: Range) -> Iterator[tuple[Keys, Keys]]:
    """The rows of no item in a range of a collection, in blocks: keys and feed numbers."""
    after, last = key_range
    while len((listed := collection.listed(after, collection.capabilities.max_rows)).keys_N):
        in_range = np.full(len(listed.keys_N), True) if last is None else listed.keys_N <= last
        unknown = in_range & ~np.isin(listed.keys_N, known) & (listed.seqs_N <= collection.covered_seq())
        if unknown.any():
            yield listed.keys_N[unknown], listed.seqs_N[unknown]
        if not in_range.all():
            return
        after = int(listed.keys_N[-1])
