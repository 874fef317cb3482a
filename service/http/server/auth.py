"""The guard in front of every route: authentication, body limits, a problem for unexpected errors, request counts.

Every request passes it, so headers stay bytes: decoding them would slow down each request.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from http import HTTPStatus
from time import perf_counter
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from index.errors import RegraftError
from index.events import CONTEXT, Event
from service.errors import (
    BodyTooLarge,
    DatabaseUnavailable,
    ForeignOrigin,
    OutOfMemory,
    OutOfMemoryCommitted,
    OutOfMemoryUnknown,
    ShuttingDown,
    Unauthorized,
)
from service.http.pages import console
from service.http.server.problems import UNCHANGED, failure_of, problem, problem_of
from service.http.server.scopes import check_allowed
from service.runtime import Runtime
from service.settings import Settings
from service.store.api_keys import PREFIX, ApiKeyRow
from service.store.database.connections import COMMIT_STATE, CommitState

logger = logging.getLogger(__name__)

PUBLIC_PATHS = {"/v1/health", *console.PATHS}
"""Paths that need no key: load balancers have none, and a browser opens the console before a key is entered there."""
BEARER = b"Bearer "
NAMED_KEY = BEARER + PREFIX.encode()
WORK_PATH = "/v1/work"
"""The path of routes that accept the worker key."""
UPLOAD_PATHS = {"/v1/versions"}
"""Paths whose bodies may be as large as a version archive."""


NO_SNIFFING = (b"x-content-type-options", b"nosniff")
"""Header of every response: no stored content is interpreted as a page or a script."""
FORWARDED = b"x-forwarded-"
PROXIES = {b"forwarded", b"via", b"x-real-ip"}
"""Headers that only proxies add."""
OWN_PAGES = {b"none", b"same-origin"}
"""`Sec-Fetch-Site` of addresses that a user entered, and of this service's own pages."""
Count = Callable[[Scope, int, float], None]
"""Counts a request: its scope, the status of its response (0: there was none), and its seconds."""


class ExposedWithoutKey(RegraftError):
    """Listening beyond this machine requires a key: set REGRAFT_API_KEY, or REGRAFT_HOST to 127.0.0.1."""


def check_exposure(settings: Settings) -> None:
    """Raise ExposedWithoutKey if other machines could reach a service without a key."""
    if settings.api_key is None and not is_loopback(settings.host):
        raise ExposedWithoutKey


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _named_key(service: Runtime, authorization: bytes) -> ApiKeyRow | None:
    """The stored API key that the header `Authorization` holds, if there is one."""
    if not authorization.startswith(NAMED_KEY):
        return None
    key = authorization.removeprefix(BEARER)
    if service.keys.find(key) is None:
        try:
            # Other requests wait for the same read: when a client leaves, only its own wait is cancelled.
            await asyncio.shield(asyncio.wrap_future(service.keys.next_refresh()))
        except SQLAlchemyError as error:
            raise DatabaseUnavailable(UNCHANGED) from error
    return service.keys.find(key)


@lru_cache(maxsize=256)
def _without_port(host: bytes) -> str:
    try:
        return urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:  # such as an incomplete IPv6 address
        return ""


@lru_cache(maxsize=256)
def _proxy_header(names: tuple[bytes, ...]) -> bytes | None:
    """The first of these headers that only a proxy adds; cached, as clients repeat their headers."""
    return next((name for name in names if name.startswith(FORWARDED) or name in PROXIES), None)


