"""Work for machines without access to the database: chunks claimed, fetched and returned over HTTP by the worker key.

A remote worker holds a chunk by the same lease as a local one, and what it returns is committed by the same code; as it
comes from outside, it is checked first. Vectors travel as base64 of little-endian float32.
"""

from __future__ import annotations

import base64
import binascii
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy import Connection, select
from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from index.errors import InvalidVector
from index.folder import pack_version
from index.space import UNIT_TOLERANCE, Cosine, Vectors, check_vectors, space_from_json
from service.backfills import chunks
from service.backfills.attempts import Failed
from service.backfills.chunks import Chunk, ChunkLost, Moved
from service.backfills.planner import Kind, State, drained, finish_or_extend
from service.errors import InvalidBody
from service.repository import STORED
from service.runtime import Runtime, Service
from service.schemas import BackfillNumber, Body
from service.tables import item
from service.versions.catalog import Registered, card_sha256

router = APIRouter(tags=["work"])

ROUNDING = 1e-6
"""How far rounding to float32 takes a vector from unit length."""

Lease = Annotated[str, Query(min_length=1, max_length=128)]
Word = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")]


class ClaimIn(Body):
    """Who asks, and which kinds of work it can do."""

    worker: Word
    kinds: Sequence[Literal["reencode", "transform"]] = ("reencode", "transform")


class ClaimOut(BaseModel):
    """A chunk that is the worker's as long as it gives signs of life: `lease` is what proves it."""

    chunk: int
    lease: str
    lease_seconds: float
    backfill: int
    kind: str
    version: str
    card_sha256: str
    items: int


class WorkItem(BaseModel):
    """An item to be moved, as it is at `seq`; null: the image is missing, or inputs were not asked for."""

    item: int
    seq: int
    id: str
    image: str | None = None
    from_version: str | None = None
    embedding: str | None = None
    side: str | None = None


class WorkOut(BaseModel):
    """The items of a chunk that still wait."""

    items: list[WorkItem]


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
    """What became of the items of a chunk: each one that still waits is in one of the two."""

    moved: list[MovedIn]
    failed: Sequence[FailedIn] = ()


class ResultOut(BaseModel):
    """How many items were moved, given up, put off, or skipped because they changed meanwhile."""

    done: int
    failed: int
    retried: int
    skipped: int


@router.post("/work:claim", response_model=ClaimOut, responses={204: {"description": "nothing to do"}})
def claim(body: ClaimIn, service: Service) -> Any:
    """Lease the next chunk; 204 when there is none."""
    owner = f"remote:{body.worker}:{uuid.uuid4().hex}"
    chunk = _claim(service, owner, [Kind(kind) for kind in body.kinds])
    if chunk is None and _look_after(service):
        chunk = _claim(service, owner, [Kind(kind) for kind in body.kinds])
    if chunk is None:
        return Response(status_code=204)
    target = service.catalog.by_id(chunk.version_id)
    return ClaimOut(
        chunk=chunk.id,
        lease=owner,
        lease_seconds=service.settings.lease_seconds,
        backfill=chunk.backfill_id,
        kind=chunk.kind,
        version=target.name,
        card_sha256=card_sha256(target.version.folder),
        items=len(chunk.item_ids),
    )


@router.get("/work/{chunk}")
def fetch(chunk: BackfillNumber, lease: Lease, service: Service, inputs: bool = True) -> WorkOut:
    """The items of a leased chunk, with their images or embeddings unless the worker has its own."""
    with service.database.read() as connection:
        held = chunks.leased(connection, chunk, lease)
        read = _with_images if held.kind is Kind.REENCODE else _with_embeddings
        return WorkOut(items=read(service, connection, held, inputs))


@router.post("/work/{chunk}")
def give(chunk: BackfillNumber, lease: Lease, body: ResultIn, service: Service) -> ResultOut:
    """Take a chunk's results, after checking them; refused results leave the lease as it is."""
    with service.database.read() as connection:
        held = chunks.leased(connection, chunk, lease)
        _check_complete(connection, held, body)
    target = service.catalog.by_id(held.version_id)
    moved = [_moved(target, held.kind, body.moved)] if body.moved else []
    failed = [Failed(f.item, f.seq, f.reason, f.code, f.retry) for f in body.failed]
    with service.database.write() as connection:
        return ResultOut(**chunks.commit(connection, held, moved, failed))


@router.post("/work/{chunk}/extend")
def extend(chunk: BackfillNumber, lease: Lease, service: Service) -> dict[str, float]:
    """A sign of life: the lease is counted from now."""

    def prolong(connection: Connection, held: Chunk) -> None:
        if not chunks.extend(connection, held, service.settings.lease_seconds):
            raise ChunkLost("another worker took the chunk over")

    _on(service, chunk, lease, prolong)
    return {"lease_seconds": service.settings.lease_seconds}


@router.post("/work/{chunk}/release", status_code=204)
def release(chunk: BackfillNumber, lease: Lease, service: Service) -> None:
    """Give a chunk back undone."""
    _on(service, chunk, lease, chunks.release)


@router.get("/work/versions/{name}", response_class=FileResponse)
def archive(name: str, service: Service) -> FileResponse:
    """A version folder as a .zip, for a worker that has to run it."""
    registered = service.catalog.named(name)
    scratch = tempfile.TemporaryDirectory()
    packed = Path(scratch.name) / f"{name}.zip"
    pack_version(registered.version.folder, packed)
    return FileResponse(packed, media_type="application/zip", background=BackgroundTask(scratch.cleanup))


