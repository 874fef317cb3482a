"""Small queries that come in one pass of the event loop share a look at the database, and a search.

What is read, searched and written one after the other for each of them leaves nothing of the others in the processor's
caches, for a search goes through megabytes. Here all that have come are read first, then searched in a row - which
takes one plan, one lock and one merge - and then written. A query that comes alone is a round of its own.

Of one event loop, and without locks. A round ends as a callback that was put behind all that had come before: whatever
it found out was looked up after the last of its queries was sent.
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

from index.space import Vectors
from service.http.search import WriteAnswer, respond
from service.http.search_answer import Page
from service.http.search_request import SearchRequest
from service.replica.loaded import LoadedGallery
from service.runtime import Runtime

TOGETHER = 16
"""Requests that are searched as one; from 20 queries on FAISS compares by another kernel, which rounds otherwise."""


class Waiting(NamedTuple):
    """A checked request of one embedding, when it came, and who is told its answer; None: ask by yourself."""

    asked: SearchRequest
    write: WriteAnswer
    started: float
    told: asyncio.Future[Response | None]


class Rounds:
    """See the module."""

    def __init__(self) -> None:
        self._begun = False
        self._known: dict[str, LoadedGallery | None] = {}
        # What can be searched together: a gallery, a version and options, which are the same object where they are the
        # same, see `service.http.search_request`.
        self._waiting: dict[tuple[LoadedGallery, str, int], list[Waiting]] = {}

    def known(self, service: Runtime, name: str) -> LoadedGallery | None:
        """As `Replica.known`, asked once a round."""
        if name not in self._known:
            self._begin(service)
            self._known[name] = service.replica.known(name)
        return self._known[name]

    def answer(
        self, service: Runtime, live: LoadedGallery, asked: SearchRequest, write: WriteAnswer
    ) -> asyncio.Future[Response | None]:
        """Will be the answer to a request of one part, found with the others of this round.

        None: the gallery is being written, and whoever waits for it should do so on a thread.
        """
        version = asked.parts[0].version
        assert version is not None  # there is one beside embeddings
        self._begin(service)
        waiting = Waiting(asked, write, time.perf_counter(), asyncio.get_running_loop().create_future())
        self._waiting.setdefault((live, version, id(asked.params)), []).append(waiting)
        return waiting.told

    def _begin(self, service: Runtime) -> None:
        if not self._begun:
            self._begun = True
            # What is logged of several requests is none's.
            asyncio.get_running_loop().call_soon(self._end, service, context=Context())

    def _end(self, service: Runtime) -> None:
        groups, self._waiting = self._waiting, {}
        self._known, self._begun = {}, False
        for (live, version, _), waiting in groups.items():
            for few in _few(waiting):
                is_free = live.gallery.rows_scanned(version) < math.inf
                _tell(few, partial(_searched, service, live, few) if is_free else partial(_nothing, few))


def _few(waiting: Sequence[Waiting]) -> Iterator[list[Waiting]]:
    """Those that are searched together, in their order."""
    few: list[Waiting] = []
    queries = 0
    for one in waiting:
        queries += len(one.asked.parts[0].pointers)
        if few and queries > TOGETHER:
            yield few
            few, queries = [], len(one.asked.parts[0].pointers)
        few.append(one)
    yield few


def _tell(few: Sequence[Waiting], answer: Callable[[], Sequence[Response | None]]) -> None:
    """Give each its answer, or all the error; one that was cancelled needs none."""
    try:
        answers = answer()
    except Exception as error:
        for one in few:
            if not one.told.done():
                one.told.set_exception(error)
    else:
        for one, response in zip(few, answers, strict=True):
            if not one.told.done():
                one.told.set_result(response)


def _nothing(few: Sequence[Waiting]) -> list[None]:
    return [None] * len(few)


def _searched(service: Runtime, live: LoadedGallery, few: Sequence[Waiting]) -> list[Response]:
    """The answers to requests that are asked alike, by one search."""

    def write(_: SearchRequest, pages: Sequence[Page], __: float) -> list[Response]:
        (found,), responses, end = pages, [], 0
        for one in few:
            (part,), start, end = one.asked.parts, end, end + len(one.asked.parts[0].pointers)
            shown = found.results[start:end], found.more[start:end]
            page = Page(part, found.answer, *shown, found.fetch_seconds)
            responses.append(one.write(one.asked, [page], time.perf_counter() - one.started))
        return responses

    asked = _joined([one.asked for one in few])
    return respond(service, live.name, lambda _: asked, None, write, live)


def _joined(few: Sequence[SearchRequest]) -> SearchRequest:
    """One request of them all."""
    if len(few) == 1:
        return few[0]
    parts = [asked.parts[0] for asked in few]
    pointers = [pointer for part in parts for pointer in part.pointers]
    alone = [key for part in parts for key in part.exclude_keys]

    def encode(version: str) -> Vectors:
        return np.concatenate([part.encode(version) for part in parts])

    return few[0]._replace(parts=[parts[0]._replace(pointers=pointers, encode=encode, exclude_keys=alone)])
