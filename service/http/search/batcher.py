"""Micro-batching: small queries that arrive in one pass of the event loop share one database lookup and one search.

If queries were read, searched and written one after the other, these steps would evict each other's data from the CPU
caches, since a search reads megabytes. So all queries of a round are first read, then searched together, which takes
one plan, one lock and one merge, and then written. A query that arrives alone is a round by itself.

One batcher serves one event loop, without locks. A round ends in a callback that is queued behind all requests that had
arrived before it. So what a round looked up is newer than the sending of each of its queries.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from functools import partial
from typing import NamedTuple

import numpy as np
from starlette.responses import Response

from index.errors import InvalidArgument
from index.space import Vectors
from service.http.search.answer import Page
from service.http.search.request import SearchRequest
from service.http.search.search import WriteAnswer, respond
from service.replica.loaded import LoadedGallery
from service.runtime import Runtime

MAX_BATCH = 16
"""Most queries that are searched together; from 20 queries on, FAISS uses another kernel, which rounds differently."""


class PendingQuery(NamedTuple):
    """A checked request of one part, its time of arrival, and its future response; None: search it on a thread."""

    request: SearchRequest
    write: WriteAnswer
    started: float
    response: asyncio.Future[Response | None]


class QueryBatcher:
    """Collects the queries of a round, as described above; one for each event loop."""

    def __init__(self) -> None:
        self._scheduled = False
        self._galleries: dict[str, LoadedGallery | None] = {}
        # By gallery, version and options, which must be equal to be searched together. Equal options are one object,
        # see `service.http.search.request`.
        self._pending: dict[tuple[LoadedGallery, str, int], list[PendingQuery]] = {}

    def gallery(self, service: Runtime, name: str) -> LoadedGallery | None:
        """As `Replica.find_cached`, looked up once per round."""
        if name not in self._galleries:
            self._schedule(service)
            self._galleries[name] = service.replica.find_cached(name)
        return self._galleries[name]

    def answer(
        self, service: Runtime, loaded: LoadedGallery, request: SearchRequest, write: WriteAnswer
    ) -> asyncio.Future[Response | None]:
        """The future response to a request of one part, which is searched with the others of this round.

        Its result is None if the gallery is being written: then search on a thread, which may wait.
        """
        version = request.parts[0].version
        assert version is not None  # `embeddings` name theirs
        self._schedule(service)
        pending = PendingQuery(request, write, time.perf_counter(), asyncio.get_running_loop().create_future())
        self._pending.setdefault((loaded, version, id(request.params)), []).append(pending)
        return pending.response

    def _schedule(self, service: Runtime) -> None:
        if not self._scheduled:
            self._scheduled = True
            # An empty context, as a log line about several requests belongs to none of them.
            asyncio.get_running_loop().call_soon(self._run, service, context=Context())

    def _run(self, service: Runtime) -> None:
        groups, self._pending = self._pending, {}
        self._galleries, self._scheduled = {}, False
        for (loaded, version, _), pending in groups.items():
            for batch in _batches(pending):
                is_free = loaded.gallery.rows_scanned(version) < math.inf
                _resolve(
                    batch, partial(_search_batch, service, loaded, batch) if is_free else partial(_declined, batch)
                )


def _batches(pending: Sequence[PendingQuery]) -> Iterator[list[PendingQuery]]:
    """The queries in their order, in batches of at most MAX_BATCH that are searched together."""
    batch: list[PendingQuery] = []
    queries = 0
    for query in pending:
        queries += len(query.request.parts[0].pointers)
        if batch and queries > MAX_BATCH:
            yield batch
            batch, queries = [], len(query.request.parts[0].pointers)
        batch.append(query)
    yield batch


def _resolve(batch: Sequence[PendingQuery], answer: Callable[[], Sequence[Response | None]]) -> None:
    """Set the response of each query, or the error of all; a cancelled one needs none."""
    try:
        answers = answer()
    except Exception as error:
        for pending in batch:
            if not pending.response.done():
                pending.response.set_exception(error)
    else:
        for pending, result in zip(batch, answers, strict=True):
            if not pending.response.done():
                pending.response.set_result(result)


def _declined(batch: Sequence[PendingQuery]) -> list[None]:
    return [None] * len(batch)


def _search_batch(service: Runtime, loaded: LoadedGallery, batch: Sequence[PendingQuery]) -> Sequence[Response | None]:
    """The responses to requests of one gallery, version and options, by one search; None as in `_declined`."""

    def write(_: SearchRequest, pages: Sequence[Page], __: float) -> list[Response]:
        (found,), responses, end = pages, [], 0
        for query in batch:
            (part,), start, end = query.request.parts, end, end + len(query.request.parts[0].pointers)
            shown = found.results[start:end], found.more[start:end]
            page = Page(part, found.answer, *shown, found.fetch_seconds)
            responses.append(query.write(query.request, [page], time.perf_counter() - query.started))
        return responses

    merged = _merged([query.request for query in batch])
    try:
        return respond(service, loaded.name, lambda _: merged, None, write, loaded)
    except InvalidArgument:
        if len(batch) == 1:
            raise
        # All matches together may show more than a response may hold, although those of each request do not.
        return _declined(batch)


def _merged(batch: Sequence[SearchRequest]) -> SearchRequest:
    """One request with the queries of all."""
    if len(batch) == 1:
        return batch[0]
    parts = [request.parts[0] for request in batch]
    pointers = [pointer for part in parts for pointer in part.pointers]
    exclude_keys = [key for part in parts for key in part.exclude_keys]

    def encode(version: str) -> Vectors:
        return np.concatenate([part.encode(version) for part in parts])

    return batch[0]._replace(parts=[parts[0]._replace(pointers=pointers, encode=encode, exclude_keys=exclude_keys)])
