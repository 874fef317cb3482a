"""The stored form of vectors: little-endian float32 bytes, or the location of a vector in a file.

A vector that was moved into a file leaves its location in the database: 21 bytes, a length that no vector has, as a
number takes four. Only this module knows the format.

Shapes: N vectors, D their dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from index.engines.base import Keys
from index.engines.digest import digests
from index.errors import RegraftError
from index.space import Vectors

STORED = np.dtype("<f4")
STORED_DIGEST = np.dtype("<i8")
NO_DIGEST = "0" * 2 * STORED_DIGEST.itemsize
"""Hexadecimal digits of `index.engines.digest.UNKNOWN`."""

LOCATION = np.dtype([("tag", "S1"), ("file", "<i8"), ("row", "<i4"), ("digest", "<i8")])
"""The location of a vector in a file: the number of the file, the row there, and the vector's digest."""
LOCATION_TAG = b"@"


class DamagedEmbedding(RegraftError):
    """A stored embedding does not have its version's dimension."""

    status = 503
    code = "embedding_damaged"


def to_bytes(vector: Vectors) -> bytes:
    """float32 numbers, any shape -> their stored form."""
    return vector.astype(STORED, copy=False).tobytes()


def from_bytes(rows: Sequence[bytes], dim: int) -> Vectors:
    """Stored vectors -> (N, dim) float32, copied. Raises DamagedEmbedding if one has another length."""
    if not all_whole(rows, dim):
        raise DamagedEmbedding(f"a stored embedding does not have {dim} numbers: see `regraft doctor`")
    return np.frombuffer(b"".join(rows), STORED).reshape(len(rows), dim).astype(np.float32)


def digests_to_bytes(vectors: Vectors) -> bytes:
    """The digests of vectors (N, dim), eight bytes each."""
    return digests(vectors).astype(STORED_DIGEST, copy=False).tobytes()


def digests_from_hex(digits: str) -> Keys:
    """Stored digests as concatenated hexadecimal digits -> (N,)."""
    return np.frombuffer(bytes.fromhex(digits), STORED_DIGEST).astype(np.int64, copy=False)


def is_usable(row: bytes, dim: int) -> bool:
    """Whether a stored vector can be compared with others: it has `dim` numbers, all finite."""
    return len(row) == dim * STORED.itemsize and bool(np.isfinite(np.frombuffer(row, STORED)).all())


def all_whole(rows: Sequence[bytes], dim: int) -> bool:
    """Whether all stored vectors have `dim` numbers."""
    return set(map(len, rows)) <= {dim * STORED.itemsize}


def is_location(row: bytes | None) -> TypeGuard[bytes]:
    """Whether a stored value is the location of a vector in a file."""
    return row is not None and len(row) == LOCATION.itemsize and row.startswith(LOCATION_TAG)


def any_location(rows: Iterable[bytes | None]) -> bool:
    """Whether one of many stored values may be a location; checks only lengths, which is much faster."""
    return LOCATION.itemsize in set(map(len, filter(None, rows)))


def locations_in_file(file: int, noted: Keys) -> NDArray[np.void]:
    """The locations (N,) of the rows of a file with digests `noted` (N,); their bytes are the stored form."""
    locations = np.empty(len(noted), LOCATION)
    locations["tag"], locations["file"], locations["digest"] = LOCATION_TAG, file, noted
    locations["row"] = np.arange(len(noted))
    return locations


def locations_from_bytes(rows: Sequence[bytes]) -> NDArray[np.void]:
    """Stored locations -> (N,) of `LOCATION`."""
    return np.frombuffer(b"".join(rows), LOCATION)


def location_prefix(file: int) -> bytes:
    """The first bytes of every location in a file."""
    return LOCATION_TAG + np.array(file, LOCATION["file"]).tobytes()


def is_same_vector(stored: bytes, vector: Vectors) -> bool:
    """Whether a vector (D,) equals the stored one; a vector in a file is compared by its digest."""
    if is_location(stored):
        return bool(locations_from_bytes([stored])["digest"][0] == digests(vector[np.newaxis])[0])
    return bytes(stored) == to_bytes(vector)
