"""The interface of a source of items (`ItemSource`): batches of rows, each with a cursor to continue after it.

Shapes: N rows of a batch, D the dimension of their vectors.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from index.errors import InvalidArgument

Vectors = NDArray[Any]
NO_ID = "no id"
"""The reason to skip a row without an id."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control characters, which no text contains."""


@dataclass(frozen=True)
class Column:
    """Vectors of some rows of a batch: `rows` (M,) are the positions of these rows, `vectors` is (M, D).

    `version` None: the gallery's current one. `origin`: `supplied`, or `transformed` if produced by a forward edge.
    """

    version: str | None
    rows: NDArray[np.int64]
    vectors: Vectors
    origin: str = "supplied"

    def take(self, places: Sequence[int] | NDArray[np.int64] | slice) -> Column:
        """Some of its rows."""
        return replace(self, rows=self.rows[places], vectors=self.vectors[places])


@dataclass(frozen=True)
class Batch:
    """The next `read` rows of a source without skipped ones: ids, metadata (None: not given) and vectors.

    `cursor`: the argument of `batches` to continue after them. `skipped`: reason -> number of skipped rows. `texts`:
    the text of each row or None; empty if no row has one. A row with a text may have no vector.
    """

    read: int
    ids: Sequence[str]
    metadata: Sequence[Mapping[str, Any] | None]
    columns: Sequence[Column]
    cursor: Any
    skipped: Mapping[str, int] = field(default_factory=dict)
    texts: Sequence[str | None] = ()

    def take(self, rows: Sequence[int]) -> Batch:
        """Some of its rows, in ascending order."""
        columns = []
        for column in self.columns:
            kept = column.take(np.flatnonzero(np.isin(column.rows, rows)))
            columns.append(replace(kept, rows=np.searchsorted(rows, kept.rows)))
        ids, metadata = [self.ids[row] for row in rows], [self.metadata[row] for row in rows]
        texts = [self.texts[row] for row in rows] if self.texts else ()
        return replace(self, ids=ids, metadata=metadata, columns=columns, texts=texts)


class ItemSource(Protocol):
    """Rows to be imported, always in the same order."""

    @property
    def identity(self) -> str:
        """Identifies the source, to check that a resumed import reads the same one."""

    @property
    def count(self) -> int | None:
        """The number of rows; None: unknown."""

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        """Batches of up to `size` rows, from the start or after a cursor."""


class Database(ItemSource, Protocol):
    """Rows of another database."""

    @property
    def metrics(self) -> Mapping[str | None, str]:
        """Version -> the metric of its vectors, as named by the database, if it has one."""

    @property
    def fields(self) -> Collection[str] | None:
        """The names of all fields that rows can have; None: the database does not know them."""


