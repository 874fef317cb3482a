"""`RemoteWorker`: a backfill worker on a machine without access to the database; the steps of a local one, over HTTP.

It only needs the worker key: versions and edges are fetched from the service, verified by the sha256 that the service
states, and cached in a folder.
"""

from __future__ import annotations

import base64
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from index.edges.transform import Forward
from index.encoders.decoding import Decoder
from index.errors import RegraftError
from index.events import Event
from index.execution import ONE_THREAD, Execution
from index.isolated import Limits
from regraft.client import Client, Problem
from regraft.ingest_batch import TOO_LARGE
from regraft.models import WorkClaim, WorkItem
from regraft.remote_folders import FetchedFolders, TaskVersions
from service.backfills.embedder import Embedder
from service.backfills.outcome import Compute, EmbeddedItems, Failed, Outcome
from service.backfills.pipeline import Pipeline
from service.store.image_store.keys import TEXT
from service.store.leases.heartbeats import Leases

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.2
MAX_IDLE_SECONDS = 5.0
"""The first and the longest pause between two claims without work."""

UNAUTHORIZED, FORBIDDEN = 401, 403

Json = dict[str, Any]
Originals = Callable[[str], bytes]
"""Reads images and texts that a device holds itself: item id -> content. Raises FileNotFoundError if it has none."""


@dataclass(frozen=True)
class TaskItem:
    """An item of a chunk; `blob` is the key of its image or text in `_TaskContents`."""

    id: int
    seq: int
    blob: str = ""
    version_id: int = 0
    vector: bytes = b""
    side: bytes | None = None


class WorkerKeyRefused(RegraftError):
    """The service does not accept the key of a remote worker."""

    status = UNAUTHORIZED
    code = "unauthorized"

    def __init__(self, url: str) -> None:
        super().__init__(f"{url} requires its worker key: --key or REGRAFT_WORKER_KEY is missing or wrong")


