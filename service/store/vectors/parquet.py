"""A Parquet file of vectors: one row each, in row groups that can be read separately.

Columns: `item` (the item's key), `seq` (its feed number when it was moved), `digest`, and `vector`, the bytes from the
database. Every page has a checksum. Shapes: N rows, in groups of `GROUP`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from index.engines.base import Keys
from index.errors import RegraftError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

GROUP = 1024
"""Rows of a row group, which are read together."""
VECTOR = 3
"""The number of the column `vector`."""

Fetch = Callable[[int, int], bytes]
"""Returns the bytes of a file from a start up to an end."""


class NoParquet(RegraftError):
    """Vectors in Parquet files require pyarrow, which is not installed."""

    status = 503
    code = "no_parquet"


def parquet() -> Any:
    """The module that reads and writes Parquet. Raises NoParquet."""
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise NoParquet("vectors in Parquet files require pyarrow: pip install 'regraft[arrow]'") from None
    return pq


def write_vectors(items: Keys, seqs: Keys, digests: Keys, rows: Sequence[bytes], about: Mapping[str, str]) -> bytes:
    """A file of N vectors of one length; `about`: its metadata."""
    pq = parquet()
    import pyarrow as pa

    vectors = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(len(rows[0])), len(rows), [None, pa.py_buffer(b"".join(rows))]
    )
    columns = {"item": pa.array(items), "seq": pa.array(seqs), "digest": pa.array(digests), "vector": vectors}
    written = io.BytesIO()
    # Vectors gain nothing from a dictionary or compression.
    plain = {"compression": "NONE", "use_dictionary": False, "write_statistics": False}
    table = pa.table(columns).replace_schema_metadata(dict(about))
    pq.write_table(table, written, row_group_size=GROUP, write_page_checksum=True, **plain)
    return written.getvalue()


def describe(size: int, fetch: Fetch) -> pq.FileMetaData:
    """The metadata of a file of `size` bytes, which describes its groups."""
    found: pq.FileMetaData = parquet().read_metadata(_Fetched(size, fetch))
    return found


def read_groups(about: pq.FileMetaData, first: int, last: int, size: int, fetch: Fetch) -> list[NDArray[np.uint8]]:
    """The vectors (n, bytes per vector) of each group from `first` to `last`, by one fetch."""
    start, end = about.row_group(first).column(VECTOR), about.row_group(last).column(VECTOR)
    file = _Fetched(size, fetch)
    file.hold(start.data_page_offset, end.data_page_offset + end.total_compressed_size)
    opened = parquet().ParquetFile(file, metadata=about, page_checksum_verification=True)
    return [_vectors(opened, group) for group in range(first, last + 1)]


def _vectors(opened: pq.ParquetFile, group: int) -> NDArray[np.uint8]:
    column = opened.read_row_group(group, columns=["vector"], use_threads=False).column("vector").combine_chunks()
    width = column.type.byte_width
    held = np.frombuffer(column.buffers()[1], np.uint8)
    return held[column.offset * width : (column.offset + len(column)) * width].reshape(len(column), width)


class _Fetched(io.RawIOBase):
    """A remote file for pyarrow: holds one part in memory, and fetches what is read beyond it."""

    def __init__(self, size: int, fetch: Fetch) -> None:
        self._size, self._fetch, self._at = size, fetch, 0
        self._start, self._held = 0, b""

    def hold(self, start: int, end: int) -> None:
        """Fetch these bytes and hold them in memory."""
        self._start, self._held = start, self._fetch(start, end)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        start, end = self._at, min(self._at + len(view), self._size)
        if not (self._start <= start and end <= self._start + len(self._held)):
            self.hold(start, end)
        found = self._held[start - self._start : end - self._start]
        view[: len(found)] = found
        self._at += len(found)
        return len(found)