@dataclass(frozen=True)
class Wanted:
    """The columns of a source to import.

    `id`: the column of ids. `vectors`: column -> version (None: the current one); empty: the source's default column,
    of `version`. `metadata`: columns; None: all others. `text`: the column of texts; None: none. `flatten`: columns of
    objects whose fields become metadata in place of the column, as frameworks nest the metadata of a document.
    """

    id: str | None = None
    vectors: Mapping[str, str | None] = field(default_factory=dict)
    metadata: Sequence[str] | None = None
    version: str | None = None
    text: str | None = None
    flatten: Sequence[str] = ()

    def vector(self, default: str) -> tuple[str, str | None]:
        """The column of vectors and its version, for a source that supports one column per import.

        Raises:
            InvalidArgument: several columns are wanted.
        """
        if len(self.vectors) > 1:
            why = "this source reads one column of vectors per import: import the others afterwards with --update-only"
            raise InvalidArgument(why, pointer="/vector")
        return next(iter(self.vectors.items())) if self.vectors else (default, self.version)

    def vector_of(self, there: Sequence[str], collection: str) -> tuple[str, str | None]:
        """The field of vectors, of those `there`, and its version; by default `vector`, or the only one.

        Raises:
            InvalidArgument: several fields are wanted, or an unknown one.
        """
        name, version = self.vector(there[0] if len(there) == 1 else "vector")
        if name not in there:
            legal = ", ".join(there) or "none"
            raise InvalidArgument(f"{collection} has no vector {name!r}, only: {legal}", pointer="/vector")
        return name, version

    def named_vectors(self, there: Collection[str], collection: str) -> Mapping[str, str | None]:
        """Name -> version of the wanted vectors of a collection with named vectors; by default its first one.

        Raises:
            InvalidArgument: an unknown name.
        """
        if unknown := [name for name in self.vectors if name not in there]:
            legal = ", ".join(there) or "none"
            raise InvalidArgument(f"{collection} has no vector {unknown[0]!r}, only: {legal}", pointer="/vector")
        return self.vectors or dict.fromkeys(list(there)[:1], self.version)

    def check_first(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Check that some of the first rows of a database have the wanted id, text and objects to flatten.

        Raises:
            InvalidArgument: none of them has one of these.
        """
        if self.id is not None and not any(self.id in row for row in rows):
            there = ", ".join(sorted({name for row in rows for name in row}))
            why = f"none of the first {len(rows)} rows has a field {self.id!r}; fields: {there or 'none'}"
            raise InvalidArgument(why, pointer="/id")
        if self.text is not None and not any(self.text in row for row in rows):
            there = ", ".join(sorted({name for row in rows for name, held in row.items() if isinstance(held, str)}))
            why = f"none of the first {len(rows)} rows has a field {self.text!r}; fields of texts: {there or 'none'}"
            raise InvalidArgument(why, pointer="/text")
        self.check_flatten(rows)

    def check_flatten(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Check that some of the first rows of a source have an object in each field to flatten.

        Raises:
            InvalidArgument: none of them.
        """
        there = sorted({name for row in rows for name, value in row.items() if isinstance(value, Mapping)})
        for name in self.flatten:
            held = [row[name] for row in rows if name in row]
            if (any(one is not None for one in held) or not held) and name not in there:
                legal = ", ".join(there) or "none"
                why = f"none of the first {len(rows)} rows has an object in {name!r}; objects: {legal}"
                raise InvalidArgument(why, pointer="/flatten")

    def ids_of(self, rows: Sequence[Mapping[str, Any]], own: Sequence[Any]) -> Sequence[Any]:
        """The ids of rows of a database: the field `self.id` (None if a row lacks it), by default the `own` ids."""
        return own if self.id is None else [row.get(self.id) for row in rows]

    def metadata_of(self, row: Mapping[str, Any], *taken: str) -> dict[str, Any] | None:
        """The metadata of a row, without its text and the `taken` columns; None: no columns are left."""
        taken = (*taken, self.text) if self.text is not None else taken
        names = [name for name in row if name not in taken] if self.metadata is None else self.metadata
        if not names and not self.flatten:
            return None
        held = {name: row.get(name) for name in (*names, *self.flatten)}
        for name in self.flatten:
            if isinstance(fields := held[name], Mapping):  # what is not an object stays a field of its own
                del held[name]
                held.update(fields)
        return {str(name): as_json(value) for name, value in held.items() if value is not None}

    def texts_of(self, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """The texts of rows of a database; empty if none are wanted.

        Raises:
            InvalidArgument: a value is not a string.
        """
        if self.text is None:
            return []
        found = [row.get(self.text) for row in rows]
        if odd := [one for one in found if not isinstance(one, str | None)]:
            why = f"{self.text!r} must be a text, not {type(odd[0]).__name__}"
            raise InvalidArgument(why, pointer="/text")
        return found


def as_json(value: Any) -> Any:
    """A value of metadata as JSON: NumPy values become plain ones, NaN null, UUIDs and other types text.

    Dates and times become text in ISO 8601, which filters can compare.
    """
    if isinstance(value, Mapping):
        return {str(name): as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [as_json(one) for one in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return _text_of(bytes(value))
    if isinstance(value, date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return as_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)


def is_id(value: Any) -> bool:
    """Whether a value is an id; NaN stands for a missing number, as of pandas."""
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def as_id(value: Any) -> str:
    """An id as text."""
    content = value.tobytes() if isinstance(value, np.void) else value
    return _text_of(content) if isinstance(content, bytes) else str(content)


def _text_of(content: bytes) -> str:
    """Bytes as UTF-8 text, else as hexadecimal digits, such as of a UUID."""
    try:
        text = content.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return content.hex()
    # Some sixty of a million UUIDs are valid UTF-8 by chance, but nearly all of these have control characters.
    return content.hex() if CONTROL.search(text) else text


def display_address(address: str) -> str:
    """The address of a database for `identity` and messages: the full path of a folder, a URL without credentials."""
    if "://" not in address:
        return str(Path(address).resolve())
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def batch_of(
    rows: Sequence[tuple[Any, Any, Mapping[str, Any] | None]],
    version: str | None,
    cursor: Any,
    texts: Sequence[str | None] = (),
) -> Batch:
    """A batch of rows (id, vector or None, metadata); see `batch_of_columns`."""
    ids, vectors, metadata = zip(*rows, strict=True)
    return batch_of_columns(ids, metadata, [(version, vectors)], cursor, texts)


def batch_of_columns(
    ids: Sequence[Any],
    metadata: Sequence[Mapping[str, Any] | None],
    columns: Sequence[tuple[str | None, Sequence[Any]]],
    cursor: Any,
    texts: Sequence[str | None] = (),
) -> Batch:
    """A batch of rows with vectors of several versions: each column has a vector or None per row.

    Skips rows without an id, rows without any vector or text, and vectors whose length differs from most of the column.

    Raises:
        InvalidArgument: a vector is not of numbers.
    """
    named = [is_id(one) for one in ids]
    given = [
        (version, [one if good else None for one, good in zip(vectors, named, strict=True)])
        for version, vectors in columns
    ]
    found = [_of_one_length(vectors) for _, vectors in given]
    with_text = {n for n, text in enumerate(texts) if text is not None and named[n]}
    held = sorted(with_text.union(*(rows for rows, _ in found)))
    place = {row: n for n, row in enumerate(held)}
    bare = (n for n, good in enumerate(named) if good and n not in with_text)
    missing = sum(all(vectors[n] is None for _, vectors in given) for n in bare)
    odd = sum(one is not None for _, vectors in given for one in vectors) - sum(len(rows) for rows, _ in found)
    counts = ((NO_ID, named.count(False)), ("no vector", missing), ("a vector of another length", odd))
    made = [
        Column(version, np.array([place[row] for row in rows]), vectors)
        for (version, _), (rows, vectors) in zip(given, found, strict=True)
        if rows
    ]
    skipped = {why: count for why, count in counts if count}
    kept = [texts[n] for n in held] if texts else []
    return Batch(len(ids), [as_id(ids[n]) for n in held], [metadata[n] for n in held], made, cursor, skipped, kept)


def _of_one_length(vectors: Sequence[Any]) -> tuple[list[int], Vectors]:
    """The rows whose vectors have the most common length, and these vectors (M, D)."""
    try:
        arrays = {n: np.asarray(one, np.float32) for n, one in enumerate(vectors) if one is not None}
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"a vector must be a list of numbers: {error}") from error
    shapes = Counter(one.shape for one in arrays.values() if one.ndim == 1).most_common(1)
    kept = [n for n, one in arrays.items() if shapes and one.shape == shapes[0][0]]
    return kept, np.stack([arrays[n] for n in kept]) if kept else np.empty((0, 0), np.float32)