def _claim(service: Runtime, owner: str, kinds: list[Kind]) -> Chunk | None:
    with service.database.lookup() as connection:
        if not chunks.claimable(connection, kinds):
            return None
    with service.database.write() as connection:
        return chunks.claim(connection, owner, service.settings.lease_seconds, kinds)


def _look_after(service: Runtime) -> bool:
    """End or extend backfills without chunks, as a local worker does. True: one has new chunks."""
    with service.database.lookup() as connection:
        waiting = drained(connection)
    states = []
    for backfill_id in waiting:
        with service.database.write() as connection:
            states.append(finish_or_extend(connection, backfill_id))
    return State.RUNNING in states


def _on(service: Runtime, chunk: int, lease: str, change: Callable[[Connection, Chunk], None]) -> None:
    with service.database.write() as connection:
        change(connection, chunks.leased(connection, chunk, lease))


def _with_images(service: Runtime, connection: Connection, chunk: Chunk, inputs: bool) -> list[WorkItem]:
    names = _names(connection, chunk)
    return [
        WorkItem(item=row.id, seq=row.seq, id=names[row.id], image=_image(service, row.blob) if inputs else None)
        for row in chunks.read_images(connection, chunk)
    ]


def _image(service: Runtime, blob: str) -> str | None:
    try:
        return base64.b64encode(service.blobs.read(blob)).decode()
    except FileNotFoundError:
        return None


def _with_embeddings(service: Runtime, connection: Connection, chunk: Chunk, inputs: bool) -> list[WorkItem]:
    names = _names(connection, chunk)
    return [
        WorkItem(
            item=row.id,
            seq=row.seq,
            id=names[row.id],
            from_version=service.catalog.by_id(row.version_id).name,
            embedding=base64.b64encode(row.vector).decode() if inputs else None,
            side=base64.b64encode(row.side).decode() if inputs and row.side is not None else None,
        )
        for row in chunks.read_embeddings(connection, chunk)
    ]


def _names(connection: Connection, chunk: Chunk) -> dict[int, str]:
    rows = connection.execute(select(item.c.id, item.c.external_id).where(item.c.id.in_(chunk.item_ids)))
    return {row.id: row.external_id for row in rows}


def _check_complete(connection: Connection, chunk: Chunk, body: ResultIn) -> None:
    given = [*(m.item for m in body.moved), *(f.item for f in body.failed)]
    if foreign := set(given) - set(chunk.item_ids):
        raise InvalidBody(f"item {min(foreign)} is not of this chunk", pointer="/moved")
    if len(given) > len(set(given)):
        raise InvalidBody("an item is named twice", pointer="/moved")
    if left := set(chunks.still_waiting(connection, chunk)) - set(given):
        raise InvalidBody(f"{len(left)} items of the chunk are missing, item {min(left)} is one", pointer="/moved")


def _moved(target: Registered, kind: Kind, given: list[MovedIn]) -> Moved:
    vectors = [_vector(target, m.vector, f"/moved/{number}/vector") for number, m in enumerate(given)]
    sides = [_side(target, kind, m.side, f"/moved/{number}/side") for number, m in enumerate(given)]
    side = _all_or_none(sides, "side")
    unsure = _all_or_none([m.uncertainty for m in given], "uncertainty")
    return Moved([m.item for m in given], [m.seq for m in given], np.stack(vectors), side, unsure)


def _vector(target: Registered, text: str, pointer: str) -> Vectors:
    space = space_from_json(dict(target.card.space))
    vector = _floats(text, pointer)
    (checked,) = check_vectors(vector, target.card.dim, space, pointer=pointer)
    off = abs(float(np.linalg.norm(vector.astype(np.float64))) - 1) if isinstance(space, Cosine) else 0.0
    if off > UNIT_TOLERANCE:
        raise InvalidVector(f"its length is {float(np.linalg.norm(vector)):.4g}, not 1", pointer=pointer)
    # One that is normalised already: once more would change last bits, and a local worker's differ.
    return vector if off < ROUNDING else checked


def _side(target: Registered, kind: Kind, text: str | None, pointer: str) -> Vectors | None:
    side = None if text is None else _floats(text, pointer)
    width = target.card.side_dim if side is not None or kind is Kind.REENCODE else 0
    if (0 if side is None else len(side)) != width:
        raise InvalidVector(f"side must be {width} numbers of side-information", pointer=pointer)
    if side is not None and not np.isfinite(side).all():
        raise InvalidVector("side-information must be finite", pointer=pointer)
    return side


def _all_or_none(values: list[Any], field: str) -> Vectors | None:
    """One array of what every item, or no item, has."""
    without = [number for number, value in enumerate(values) if value is None]
    if len(without) == len(values):
        return None
    if without:
        raise InvalidBody(f"{field} is given of some items only", pointer=f"/moved/{without[0]}/{field}")
    return np.array(values, np.float32)


def _floats(text: str, pointer: str) -> Vectors:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidVector("must be base64 of little-endian float32 numbers", pointer=pointer) from None
    if len(raw) % STORED.itemsize:
        raise InvalidVector(f"{len(raw)} bytes are no whole number of float32 numbers", pointer=pointer)
    return np.frombuffer(raw, STORED).astype(np.float32)
