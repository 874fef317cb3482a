"""The sample of a gate whose evaluation set names relevant items: its entries are queries, the items are the gallery's.

Named items come first on the gallery side, so that a sample of a large gallery holds them too. Shapes: Q queries, K
relevant items of the query that has most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, false, select

from index.errors import InvalidArgument
from service.store.sql.arrays import blocks
from service.store.tables import item
from service.upgrades.gates.samples import READ_BLOCK, Entry, QuerySide, Sample


def check_no_label(label: str | None) -> None:
    """Raise InvalidArgument if a request for such a set gives a `label`, which would be a second truth."""
    if label is not None:
        raise InvalidArgument("the evaluation set has relevant items: omit label", pointer="/label")


def live_keys(connection: Connection, gallery_id: int, entries: Sequence[Entry]) -> dict[str, int]:
    """The keys of existing items that entries name as relevant, by id, in the order named."""
    named = list(dict.fromkeys(name for entry in entries for name in entry.relevant))
    found: dict[str, int] = {}
    for block in blocks(named, READ_BLOCK):
        live = (item.c.gallery_id == gallery_id, item.c.deleted == false(), item.c.external_id.in_(block))
        found |= {
            row.external_id: row.id for row in connection.execute(select(item.c.external_id, item.c.id).where(*live))
        }
    return {name: found[name] for name in named if name in found}


def relevant_numbers(entries: Sequence[Entry], number_of: Mapping[str, int]) -> NDArray[np.int64]:
    """(Q, K) the numbers of each entry's existing relevant items, padded with -1."""
    listed = [sorted({number_of[name] for name in entry.relevant if name in number_of}) for entry in entries]
    relevant = np.full((len(listed), max(map(len, listed), default=0)), -1)
    for row, numbers in enumerate(listed):
        relevant[row, : len(numbers)] = numbers
    return relevant


def with_queries(queries: Sample, items: Sample) -> Sample:
    """The gallery side `items` with the embedded entries of an evaluation set, `queries`, as its queries."""
    number_of = {entry.name: number for number, entry in enumerate(items.entries)}
    named = {name for entry in queries.entries for name in entry.relevant}
    vectors = {name: found.vectors for name, found in queries.embedded.items()}
    relevant = relevant_numbers(queries.entries, number_of)
    return replace(
        items,
        query_side=QuerySide(queries.entries, vectors, relevant, len(named - number_of.keys())),
        labels=None,
        slices=queries.slices,
        latency_ms=queries.latency_ms,
        unreadable=queries.unreadable,
        queries=len(queries),
        exhaustive=items.whole,
    )
