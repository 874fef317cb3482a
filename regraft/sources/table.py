"""`TableFile`: Parquet and Arrow files, exported by Regraft or others with columns of ids and of vectors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from index.errors import InvalidArgument
from regraft.sources.base import NO_ID, Batch, Column, Wanted, as_id, is_id

EXPORTED = b"regraft"
"""A key of the metadata of an export's schema; a gallery without an embedding has no column of vectors."""
VECTOR, ORIGIN = "vector:", "origin:"
"""Prefixes of the names of an export's columns, before the name of the version."""


class TableFile:
    """A Parquet file, or an Arrow file or stream; `after` is the number of rows read."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._path, self._wanted = path, wanted
        with _naming_errors_of(path):
            self._parquet = pq.ParquetFile(path) if path.suffix in (".parquet", ".pq") else None
            self._schema = self._parquet.schema_arrow if self._parquet else _arrow(path).schema
        names = self._schema.names
        self._vectors = wanted.vectors or _own_columns(self._schema, wanted.version, path.name)
        self._id = wanted.id or "id"
        exported = EXPORTED in (self._schema.metadata or {}) or any(name.startswith(VECTOR) for name in names)
        self._own = exported and _holds_text(self._schema, "metadata")
        self._text = wanted.text or ("text" if self._own and "text" in names else None)
        needed = [
            self._id,
            *self._vectors,
            *(wanted.metadata or ()),
            *wanted.flatten,
            *([self._text] if self._text else ()),
        ]
        if unknown := [name for name in needed if name not in names]:
            raise InvalidArgument(f"{path.name} has no column {unknown[0]!r}, only: {', '.join(names)}")
        used = names if wanted.metadata is None and not self._own else needed
        if several := [name for name in used if names.count(name) > 1]:
            raise InvalidArgument(
                f"{path.name} has several columns {several[0]!r}: rename them, or leave them out by --metadata",
                pointer="/metadata",
            )
        if not self._vectors and not self._text:
            raise InvalidArgument(
                f"{path.name}: the column of vectors or texts is required: --vector COLUMN[=VERSION], --text COLUMN"
            )

    @property
    def identity(self) -> str:
        stat = self._path.stat()
        return f"{self._path.resolve()} {stat.st_size} {stat.st_mtime_ns} {self._wanted}"

    @property
    def count(self) -> int | None:
        return int(self._parquet.metadata.num_rows) if self._parquet else None

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        done = int(after or 0)
        with _naming_errors_of(self._path):
            for start, table in self._tables(size, done):
                for at in range(max(done - start, 0), table.num_rows, size):
                    part = table.slice(at, size)
                    yield self._batch(part, start + at + part.num_rows, first=start + at == 0)

    def _tables(self, size: int, after: int) -> Iterator[tuple[int, Any]]:
        """Tables with the number of their first row, without those that end before `after`."""
        if self._parquet is None:
            start, read = 0, (pa.Table.from_batches([batch]) for batch in _arrow(self._path))
        else:
            sizes = [self._parquet.metadata.row_group(n).num_rows for n in range(self._parquet.num_row_groups)]
            gone = sum(end <= after for end in accumulate(sizes))
            groups, start = list(range(gone, len(sizes))), sum(sizes[:gone])
            read = (pa.Table.from_batches([batch]) for batch in self._parquet.iter_batches(size, row_groups=groups))
        for table in read:
            if start + table.num_rows > after:
                yield start, table
            start += table.num_rows

    def _batch(self, table: Any, cursor: int, *, first: bool) -> Batch:
        ids = self._values(table.column(self._id), self._id)
        named = np.array([is_id(one) for one in ids], bool)
        place = np.cumsum(named) - 1
        columns, skipped = [], {NO_ID: int((~named).sum())} if not named.all() else {}
        held: set[int] = set()
        for name, version in self._vectors.items():
            rows, vectors, odd = _matrix(table.column(name), named)
            if len(odd):
                skipped[f"{name}: a vector of another length"] = len(odd)
            held.update(place[rows].tolist(), place[odd].tolist())
            origins = self._origins(table, name, len(ids))[rows]
            for origin in ("supplied", "transformed"):
                mine = origins == (origin == "transformed")
                if mine.any():
                    columns.append(Column(version, place[rows[mine]], vectors[mine], origin))
        kept = [n for n, good in enumerate(named) if good]
        texts = self._values(table.column(self._text), self._text) if self._text else [None] * len(ids)
        held |= {n for n, row in enumerate(kept) if texts[row] is not None}
        if bare := len(kept) - len(held):
            skipped["no vector"] = bare
        metadata = self._metadata(table, first=first)
        described, kept_texts = [metadata[n] for n in kept], [texts[n] for n in kept] if self._text else []
        return Batch(len(ids), [as_id(ids[n]) for n in kept], described, columns, cursor, skipped, kept_texts)

    def _origins(self, table: Any, name: str, count: int) -> Any:
        """Whether the vector of each row was produced by a forward edge."""
        beside = name.replace(VECTOR, ORIGIN, 1)
        if not name.startswith(VECTOR) or beside not in table.column_names:
            return np.zeros(count, bool)
        return np.array([one == "transformed" for one in table.column(beside).to_pylist()], bool)

    def _metadata(self, table: Any, *, first: bool) -> list[Any]:
        if self._own and self._wanted.metadata is None:
            return [None if one is None else json.loads(one) for one in table.column("metadata").to_pylist()]
        taken = (self._id, *self._vectors, *([self._text] if self._text else ()))
        names = (
            [n for n in table.column_names if n not in taken]
            if self._wanted.metadata is None
            else [*self._wanted.metadata, *self._wanted.flatten]
        )
        columns = {name: self._values(_in_microseconds(table.column(name)), name) for name in names}
        rows = [{name: values[n] for name, values in columns.items()} for n in range(table.num_rows)]
        if first:
            self._wanted.check_flatten(rows)
        return [self._wanted.metadata_of(row, *taken) for row in rows]

    def _values(self, column: Any, name: str) -> list[Any]:
        """The values of a column. Raises InvalidArgument for those that Python has not, such as a date after 9999."""
        try:
            return list(column.to_pylist(maps_as_pydicts="lossy"))
        except (ValueError, OverflowError, pa.ArrowException) as error:  # ValueError: also text that is not UTF-8
            raise InvalidArgument(
                f"{self._path.name}: a value of column {name!r} cannot be read: {error}", pointer="/metadata"
            ) from error


@contextmanager
def _naming_errors_of(path: Path) -> Iterator[None]:
    """Convert Arrow's errors about an empty, truncated or foreign file to one that names the file."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{path} cannot be opened by Arrow, because the path is not UTF-8: rename it") from error
    except (pa.ArrowException, OSError) as error:  # OSError: a corrupt page
        raise InvalidArgument(f"{path.name} is not a {path.suffix} file, or is damaged: {error}") from error


