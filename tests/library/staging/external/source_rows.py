"""What a source gives, read to its end: `read`; and whether it gives all of `fake_databases.ROWS`: `check`."""

from __future__ import annotations

import json
from typing import Any

from regraft.sources.base import ItemSource
from staging.external.fake_databases import IDS, ROWS


def read(source: ItemSource, after: Any = None) -> tuple[list[str], list[list[float]], list[Any], list[Any]]:
    """Ids, vectors, metadata and cursors behind `after`, in batches of three."""
    batches = list(source.batches(3, after))
    vectors = [row for batch in batches for row in batch.columns[0].vectors.tolist()]
    ids = [i for batch in batches for i in batch.ids]
    metadata = [about for batch in batches for about in batch.metadata]
    return ids, vectors, metadata, [json.loads(json.dumps(batch.cursor)) for batch in batches]


def check(source: ItemSource, wanted: list[Any]) -> None:
    """All rows are there, whole and behind any cursor, with the `wanted` metadata."""
    ids, vectors, metadata, cursors = read(source)
    assert (ids, vectors, metadata) == (IDS, ROWS.tolist(), wanted)
    assert source.count in (10, None)
    for cursor in cursors[:-1]:
        rest = read(source, cursor)
        assert rest[0] == IDS[-len(rest[0]) :]
    assert read(source, cursors[1])[0] == IDS[len(ids) - len(read(source, cursors[1])[0]) :]
    assert source.identity
