"""Routes of remote workers, which have no access to the database: claim, fetch and return chunks by the worker key.

A remote worker holds a chunk by the same lease as a local one. Its results are checked, as they come from outside, and
then committed by the same code. Vectors are base64 of little-endian float32.
"""

from __future__ import annotations

import base64
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import FailFast, Field
from sqlalchemy import Connection, select
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from index.errors import RegraftError
from index.version_folder.archive import pack_version
from regraft.models import WorkClaim, WorkCounts, WorkEdge, WorkInputs, WorkItem
from service.backfills import chunks, leasing
from service.backfills.chunks import Chunk, ChunkLost
from service.backfills.outcome import Failed
from service.backfills.planning import finish_or_replan
from service.backfills.states import BackfillState, Kind
from service.http.backfills.remote_results import ResultIn, check_complete, check_edges, checked, encoded_images
from service.http.bodies.schemas import gives
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.cursors import decode_cursor, encode_cursor
from service.http.requests.dependencies import Service
from service.registry.edge_archive import fingerprint, pack
from service.registry.edge_records import EdgeRecord
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import version_order_to
from service.runtime import Runtime
from service.schemas import NO_ZERO, Body, Name, Number
from service.store.galleries import partitions
from service.store.image_store.keys import is_text
from service.store.sql.arrays import blocks, key_table
from service.store.tables import item
from service.upgrades.edges.changes import UnknownEdge

router = APIRouter(route_class=CheckedRoute, tags=["work"])

Lease = Annotated[str, Query(min_length=1, max_length=128, pattern=NO_ZERO)]
RemoteKind = Literal["reencode", "transform"]
Word = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")]


MOST_HELD = 8
"""Chunks that one remote worker may hold: it reads two ahead of the one it computes, and returns one behind."""
MOST_REMOTE = 512
"""Chunks that all remote workers together may hold, so that workers that hang leave some to local ones."""
MOST_SENT = 32 << 20
"""Characters of images and texts (base64) after which a page ends; memory holds them about three times."""

READ_AT_ONCE = 4
"""Images and texts that are read concurrently; a page may exceed `MOST_SENT` by one less."""


class TooManyChunks(RegraftError):
    """Remote workers hold the maximum number of chunks."""

    status = 409
    code = "too_many_chunks"


class ClaimIn(Body):
    """The name of the worker, and the kinds of backfills that it can work on."""

    worker: Word
    kinds: Annotated[list[RemoteKind], FailFast(), Field(max_length=2)] = Field(["reencode", "transform"])


@router.post("/work:claim", response_model=WorkClaim, responses={204: {"description": "nothing to do"}})
def claim(body: ClaimIn, service: Service) -> Any:
    """Claim the next chunk; 204 if there is none."""
    owner = f"{leasing.REMOTE}{body.worker}:{uuid.uuid4().hex}"
    chunk = _claim(service, owner, [Kind(kind) for kind in body.kinds])
    if chunk is None:
        states = finish_or_replan(service.database, service.registry, service.embedder, service.stopping)
        if BackfillState.RUNNING in states.values():
            chunk = _claim(service, owner, [Kind(kind) for kind in body.kinds])
    if chunk is None:
        return Response(status_code=204)
    try:
        return _described(service, chunk)
    except BaseException:
        # The worker does not get the lease, so it could not give the chunk back.
        with service.database.write() as connection:
            leasing.release(connection, chunk)
        raise


@router.get("/work/{chunk}")
def fetch(chunk: Number, lease: Lease, service: Service, inputs: bool = True, cursor: str | None = None) -> WorkInputs:
    """List the items of a claimed chunk with embeddings, or with images and texts unless the worker has its own.

    With a `cursor`, at first "": one page at a time if images are large; `next` is the cursor of the next page.
    Without it: all items, for workers without paging.
    """
    after = decode_cursor(chunk, cursor or "")
    with service.database.read() as connection:
        held = leasing.leased_chunk(connection, chunk, lease)
        behind = replace(held, item_ids=tuple(key for key in held.item_ids if key > after))
        if held.kind is Kind.TRANSFORM:
            return WorkInputs(items=_with_embeddings(service, connection, behind))
        rows, names = sorted(chunks.read_contents(connection, behind)), _names(connection, behind)
    items = _with_contents(service, rows, names, inputs, math.inf if cursor is None else MOST_SENT)
    next_cursor = encode_cursor(chunk, items[-1].item) if len(items) < len(rows) else None
    return WorkInputs(items=items, next=next_cursor)


@router.post("/work/{chunk}")
def give(chunk: Number, lease: Lease, body: ResultIn, service: Service) -> WorkCounts:
    """Commit a chunk's results after checking them; refused results leave the lease unchanged."""
    with service.database.read() as connection:
        held = leasing.leased_chunk(connection, chunk, lease)
        check_complete(connection, held, body)
        images = encoded_images(connection, held)
    moved = checked(service.registry.by_id(held.version_id), images, body.moved)
    failed = [Failed(f.item, f.seq, f.reason, f.code, f.retry) for f in body.failed]
    partitions.make(service.database, held.gallery_id, held.version_id)
    with service.database.write() as connection:
        counts = chunks.commit(connection, held, moved, failed)
        # Under the gallery's lock, which a replacement of an edge takes, too.
        check_edges(connection, body)
    return WorkCounts(**counts)


@router.post("/work/{chunk}/extend")
def extend(chunk: Number, lease: Lease, service: Service) -> dict[str, float]:
    """Renew the lease of a chunk (heartbeat)."""

    def prolong(connection: Connection, held: Chunk) -> None:
        if not leasing.extend(connection, held, service.settings.lease_seconds):
            raise ChunkLost("another worker took the chunk over")

    _on(service, chunk, lease, prolong)
    return {"lease_seconds": service.settings.lease_seconds}