class Guard:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, settings: Settings, count: Count) -> None:
        self.app = app
        self.settings = settings
        self._count = count
        key, worker_key = settings.api_key, settings.worker_key
        self._expected = None if key is None else BEARER + key.get_secret_value().encode()
        self._worker = None if worker_key is None else BEARER + worker_key.get_secret_value().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = perf_counter()
        headers = dict(reversed(scope["headers"]))
        exchange = Exchange(receive, send, headers, self._limit(scope["path"]))
        commit_state = CommitState()
        COMMIT_STATE.set(commit_state)
        CONTEXT.set({"request": exchange.request_id})
        scope.setdefault("state", {}).update(request_id=exchange.request_id, exchange=exchange, key=None)
        try:
            scope["state"]["who"] = await self._who(scope, headers)
            exchange.bound(exchange.limit)
            await self.app(scope, exchange.receive, exchange.send)
        except RegraftError as error:
            await failure_of(error, scope)(scope, receive, exchange.send)
        except asyncio.CancelledError:
            # Work that a thread has begun still runs to its end. Not raised again: uvicorn would log a failure with its
            # traceback. It closes the connection of a response that is not complete.
            await _end_cancelled(exchange, scope, receive)
        except ClientDisconnect:
            logger.debug(_event("client_left", scope))
        except MemoryError:
            logger.exception(_event("request_out_of_memory", scope))
            if exchange.started:
                raise
            kind = (
                OutOfMemoryUnknown
                if commit_state.committing
                else OutOfMemoryCommitted
                if commit_state.committed
                else OutOfMemory
            )
            await problem_of(kind(), exchange.request_id)(scope, receive, exchange.send)
        except Exception:
            logger.exception(_event("request_failed", scope))
            if exchange.started:
                raise
            detail = f"The service failed; its log says more under request {exchange.request_id}."
            await problem(exchange.request_id, 500, "internal_error", detail)(scope, receive, exchange.send)
        finally:
            self._count(scope, exchange.status, perf_counter() - began)

    async def _who(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """The name of the key that the request has; the key in the settings is called `api_key`.

        Raises:
            Unauthorized, Forbidden: there is no valid key, or it does not allow this.
            ForeignOrigin: see `_check_local`.
        """
        path, authorization = scope["path"], headers.get(b"authorization", b"")
        if authorization[: len(BEARER)].lower() == BEARER.lower():  # the name of a scheme has no case (RFC 9110, 11.1)
            authorization = BEARER + authorization[len(BEARER) :]
        if self._expected is None:
            self._check_local(headers)
            return "local"
        if path in PUBLIC_PATHS or hmac.compare_digest(authorization, self._expected):
            return "api_key"
        if self._is_worker(path, authorization):
            return "worker"
        if (key := await _named_key(scope["app"].state.runtime, authorization)) is None:
            raise Unauthorized
        check_allowed(key, scope["method"], path)
        scope["state"]["key"] = key
        return key.name

    def _is_worker(self, path: str, authorization: bytes) -> bool:
        """Whether this is the worker key on a route of remote workers, the only ones it permits."""
        work = path == f"{WORK_PATH}:claim" or path.startswith(f"{WORK_PATH}/")
        return work and self._worker is not None and hmac.compare_digest(authorization, self._worker)

    def _check_local(self, headers: Mapping[bytes, bytes]) -> None:
        """Without a key, refuse requests by other machines, and by web pages through a user's browser.

        A foreign Host means DNS rebinding. A foreign Origin, or a `Sec-Fetch-Site` of another site, means a page of
        another server, which may be on this machine. A forwarded request may come from anyone who can reach the proxy.
        """
        host, origin = headers.get(b"host", b""), headers.get(b"origin")
        if not is_loopback(named := _without_port(host)) and named != self.settings.host:
            raise ForeignOrigin(f"{_text(host)!r} is not this machine: {ForeignOrigin.__doc__}")
        if origin is not None and origin.lower() not in (b"http://" + host.lower(), b"https://" + host.lower()):
            raise ForeignOrigin(f"the request comes from a page of {_text(origin)!r}: {ForeignOrigin.__doc__}")
        if (site := headers.get(b"sec-fetch-site", b"none")) not in OWN_PAGES:
            raise ForeignOrigin(f"this is a {_text(site)} request: {ForeignOrigin.__doc__}")
        if (name := _proxy_header(tuple(headers))) is not None:
            raise ForeignOrigin(f"a proxy forwarded the request (header {_text(name)!r}): {ForeignOrigin.__doc__}")

    def _limit(self, path: str) -> int:
        return self.settings.max_archive_bytes if path in UPLOAD_PATHS else self.settings.max_body_bytes


def _event(name: str, scope: Scope) -> Event:
    """What happened to a request."""
    return Event(name, method=scope["method"], path=scope["path"])


async def _end_cancelled(exchange: Exchange, scope: Scope, receive: Receive) -> None:
    """End a request whose client left, or that the server stops waiting for."""
    if exchange.client_left:
        logger.debug(_event("client_left", scope))
        return
    logger.warning(_event("request_cut_off", scope))
    if not exchange.started:
        await problem_of(ShuttingDown(), exchange.request_id)(scope, receive, exchange.send)


class Exchange:
    """One request and its response: limits the bytes received, and adds headers to the response."""

    def __init__(self, receive: Receive, send: Send, headers: Mapping[bytes, bytes], limit: int) -> None:
        """`headers`: the first of each name."""
        self.request_id = f"{random.getrandbits(128):032x}"
        self.headers = headers
        self.limit = limit
        self.status = 0
        self.client_left = False
        self._cancellable: asyncio.Task[object] | None = None
        self._receive = receive
        self._send = send
        self._received = 0

    @property
    def started(self) -> bool:
        """Whether a part of the response was sent."""
        return self.status > 0

    def bound(self, limit: int) -> None:
        """Accept at most `limit` bytes of body. Raises BodyTooLarge if Content-Length is larger."""
        self.limit = min(limit, self.limit)
        length = self.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limit:
            raise BodyTooLarge(_too_large(self.limit))

    @contextmanager
    def cancelled_on_disconnect(self) -> Iterator[None]:
        """Context of waiting for a thread whose work only the client needs: if it leaves before that, none is done."""
        self._cancellable = asyncio.current_task()
        if self.client_left:
            self._cancel()
        try:
            yield
        finally:
            self._cancellable = None

    def disconnected(self) -> None:
        """Note that the client has left, and end such waiting."""
        self.client_left = True
        self._cancel()

    def _cancel(self) -> None:
        if self._cancellable is not None:
            self._cancellable.cancel()

    async def receive(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self.limit:
            # An HTTPException, because every layer above passes it on.
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(self.limit))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            named = (b"x-request-id", self.request_id.encode())
            message["headers"] = [*message.get("headers", ()), named, NO_SNIFFING]
        await self._send(message)


def _text(header: bytes) -> str:
    return header.decode("latin-1")


def _too_large(limit: int) -> str:
    return f"the body is larger than {limit} bytes, the limit of this route"