def _in_microseconds(column: Any) -> Any:
    """A column of times in the unit of Python's own, which need no pandas; other columns unchanged."""
    kind, unit = column.type, "us"
    if getattr(kind, "unit", None) != "ns":
        return column
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp(unit, kind.tz), safe=False)
    return column.cast(pa.time64(unit) if pa.types.is_time64(kind) else pa.duration(unit), safe=False)


def _holds_text(schema: Any, name: str) -> bool:
    return name in schema.names and not pa.types.is_nested(schema.field(name).type)


def _own_columns(schema: Any, version: str | None, file: str) -> dict[str, str | None]:
    """Column -> version of the vectors in an export; in other files of the column `embedding` or `vector`.

    Raises:
        InvalidArgument: the file has both.
    """
    own: dict[str, str | None] = {n: n.removeprefix(VECTOR) for n in schema.names if n.startswith(VECTOR)}
    usual = [name for name in ("embedding", "vector") if name in schema.names]
    lists = [name for name in usual if _is_list(schema.field(name).type)]
    if not own and len(lists) > 1:
        raise InvalidArgument(f"{file} has vectors in {' and '.join(lists)}: name one by --vector", pointer="/vector")
    return own or dict.fromkeys((lists or usual)[:1], version)


def _is_list(kind: Any) -> bool:
    return any(one(kind) for one in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _arrow(path: Path) -> Any:
    """A reader of the record batches of an Arrow file or stream; it has a `schema`."""
    mapped = pa.memory_map(str(path))
    if mapped.read(6) == b"ARROW1":
        reader = pa.ipc.open_file(mapped)
        return pa.RecordBatchReader.from_batches(
            reader.schema, (reader.get_batch(n) for n in range(reader.num_record_batches))
        )
    mapped.seek(0)
    return pa.ipc.open_stream(mapped)


def _matrix(column: Any, named: Any) -> tuple[Any, Any, Any]:
    """Of the rows with an id: those with a vector (M,), their vectors (M, D), and those of another length."""
    array = column.combine_chunks() if not isinstance(column, pa.ChunkedArray) else pa.concat_arrays(column.chunks)
    if not _is_list(array.type):
        raise InvalidArgument(f"a column of vectors must have lists of numbers, not {array.type}")
    lengths = np.array([n or 0 for n in pc.list_value_length(array).to_pylist()], np.int64)
    there = np.flatnonzero((lengths > 0) & named)
    if not len(there):
        return there, np.empty((0, 0), np.float32), there
    ((dim, _),) = Counter(lengths[there].tolist()).most_common(1)
    rows = there[lengths[there] == dim]
    numbers = pc.list_flatten(array.take(pa.array(rows)))
    flat = numbers.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)  # integers may be rounded
    return rows, flat.reshape(len(rows), dim), there[lengths[there] != dim]
