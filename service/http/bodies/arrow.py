"""Arrow IPC streams as bodies of requests and responses: one table of flat, uncompressed columns.

Requests are not trusted: the memory that pyarrow takes for a batch is bounded by the bytes received, because
compressed buffers, and columns that take no bytes, are refused before they are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from index.errors import pointer_to
from service.errors import BodyTooLarge, InvalidBody
from service.http.bodies.media_types import UnsupportedMediaType, type_of
from service.store.sql.arrays import to_json

if TYPE_CHECKING:
    import pyarrow as pa

ARROW = "application/vnd.apache.arrow.stream"
ID, EMBEDDING = "id", "embedding"
"""Columns; in a table of items, every other column is a metadata field."""
# Numbers of fields in tables of Message.fbs, a flatbuffer.
HEADER, BATCH_COMPRESSION = 2, 3
MATCH = ("id", "score", "raw_score", "version", "origin")


def pyarrow() -> Any:
    """Import pyarrow. Raises UnsupportedMediaType if it is not installed."""
    try:
        import pyarrow as pa
    except ImportError:
        raise UnsupportedMediaType(f"{ARROW} requires pyarrow: pip install 'regraft[arrow]'") from None
    return pa


def accepts_arrow(accept: str) -> bool:
    """Whether a request's header `Accept` asks for a table as the answer."""
    return type_of(accept) == ARROW


def read_items(raw: bytes, max_rows: int) -> tuple[list[dict[str, Any]], NDArray[Any]]:
    """Items as in JSON, `{id, metadata}`, without nulls, and their embeddings (N, D).

    Raises:
        InvalidBody: not a stream of such a table; the pointer names the column.
        BodyTooLarge: more than `max_rows` rows.
    """
    table = _table(raw, max_rows)
    ids = _column(table, ID, "string").to_pylist()
    embeddings = _matrix(table)
    names = [name for name in table.column_names if name not in (ID, EMBEDDING)]
    if not names:
        return [{"id": item} for item in ids], embeddings
    columns = [table.column(name).to_pylist() for name in names]
    described = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
    if any(table.column(name).null_count for name in names):
        described = ({name: value for name, value in item.items() if value is not None} for item in described)
    return [{"id": item, "metadata": metadata} for item, metadata in zip(ids, described, strict=True)], embeddings


def read_queries(raw: bytes, max_rows: int) -> NDArray[Any]:
    """The one column of a table of queries (Q, D). Raises as `read_items`."""
    table = _table(raw, max_rows)
    if other := sorted(set(table.column_names) - {EMBEDDING}):
        raise InvalidBody(f"a table of queries must have only the column {EMBEDDING!r}", pointer=pointer_to(other[0]))
    return _matrix(table)


def write_matches(answer: Mapping[str, Any]) -> bytes:
    """A search answer as a table, one row per match; its other fields are in the schema's metadata."""
    pa = pyarrow()
    rows = [(number, match) for number, one in enumerate(answer["results"]) for match in one["matches"]]
    floats, texts = {"score", "raw_score"}, pa.string()
    columns = {"query": pa.array([number for number, _ in rows], pa.int32())}
    for name in MATCH:
        columns[name] = pa.array([match[name] for _, match in rows], pa.float64() if name in floats else texts)
    columns["metadata"] = pa.array([orjson.dumps(match["metadata"]).decode() for _, match in rows], texts)
    if any("text" in match for _, match in rows):
        columns["text"] = pa.array([match["text"] for _, match in rows], texts)
    others = {name: value for name, value in answer.items() if name != "results"}
    return _stream(columns, {"regraft": orjson.dumps(others)})


def write_items(
    items: Sequence[Mapping[str, Any]],
    dims: Mapping[str, int],
    next_cursor: str | None,
    damaged: Sequence[Mapping[str, str]],
) -> bytes:
    """A page of items as a table: `id`, `metadata` (JSON), `active`, `image`, `text`, `created`, two columns a version.

    `dims`: version name -> dimension. `vector:NAME` and `origin:NAME` are null if an item holds no embedding by it. The
    schema's metadata has the cursor of the next page, and `damaged` as JSON: the embeddings that are left out.
    """
    pa = pyarrow()
    columns = {name: [one[name] for one in items] for name in ("id", "active", "image", "text", "created")}
    text = pa.string()
    kinds = {"id": text, "active": text, "image": pa.bool_(), "text": text, "created": pa.float64()}
    arrays = {name: pa.array(values, kinds[name]) for name, values in columns.items()}
    arrays["metadata"] = pa.array([to_json(one["metadata"]) for one in items], pa.string())
    for name, dim in dims.items():
        embeddings = [next((one for one in i["embeddings"] if one["version"] == name), None) for i in items]
        is_missing = np.array([one is None for one in embeddings], bool)
        flat = np.zeros((len(items), dim), np.float32)
        if not is_missing.all():
            flat[~is_missing] = np.stack([one[EMBEDDING] for one in embeddings if one is not None])
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), dim, mask=pa.array(is_missing))
        arrays[f"vector:{name}"] = vectors
        arrays[f"origin:{name}"] = pa.array([None if one is None else one["origin"] for one in embeddings], pa.string())
    return _stream(arrays, {"next": next_cursor or "", "damaged": orjson.dumps(damaged)})