class RemoteWorker:
    """Works on chunks of one service until `stop` is set."""

    def __init__(
        self,
        client: Client,
        folder: Path,
        stop: threading.Event,
        *,
        execution: Execution = ONE_THREAD,
        max_pixels: int = 50_000_000,
        originals: Originals | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        apis: Collection[str] = (),
    ) -> None:
        """Create a worker; `work` runs it.

        Args:
            client: a client with the worker key.
            folder: the cache of version and edge folders.
            stop: ends the work; the current chunk is finished.
            execution: threads and device of encoders.
            max_pixels: larger images are refused.
            originals: reads images and texts on this device; None: fetch them from the service.
            limits: limits of verifying a fetched version.
            apis: URLs of the embedding APIs that versions may call.
        """
        self.name = f"{socket.gethostname()[:40]}:{uuid.uuid4().hex[:8]}"
        self._client = client
        self._stop = stop
        self._originals = originals
        self._folders = FetchedFolders(client, folder, execution, limits, apis)
        self._transforms: dict[int, Forward] = {}
        self._decoder = Decoder(max_pixels)
        self._leases: Leases[WorkClaim] | None = None
        self._refused: RegraftError | None = None
        self._away_since: float | None = None

    def work(self) -> None:
        """Run until stopped; inputs are read ahead, results are sent behind. Raises WorkerKeyRefused or Problem."""
        self._log("worker_started", url=self._client.url)
        Pipeline(self._next, self._load, self._finish, self._release, self._stop).run()
        if self._leases is not None:
            self._leases.close()
        self._log("worker_stopped")
        if self._refused is not None:
            raise self._refused

    def _next(self) -> WorkClaim | None:
        idle = IDLE_SECONDS
        while not self._stop.is_set():
            if claimed := self._claim():
                return claimed
            self._stop.wait(idle)
            idle = min(2 * idle, MAX_IDLE_SECONDS)
        return None

    def _claim(self) -> WorkClaim | None:
        try:
            task = self._client.claim_work(self.name)
        except RegraftError as error:
            if error.status in {UNAUTHORIZED, FORBIDDEN}:
                self._refused = WorkerKeyRefused(self._client.url) if error.status == UNAUTHORIZED else error
                self._stop.set()
                return None
            if self._away_since is None:
                self._away_since = time.monotonic()
                self._log("service_away", reason=error.message)
            return None
        if self._away_since is not None:
            self._log("service_back", seconds=round(time.monotonic() - self._away_since, 1))
            self._away_since = None
        if task is None:
            return None
        if self._leases is None:
            self._leases = Leases(self._extend, task.lease_seconds)
        self._leases.hold(task)
        return task

    def _load(self, task: WorkClaim) -> Iterator[Compute]:
        target = self._folders.version(task.version, task.card_sha256)
        versions = TaskVersions(self._folders, task.version, task.edges)
        for items in self._items(task):
            embedder = Embedder(versions, _TaskContents(items, self._originals), self._decoder, self._transforms)
            if task.kind == "reencode":
                yield from embedder.reencode(target, [TaskItem(i.item, i.seq, _key(i)) for i in items])
            else:
                yield from embedder.transform(target, [self._stored(versions, i) for i in items])

    def _items(self, task: WorkClaim) -> Iterator[Sequence[WorkItem]]:
        """The items of a chunk, page by page."""
        cursor: str | None = ""
        while cursor is not None:
            page = self._client.work(task.chunk, task.lease, inputs=self._originals is None, cursor=cursor)
            yield page.items
            cursor = page.next

    def _stored(self, versions: TaskVersions, item: WorkItem) -> TaskItem:
        assert item.from_version is not None
        assert item.embedding is not None
        old = versions.start(item.from_version)
        side = None if item.side is None else base64.b64decode(item.side)
        return TaskItem(item.item, item.seq, version_id=old.id, vector=base64.b64decode(item.embedding), side=side)

    def _finish(self, task: WorkClaim, outcome: Outcome) -> None:
        moved, failed = outcome
        result = {
            "moved": [row for each in moved for row in _moved(each)],
            "failed": [_failed(f) for f in failed],
            "edges": [edge.id for edge in task.edges],
        }
        try:
            counts = self._client.return_work(task.chunk, task.lease, result)
        except RegraftError as error:
            if moved and isinstance(error, Problem) and error.status == TOO_LARGE:
                # It would be as large again, and is told where a backfill tells of failures, not only here.
                self._finish(task, ([], [*failed, *_too_large(moved, error)]))
                return
            taken = error.code in {"chunk_lost", "edge_replaced"}
            self._release(task, failed=not taken)
            self._log(error.code if taken else "chunk_refused", chunk=task.chunk, reason=error.message)
        else:
            self._drop(task)
            self._log("chunk_done", chunk=task.chunk, **counts.model_dump())

    def _release(self, task: WorkClaim, failed: bool) -> None:
        self._drop(task)
        try:
            self._client.release_work(task.chunk, task.lease, failed=failed)
        except RegraftError as error:
            self._log("chunk_not_released", chunk=task.chunk, reason=error.message)

    def _extend(self, task: WorkClaim) -> None:
        try:
            self._client.extend_work(task.chunk, task.lease)
        except RegraftError as error:
            self._log("lease_not_extended", chunk=task.chunk, reason=error.message)

    def _drop(self, task: WorkClaim) -> None:
        if self._leases is not None:
            self._leases.drop(task)

    def _log(self, action: str, **details: object) -> None:
        logger.info(Event(action, worker=self.name, **details))


class _TaskContents:
    """The images and texts of one page of items, by `_key`."""

    def __init__(self, items: Sequence[WorkItem], originals: Originals | None) -> None:
        self._items: Mapping[str, WorkItem] = {_key(item): item for item in items}
        self._originals = originals

    def read_all(self, keys: Iterable[str]) -> Iterator[Callable[[], bytes]]:
        return (partial(self._read, key) for key in keys)

    def _read(self, key: str) -> bytes:
        item = self._items[key]
        if self._originals is not None:
            return self._originals(item.id)
        if item.problem is not None:
            raise OSError(item.problem)
        content = item.text if item.is_text else item.image
        if content is None:
            raise FileNotFoundError(key)
        return base64.b64decode(content)


def _key(item: WorkItem) -> str:
    return f"{item.item}{TEXT if item.is_text else ''}"


def _moved(moved: EmbeddedItems) -> list[Json]:
    return [
        {
            "item": moved.item_ids[number],
            "seq": moved.seqs[number],
            "vector": _text(vector),
            "side": None if moved.side is None else _text(moved.side[number]),
            "uncertainty": None if moved.uncertainty is None else float(moved.uncertainty[number]),
        }
        for number, vector in enumerate(moved.vectors)
    ]


def _failed(failed: Failed) -> Json:
    return {
        "item": failed.item_id,
        "seq": failed.seq,
        "reason": failed.line,
        "code": failed.code,
        "retry": failed.retry,
    }


def _too_large(moved: Sequence[EmbeddedItems], error: Problem) -> Iterator[Failed]:
    reason = f"the chunk's result is too large for the service or a proxy before it: {error.detail}"
    for each in moved:
        for item_id, seq in zip(each.item_ids, each.seqs, strict=True):
            yield Failed(item_id, seq, reason)


def _text(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
