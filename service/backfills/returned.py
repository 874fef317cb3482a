"""What a remote worker gives back: its form, and everything that is checked before it is accepted."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from sqlalchemy import Connection, select

from index.errors import InvalidVector, RegraftError
from index.space import UNIT_TOLERANCE, Cosine, Vectors, check_vectors, space_from_json
from service.backfills import chunks
from service.backfills.chunks import Chunk, Moved
from service.backfills.planner import Kind
from service.errors import InvalidBody
from service.repository import STORED
from service.schemas import Body
from service.tables import edge
from service.versions.catalog import Registered

ROUNDING = 1e-6
"""How far rounding to float32 takes a vector from unit length."""


class EdgeReplaced(RegraftError):
    """An edge that these embeddings were made by was replaced meanwhile: give the chunk back and claim it again."""

    status = 409
    code = "edge_replaced"


class MovedIn(Body):
    """A new embedding of an item as it was at `seq`."""

    item: int
    seq: int
    vector: str
    side: str | None = None
    uncertainty: Annotated[float | None, Field(ge=0)] = None


class FailedIn(Body):
    """An item that could not be moved; `retry`: another attempt may go better."""

    item: int
    seq: int
    reason: Annotated[str, Field(max_length=1024, pattern=r"^[^\x00]*$")]
    code: Literal["image_missing", "image_invalid", "image_unreadable", "refused"] = "refused"
    retry: bool = False


class ResultIn(Body):
    """What became of the items of a chunk: each one that still waits is in one of the two.

    `edges` are the numbers of the edges that were applied; a result of one that was replaced since is refused.
    """

    moved: list[MovedIn]
    failed: Sequence[FailedIn] = ()
    edges: Annotated[Sequence[Annotated[int, Field(ge=1, lt=1 << 63)]], Field(max_length=1000)] = ()


def check_complete(connection: Connection, chunk: Chunk, body: ResultIn) -> None:
    """Raise InvalidBody unless every item that still waits is named, once, and no other."""
    given = [*(m.item for m in body.moved), *(f.item for f in body.failed)]
    if foreign := set(given) - set(chunk.item_ids):
        raise InvalidBody(f"item {min(foreign)} is not of this chunk", pointer="/moved")
    if len(given) > len(set(given)):
        raise InvalidBody("an item is named twice", pointer="/moved")
    if left := set(chunks.still_waiting(connection, chunk)) - set(given):
        raise InvalidBody(f"{len(left)} items of the chunk are missing, item {min(left)} is one", pointer="/moved")


def check_edges(connection: Connection, body: ResultIn) -> None:
    """Raise EdgeReplaced unless every edge that was applied is still declared."""
    there = set(connection.execute(select(edge.c.id).where(edge.c.id.in_(body.edges))).scalars())
    if gone := set(body.edges) - there:
        raise EdgeReplaced(f"edge {min(gone)} was replaced meanwhile: give the chunk back and claim it again")


def checked(target: Registered, kind: Kind, number: int, given: MovedIn) -> Moved:
    """A returned embedding, number so many of the body. Raises InvalidVector."""
    space = space_from_json(dict(target.card.space))
    pointer = f"/moved/{number}/vector"
    vector = _floats(given.vector, pointer)
    (ready,) = check_vectors(vector, target.card.dim, space, pointer=pointer)
    off = abs(float(np.linalg.norm(vector.astype(np.float64))) - 1) if isinstance(space, Cosine) else 0.0
    if off > UNIT_TOLERANCE:
        raise InvalidVector(f"its length is {float(np.linalg.norm(vector)):.4g}, not 1", pointer=pointer)
    if off < ROUNDING:
        ready = vector  # normalised already: once more would change last bits, and a local worker's differ
    side = None if given.side is None else _floats(given.side, f"/moved/{number}/side")
    width = target.card.side_dim if side is not None or kind is Kind.REENCODE else 0
    if (0 if side is None else len(side)) != width:
        raise InvalidVector(f"side must be {width} numbers of side-information", pointer=f"/moved/{number}/side")
    if side is not None and not np.isfinite(side).all():
        raise InvalidVector("side-information must be finite", pointer=f"/moved/{number}/side")
    return Moved(given.item, given.seq, ready, side, given.uncertainty)


def _floats(text: str, pointer: str) -> Vectors:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidVector("must be base64 of little-endian float32 numbers", pointer=pointer) from None
    if len(raw) % STORED.itemsize:
        raise InvalidVector(f"{len(raw)} bytes are no whole number of float32 numbers", pointer=pointer)
    return np.frombuffer(raw, STORED).astype(np.float32)