def _stream(columns: Mapping[str, Any], metadata: Mapping[str, str | bytes]) -> bytes:
    """A table of these arrays, with `metadata` in its schema, as an IPC stream."""
    pa = pyarrow()
    table = pa.table(columns).replace_schema_metadata(metadata)
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def _table(raw: bytes, max_rows: int) -> pa.Table:
    pa = pyarrow()
    try:
        if any(map(_is_compressed, _messages(raw))):
            raise InvalidBody("the stream must not be compressed", pointer="")
        with pa.ipc.open_stream(raw) as stream:
            _check_columns(stream.schema)
            batches, rows = [], 0
            for batch in stream:
                rows += batch.num_rows
                if rows > max_rows:
                    raise BodyTooLarge(f"the table has {rows} rows or more; at most {max_rows} in one request")
                batch.validate(full=True)
                batches.append(batch)
            return pa.Table.from_batches(batches, stream.schema)
    except (pa.ArrowException, struct.error, ValueError, IndexError, OSError) as error:
        raise InvalidBody(f"the body is not a stream in Arrow's IPC format: {str(error)[:200]}") from error


def _check_columns(schema: pa.Schema) -> None:
    if repeated := {name for name in schema.names if schema.names.count(name) > 1}:
        raise InvalidBody("two columns have this name", pointer=pointer_to(min(repeated)))
    for field in schema:
        kind = field.type.value_type if _is_matrix(field.type) and field.name == EMBEDDING else field.type
        legal = ("float",) if kind is not field.type else ("float", "int", "uint", "bool", "string", "large_string")
        legal = ("halffloat", "double", *legal)
        if str(kind).rstrip("0123456789") not in legal:
            told = "columns must be strings, numbers or booleans, and embeddings fixed-size lists of floats"
            raise InvalidBody(f"{told}, not {str(field.type)[:100]}", pointer=pointer_to(field.name))


def _is_matrix(kind: pa.DataType) -> bool:
    return bool(pyarrow().types.is_fixed_size_list(kind))


def _column(table: pa.Table, name: str, kind: str) -> pa.ChunkedArray:
    if name not in table.column_names or not str(table.schema.field(name).type).endswith(kind):
        raise InvalidBody(f"the table must have the column {name!r} of type {kind}", pointer=f"/{name}")
    return table.column(name)


def _matrix(table: pa.Table) -> NDArray[Any]:
    """The embeddings (N, D); a null within one becomes NaN, which is refused later."""
    if EMBEDDING not in table.column_names or not _is_matrix(kind := table.schema.field(EMBEDDING).type):
        raise InvalidBody(
            "the table must have the column 'embedding' of fixed-size lists of floats", pointer="/embedding"
        )
    column = table.column(EMBEDDING)
    if column.null_count:
        raise InvalidBody("an embedding is null", pointer=f"/{EMBEDDING}")
    blocks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    numbers = np.concatenate(blocks) if len(blocks) > 1 else blocks[0] if blocks else np.empty(0, np.float32)
    return numbers.reshape(len(column), kind.list_size)


def _messages(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """The metadata of each message of a stream (a flatbuffer), and the position of its root table."""
    at = 0
    while at + 4 <= len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        at += 4
        if size == 0xFFFFFFFF:
            (size,) = struct.unpack_from("<I", raw, at)
            at += 4
        if size == 0:
            return
        yield (metadata := raw[at : at + size]), struct.unpack_from("<I", metadata)[0]
        (place,) = _fields(metadata, struct.unpack_from("<I", metadata)[0], (3,))
        at += size + (struct.unpack_from("<Q", metadata, place)[0] if place else 0)


def _is_compressed(message: tuple[bytes, int]) -> bool:
    metadata, root = message
    kind, header = _fields(metadata, root, (1, HEADER))
    if not kind or not header or metadata[kind] != 3:  # a record batch; columns of dictionaries are refused
        return False
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _fields(metadata, batch, (BATCH_COMPRESSION,))[0] != 0


def _fields(metadata: bytes, table: int, numbers: Sequence[int]) -> list[int]:
    """The positions of some fields of a flatbuffer's table; 0: absent."""
    places = table - struct.unpack_from("<i", metadata, table)[0]
    (size,) = struct.unpack_from("<H", metadata, places)
    within = [4 + 2 * number for number in numbers]
    offsets = [struct.unpack_from("<H", metadata, places + at)[0] if at < size else 0 for at in within]
    return [table + offset if offset else 0 for offset in offsets]
