"""The fast path of queries whose body is JSON or an array; it bypasses the framework. See `QueryRoute`.

FastAPI only describes the route and handles forms (`search.search`). A small query is read and answered on the event
loop, if that takes less time than handing it to a thread; a larger one is handed over once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from fastapi import FastAPI
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from index.metadata.filter import parse_filter
from service.http.bodies.arrow import ARROW, pyarrow
from service.http.bodies.media_types import JSON, check_encoding, type_of
from service.http.bodies.npy import NPY
from service.http.requests.checked_route import check_parameters
from service.http.search.batcher import QueryBatcher
from service.http.search.request import OPTIONS, fields_of, fields_of_arrow, fields_of_npy, from_fields
from service.http.search.search import QUERY_KEY, ReadRequest, WriteAnswer, respond, writer_of
from service.http.server.auth import Count, Exchange, Guard
from service.replica.loaded import LoadedGallery
from service.runtime import Runtime
from service.settings import Settings

PATH = re.compile(r"/v1/galleries/([^/]+)/query")
KINDS = {JSON, NPY, ARROW}
KEY_HEADER = QUERY_KEY.lower().encode()
ARRAY_OPTIONS = sorted({*OPTIONS, "version"})
"""Query parameters if the body is an array."""

# Limits of what the event loop does itself: one or two tenths of a millisecond.
READ_BYTES = 1 << 16
COMPARED_NUMBERS = 1 << 21  # such as those of 16,384 items of dimension 128
SHOWN_MATCHES = 256

SLOW = {"texts", "items", "with_text"}
"""Fields whose queries wait for an encoder or the database."""
SLOW_WORDS = tuple(b'"%s"' % name.encode() for name in sorted(SLOW))
SEARCHED_ALONE = {*SLOW, "filter", "cursor", "explain"}
"""Fields of queries that are not batched with others."""

ReadFields = Callable[[bytes], Mapping[str, Any]]


class QueryRoute:
    """ASGI middleware: answers `POST /v1/galleries/{name}/query` in JSON or an array, and passes on everything else."""

    def __init__(self, app: ASGIApp, api: FastAPI, settings: Settings, count: Count) -> None:
        """`app`: answers everything else, and has its own guard; `count` counts every query here."""
        self.app = app
        self._api = api
        self._guarded = Guard(self._answer, settings, count)
        self._batcher = QueryBatcher()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        is_query = scope["type"] == "http" and scope["method"] == "POST" and PATH.fullmatch(scope["path"])
        if is_query and _media_type(scope) in KINDS:
            scope["app"] = self._api
            await self._guarded(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await _answered(self._api.state.runtime, self._batcher, scope, receive)
        except Exception as error:
            handlers = dict(self._api.exception_handlers)
            await ExceptionMiddleware(_raising(error), handlers=handlers)(scope, receive, send)
        else:
            await response(scope, receive, send)


def _raising(error: Exception) -> ASGIApp:
    async def fail(*_: object) -> None:
        raise error

    return fail


class RawQuery(NamedTuple):
    """A query before it is read; `key` keeps its client on one version during a canary."""

    exchange: Exchange
    name: str
    read: ReadFields
    raw: bytes
    key: str | None
    write: WriteAnswer


async def _answered(service: Runtime, batcher: QueryBatcher, scope: Scope, receive: Receive) -> Response:
    exchange: Exchange = scope["state"]["exchange"]
    headers = exchange.headers
    kind = type_of(headers[b"content-type"].decode("latin-1"))
    check_encoding(headers.get(b"content-encoding", b"").decode("latin-1"))
    read: ReadFields = fields_of
    if scope["query_string"] or kind != JSON:
        read = _reading(service, Request(scope, receive), kind)
    if kind == JSON:
        exchange.bound(service.settings.max_json_bytes)
    name = scope["path"].split("/")[3]
    write = writer_of(headers.get(b"accept", b"").decode("latin-1"))
    key = headers.get(KEY_HEADER)
    query = RawQuery(exchange, name, read, await _body(receive), None if key is None else key.decode("latin-1"), write)
    return await _response(service, batcher, query)


def _reading(service: Runtime, request: Request, kind: str) -> ReadFields:
    """The reader of a body whose options may be query parameters."""
    check_parameters(request, [] if kind == JSON else ARRAY_OPTIONS)
    if kind == NPY:
        return partial(fields_of_npy, dict(request.query_params))
    if kind == ARROW:
        pyarrow()
        return partial(fields_of_arrow, dict(request.query_params), service.settings.max_batch)
    return fields_of


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _response(service: Runtime, batcher: QueryBatcher, query: RawQuery) -> Response:
    exchange, name, read, raw, key, write = query

    async def respond_on_thread(slow: bool, read_request: ReadRequest) -> Response:
        """Respond on one of the many threads if `slow` (it may wait long), else on one of the few for searches."""
        run = service.run_blocking if slow else service.run_search
        with exchange.cancelled_on_disconnect():
            return await run(respond, service, name, read_request, key, write)

    if (loaded := batcher.gallery(service, name)) is None:
        await service.ensure_loaded(name)
        loaded = service.replica.find_cached(name)
    if loaded is None or len(raw) > READ_BYTES or not loaded.is_declared():
        # Loading a gallery that was unloaded meanwhile takes seconds.
        slow = any(word in raw for word in SLOW_WORDS) or not service.replica.is_loaded(name)
        return await respond_on_thread(slow, lambda loaded: from_fields(service, loaded, read(raw)))
    body = read(raw)
    if _is_small(loaded, body):
        response = await batcher.answer(service, loaded, from_fields(service, loaded, body), write)
        if response is not None:
            return response
    parsed = None if body.get("filter") is None else parse_filter(body["filter"])
    checked = body if parsed is None else {**body, "filter": parsed}
    # The first filter on a field reads every item.
    slow = not SLOW.isdisjoint(body) or (parsed is not None and not loaded.gallery.filterable(parsed))
    return await respond_on_thread(slow, lambda loaded: from_fields(service, loaded, checked))


def _is_small(loaded: LoadedGallery, body: Mapping[str, Any]) -> bool:
    """Whether a query of embeddings takes less time than handing it to a thread, as does refusing an invalid one."""
    version, embeddings, k = body.get("version"), body.get("embeddings"), body.get("k", 10)
    if not SEARCHED_ALONE.isdisjoint(body):
        return False
    if not (isinstance(version, str) and isinstance(embeddings, (list, np.ndarray)) and isinstance(k, int)):
        return True
    if len(embeddings) * k > SHOWN_MATCHES:
        return False
    width = len(embeddings[0]) if len(embeddings) and isinstance(embeddings[0], (list, np.ndarray)) else 1
    return len(embeddings) * width * loaded.gallery.rows_scanned(version) <= COMPARED_NUMBERS


def _media_type(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"content-type":
            return type_of(value.decode("latin-1"))
    return ""
