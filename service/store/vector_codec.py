"""Vectors as they are stored: little-endian float32 bytes; this is the only place that knows.

Shapes: N vectors, D their dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from index.engines.base import Keys
from index.engines.digest import digests
from index.errors import RegraftError
from index.space import Vectors

STORED = np.dtype("<f4")
STORED_DIGEST = np.dtype("<i8")
NO_DIGEST = "0" * 2 * STORED_DIGEST.itemsize
"""Hexadecimal digits of `index.engines.digest.UNKNOWN`."""


class DamagedEmbedding(RegraftError):
    """A stored embedding is not of its version's length."""

    status = 503
    code = "embedding_damaged"


def to_bytes(vector: Vectors) -> bytes:
    """float32 numbers, any shape -> what the database stores."""
    return vector.astype(STORED, copy=False).tobytes()


def from_bytes(rows: Sequence[bytes], dim: int) -> Vectors:
    """Stored vectors -> (N, dim) float32, copied out of the rows at once. Raises DamagedEmbedding."""
    if not all_whole(rows, dim):
        raise DamagedEmbedding(f"a stored embedding is not of {dim} numbers: `regraft doctor` names it")
    return np.frombuffer(b"".join(rows), STORED).reshape(len(rows), dim).astype(np.float32)


def digests_to_bytes(vectors: Vectors) -> bytes:
    """The digests of vectors (N, dim), eight bytes each."""
    return digests(vectors).astype(STORED_DIGEST, copy=False).tobytes()


def digests_from_hex(digits: str) -> Keys:
    """Stored digests as hexadecimal digits, one behind the other -> (N,)."""
    return np.frombuffer(bytes.fromhex(digits), STORED_DIGEST).astype(np.int64, copy=False)


def is_whole(row: bytes, dim: int) -> bool:
    """Whether a stored vector has `dim` numbers."""
    return len(row) == dim * STORED.itemsize


def all_whole(rows: Sequence[bytes], dim: int) -> bool:
    """Whether all of many stored vectors have `dim` numbers."""
    return set(map(len, rows)) <= {dim * STORED.itemsize}