@router.post("/work/{chunk}/release", status_code=204)
def release(chunk: Number, lease: Lease, service: Service, failed: bool = False) -> None:
    """Release a chunk undone: it is free at once, or, if it failed, when its lease expires."""
    _on(service, chunk, lease, leasing.abandon if failed else leasing.release)


@router.get("/work/versions/{name}", response_class=FileResponse, responses=gives("application/zip"))
def archive(name: Name, service: Service) -> FileResponse:
    """Get a version folder as a .zip, for a worker that runs it."""
    registered = service.registry.named(name)
    registered.check_folder()
    key = ("version", name, registered.card_sha256)
    return _Download(service.packed.fetching(key, partial(pack_version, registered.version.folder)))


@router.get("/work/edges/{number}", response_class=FileResponse, responses=gives("application/zip"))
def edge_archive(number: Number, service: Service) -> FileResponse:
    """Get an edge folder as a .zip, for a worker that applies it; 404 once it was replaced."""
    service.registry.sync_edges()
    declared = next((d for d in service.registry.edges() if d.id == number), None)
    if declared is None:
        raise UnknownEdge(f"edge number {number} does not exist or was replaced")
    edge = declared.edge
    with service.registry.opening(edge):
        return _Download(service.packed.fetching(("edge", number, fingerprint(edge)), partial(pack, edge)))


def _described(service: Runtime, chunk: Chunk) -> WorkClaim:
    target = service.registry.by_id(chunk.version_id)
    target.check()
    return WorkClaim(
        chunk=chunk.id,
        lease=chunk.owner,
        lease_seconds=service.settings.lease_seconds,
        backfill=chunk.backfill_id,
        kind=chunk.kind,
        version=target.name,
        card_sha256=target.card_sha256,
        items=len(chunk.item_ids),
        edges=_edges(service, target) if chunk.kind is Kind.TRANSFORM else [],
    )


class _Download(FileResponse):
    """A response with an archive, which is released when it is sent or the client disconnects."""

    def __init__(self, fetching: AbstractContextManager[Path]) -> None:
        super().__init__(fetching.__enter__(), media_type="application/zip")
        self._fetching = fetching

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._fetching.__exit__(None, None, None)


def _edges(service: Runtime, target: LoadedVersion) -> list[WorkEdge]:
    return [_work_edge(service, d) for d in service.registry.item_edges_to(target) if not d.problem]


def _work_edge(service: Runtime, declared: EdgeRecord) -> WorkEdge:
    old = service.registry.named(declared.edge.old)
    return WorkEdge(
        id=declared.id,
        sha256=fingerprint(declared.edge),
        old=old.name,
        old_card_sha256=old.card_sha256,
    )


def _claim(service: Runtime, owner: str, kinds: list[Kind]) -> Chunk | None:
    with service.database.lookup() as connection:
        if not leasing.claimable(connection, kinds):
            return None
    with service.database.write() as connection:
        _check_share(leasing.lease_owners(connection, leasing.REMOTE), owner)
        return leasing.claim(connection, owner, service.settings.lease_seconds, kinds)


def _check_share(holders: Sequence[str], owner: str) -> None:
    worker = leasing.worker_of(owner)
    own = sum(leasing.worker_of(holder) == worker for holder in holders)
    for held, most, who in (
        (own, MOST_HELD, "this worker holds"),
        (len(holders), MOST_REMOTE, "remote workers hold"),
    ):
        if held >= most:
            raise TooManyChunks(f"{who} {held} chunks, the maximum: return or release some first")


def _on(service: Runtime, chunk: int, lease: str, change: Callable[[Connection, Chunk], None]) -> None:
    with service.database.write() as connection:
        change(connection, leasing.leased_chunk(connection, chunk, lease))


def _with_contents(
    service: Runtime, rows: Sequence[chunks.ContentRow], names: Mapping[int, str], inputs: bool, most: float
) -> list[WorkItem]:
    """The rows as items, or the first of them: none after `most` characters of images and texts."""
    items: list[WorkItem] = []
    size = 0
    for block in blocks(rows, READ_AT_ONCE):
        if size >= most:
            break
        reads = service.blobs.read_all(row.blob for row in block) if inputs else repeat(None)
        for row, read in zip(block, reads, strict=False):
            content = {} if read is None else _content(row.blob, read)
            size += sum(map(len, content.values()))
            items.append(WorkItem(item=row.id, seq=row.seq, id=names[row.id], is_text=is_text(row.blob), **content))
    return items


def _content(key: str, read: Callable[[], bytes]) -> dict[str, str]:
    try:
        return {"text" if is_text(key) else "image": base64.b64encode(read()).decode()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        return {"problem": str(error)}


def _with_embeddings(service: Runtime, connection: Connection, chunk: Chunk) -> list[WorkItem]:
    names = _names(connection, chunk)
    return [
        WorkItem(
            item=row.id,
            seq=row.seq,
            id=names[row.id],
            from_version=service.registry.by_id(row.version_id).name,
            embedding=base64.b64encode(row.vector).decode(),
            side=None if row.side is None else base64.b64encode(row.side).decode(),
        )
        for row in chunks.read_embeddings(connection, chunk, version_order_to(service.registry, chunk.version_id))
    ]


def _names(connection: Connection, chunk: Chunk) -> dict[int, str]:
    condition = item.c.id.in_(key_table(connection, chunk.item_ids).keys)
    return {
        row.id: row.external_id for row in connection.execute(select(item.c.id, item.c.external_id).where(condition))
    }
