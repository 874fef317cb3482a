"""`LanceTable`: a table of LanceDB, read page by page by LanceDB's client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lancedb
import pyarrow as pa

from regraft.sources.base import Batch, Wanted, batch_of, display_address


class LanceTable:
    """Rows of a table; `after` is the number of rows read."""

    def __init__(self, address: str, table: str, wanted: Wanted) -> None:
        self._identity, self._wanted = (
            f"lancedb {display_address(address)} {table}",
            replace(wanted, id=wanted.id or "id"),
        )
        self._table = lancedb.connect(address).open_table(table)
        self._vectors = [field.name for field in self._table.schema if _is_vector(field.type)]
        # A list of any length may hold vectors as well, by its name.
        named = [name for name in wanted.vectors or ("vector",) if name in self.fields]
        self._vector, self._version = wanted.vector_of(named or self._vectors, table)

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def count(self) -> int:
        return int(self._table.count_rows())

    @property
    def metrics(self) -> Mapping[str | None, str]:
        return {}  # the metric belongs to queries, not to the table

    @property
    def fields(self) -> Sequence[str]:
        return list(self._table.schema.names)

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        at = int(after or 0)
        while rows := self._table.search().limit(size).offset(at).to_list():
            if at == 0:
                self._wanted.check_first(rows)
            at += len(rows)
            # A vector is no metadata, unless it is asked for.
            taken = (str(self._wanted.id), self._vector, *self._vectors)
            metadata = [self._wanted.metadata_of(row, *taken) for row in rows]
            ids, vectors = self._wanted.ids_of(rows, ()), [row.get(self._vector) for row in rows]
            given = list(zip(ids, vectors, metadata, strict=True))
            yield batch_of(given, self._version, at, self._wanted.texts_of(rows))


def _is_vector(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind) and pa.types.is_floating(kind.value_type))
