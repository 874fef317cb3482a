"""Vectors as they are stored: little-endian float32 bytes, or where they lie; this is the only place that knows.

A vector that was moved out of the database leaves its place there: 21 bytes, which no vector has, as four are a number.

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

PLACE = np.dtype([("tag", "S1"), ("file", "<i8"), ("row", "<i4"), ("digest", "<i8")])
"""Where a vector lies that is not in the database: the number of the file, its row there, and its digest."""
PLACE_TAG = b"@"


class DamagedEmbedding(RegraftError):
    """A stored embedding does not have its version's dimension."""

    status = 503
    code = "embedding_damaged"


def to_bytes(vector: Vectors) -> bytes:
    """float32 numbers, any shape -> what the database stores."""
    return vector.astype(STORED, copy=False).tobytes()


def from_bytes(rows: Sequence[bytes], dim: int) -> Vectors:
    """Stored vectors -> (N, dim) float32, copied out of the rows at once. Raises DamagedEmbedding."""
    if not all_whole(rows, dim):
        raise DamagedEmbedding(f"a stored embedding does not have {dim} numbers: see `regraft doctor`")
    return np.frombuffer(b"".join(rows), STORED).reshape(len(rows), dim).astype(np.float32)


def digests_to_bytes(vectors: Vectors) -> bytes:
    """The digests of vectors (N, dim), eight bytes each."""
    return digests(vectors).astype(STORED_DIGEST, copy=False).tobytes()


def digests_from_hex(digits: str) -> Keys:
    """Stored digests as hexadecimal digits, one behind the other -> (N,)."""
    return np.frombuffer(bytes.fromhex(digits), STORED_DIGEST).astype(np.int64, copy=False)


def is_usable(row: bytes, dim: int) -> bool:
    """Whether a stored vector can be compared with others: it has `dim` numbers, all of them finite."""
    return len(row) == dim * STORED.itemsize and bool(np.isfinite(np.frombuffer(row, STORED)).all())


def all_whole(rows: Sequence[bytes], dim: int) -> bool:
    """Whether all of many stored vectors have `dim` numbers."""
    return set(map(len, rows)) <= {dim * STORED.itemsize}


def is_place(row: bytes | None) -> TypeGuard[bytes]:
    """Whether what is stored says where the vector lies."""
    return row is not None and len(row) == PLACE.itemsize and row.startswith(PLACE_TAG)


def any_place(rows: Iterable[bytes | None]) -> bool:
    """Whether one of many may say where its vector lies: by their lengths alone, a fraction of looking at each."""
    return PLACE.itemsize in set(map(len, filter(None, rows)))


def places_in_file(file: int, noted: Keys) -> NDArray[np.void]:
    """The places (N,) of the rows of a file, whose digests are `noted` (N,); their bytes are what is stored."""
    places = np.empty(len(noted), PLACE)
    places["tag"], places["file"], places["digest"] = PLACE_TAG, file, noted
    places["row"] = np.arange(len(noted))
    return places


def places_from_bytes(rows: Sequence[bytes]) -> NDArray[np.void]:
    """Stored places -> (N,) of `PLACE`."""
    return np.frombuffer(b"".join(rows), PLACE)


def place_prefix(file: int) -> bytes:
    """What every place in a file begins with."""
    return PLACE_TAG + np.array(file, PLACE["file"]).tobytes()


def is_same_vector(stored: bytes, vector: Vectors) -> bool:
    """Whether a vector (D,) is the stored one; of one that lies elsewhere its digest tells."""
    if is_place(stored):
        return bool(places_from_bytes([stored])["digest"][0] == digests(vector[np.newaxis])[0])
    return bytes(stored) == to_bytes(vector)
