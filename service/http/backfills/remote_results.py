"""The result of a chunk from a remote worker: its schema, and every check before it is accepted."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import FailFast, Field
from sqlalchemy import Connection, select

from index.errors import InvalidVector, RegraftError
from index.space import UNIT_TOLERANCE, Cosine, Vectors, check_vectors, space_from_json
from service.backfills import chunks
from service.backfills.chunks import Chunk
from service.backfills.outcome import EmbeddedItems
from service.backfills.states import Kind
from service.errors import InvalidBody
from service.registry.loaded_version import LoadedVersion
from service.schemas import MAX_CHUNK, Body, Number, Reason
from service.store.image_store.keys import is_text
from service.store.tables import edge
from service.store.vectors.codec import STORED

MAX_EDGES = 1000
"""Most edges that a result may name."""
ROUNDING = 1e-6
"""How far from unit length rounding to float32 moves a vector."""

ItemAt = tuple[int, int]
"""An item's key, and its feed number when it was read."""


class EdgeReplaced(RegraftError):
    """An edge of these embeddings was replaced: release the chunk and claim it again."""

    status = 409
    code = "edge_replaced"


class MovedIn(Body):
    """A new embedding of an item, computed as of its feed number `seq`."""

    item: int
    seq: int
    vector: str
    side: str | None = None
    # Stored as float32, in which all larger numbers would become infinite.
    uncertainty: Annotated[float | None, Field(ge=0, le=float(np.finfo(np.float32).max))] = None


class FailedIn(Body):
    """An item that could not be moved; `retry`: another attempt may succeed."""

    item: int
    seq: int
    reason: Reason
    code: Literal[
        "image_missing",
        "image_invalid",
        "image_unreadable",
        "text_missing",
        "text_invalid",
        "text_unreadable",
        "refused",
    ] = "refused"
    retry: bool = False


class ResultIn(Body):
    """The results of a chunk: each item that still waits is in `moved` or `failed`.

    `edges` are the numbers of the applied edges; the result is refused if one was replaced meanwhile.
    """

    largest = "max_body_bytes"

    # Limited, as the event loop checks the elements.
    moved: Annotated[list[MovedIn], FailFast(), Field(max_length=MAX_CHUNK)]
    failed: Annotated[list[FailedIn], FailFast(), Field(max_length=MAX_CHUNK)] = Field(default_factory=list)
    edges: Annotated[list[Number], FailFast(), Field(max_length=MAX_EDGES)] = Field([])


def check_complete(connection: Connection, chunk: Chunk, body: ResultIn) -> None:
    """Raise InvalidBody unless all items that still wait are named, and only items of the chunk, each once."""
    named = [*(m.item for m in body.moved), *(f.item for f in body.failed)]
    if foreign := set(named) - set(chunk.item_ids):
        raise InvalidBody(f"item {min(foreign)} is not in this chunk", pointer="/moved")
    if len(named) > len(set(named)):
        raise InvalidBody("an item is named twice", pointer="/moved")
    if missing := set(chunks.remaining_items(connection, chunk)) - set(named):
        raise InvalidBody(
            f"{len(missing)} items of the chunk are missing, among them item {min(missing)}", pointer="/moved"
        )


def check_edges(connection: Connection, body: ResultIn) -> None:
    """Raise EdgeReplaced unless every edge that was applied is still declared."""
    declared = set(connection.execute(select(edge.c.id).where(edge.c.id.in_(body.edges))).scalars())
    if gone := set(body.edges) - declared:
        raise EdgeReplaced(f"edge {min(gone)} was replaced: release the chunk and claim it again")


def encoded_images(connection: Connection, chunk: Chunk) -> set[ItemAt]:
    """The chunk's items, as of now, whose new embedding comes from an image encoder."""
    if chunk.kind is not Kind.REENCODE:
        return set()
    return {(row.id, row.seq) for row in chunks.read_contents(connection, chunk) if not is_text(row.blob)}


def checked(target: LoadedVersion, images: Collection[ItemAt], moved: Sequence[MovedIn]) -> list[EmbeddedItems]:
    """The returned embeddings, as a local worker would have made them. Raises InvalidVector for the first invalid one.

    `images`: from `encoded_images`; their embeddings have side-information if the target has any.
    """
    vectors = [_checked(target, (m.item, m.seq) in images, number, m) for number, m in enumerate(moved)]
    # In one chunk, one edge may give side-information or uncertainty and another may not.
    kinds = [(side is not None, m.uncertainty is not None) for (_, side), m in zip(vectors, moved, strict=True)]
    groups = [[n for n, kind in enumerate(kinds) if kind == alike] for alike in dict.fromkeys(kinds)]
    return [_joined([moved[n] for n in group], [vectors[n] for n in group]) for group in groups]


def _joined(moved: Sequence[MovedIn], vectors: Sequence[tuple[Vectors, Vectors | None]]) -> EmbeddedItems:
    sides = [side for _, side in vectors if side is not None]
    uncertainties = [m.uncertainty for m in moved if m.uncertainty is not None]
    return EmbeddedItems(
        [m.item for m in moved],
        [m.seq for m in moved],
        np.stack([vector for vector, _ in vectors]),
        np.stack(sides) if sides else None,
        np.array(uncertainties, np.float32) if uncertainties else None,
    )


def _checked(target: LoadedVersion, image: bool, number: int, moved: MovedIn) -> tuple[Vectors, Vectors | None]:
    vector = _vector(target, moved.vector, f"/moved/{number}/vector")
    return vector, _side(target, image, moved.side, f"/moved/{number}/side")


def _vector(target: LoadedVersion, text: str, pointer: str) -> Vectors:
    space = space_from_json(dict(target.card.space))
    vector = _floats(text, pointer)
    (ready,) = check_vectors(vector, target.card.dim, space, pointer=pointer)
    off = abs(float(np.linalg.norm(vector.astype(np.float64))) - 1) if isinstance(space, Cosine) else 0.0
    if off > UNIT_TOLERANCE:
        raise InvalidVector(f"its length is {float(np.linalg.norm(vector)):.4g}, not 1", pointer=pointer)
    # Normalised again, it would differ from a local worker's in the last bits.
    return vector if off < ROUNDING else ready


def _side(target: LoadedVersion, image: bool, text: str | None, pointer: str) -> Vectors | None:
    side = None if text is None else _floats(text, pointer)
    width = target.card.side_dim if side is not None or image else 0
    if (0 if side is None else len(side)) != width:
        raise InvalidVector(f"side must be {width} numbers of side-information", pointer=pointer)
    if side is not None and not np.isfinite(side).all():
        raise InvalidVector("side-information must be finite", pointer=pointer)
    return side


def _floats(text: str, pointer: str) -> Vectors:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidVector("must be base64 of little-endian float32 numbers", pointer=pointer) from None
    if len(raw) % STORED.itemsize:
        raise InvalidVector(f"{len(raw)} bytes are not a multiple of 4, the size of a float32", pointer=pointer)
    return np.frombuffer(raw, STORED).astype(np.float32)
