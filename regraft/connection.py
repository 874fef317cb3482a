"""The HTTP connections of both clients: `Connection`, the base of every group of routes, and its errors."""

from __future__ import annotations

import asyncio
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import cache, partial
from ssl import PROTOCOL_TLS_CLIENT, SSLContext
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError

from index.errors import InvalidArgument, RegraftError
from regraft.inputs import InvalidInput, as_json
from regraft.models.base import ApiModel

Json = dict[str, Any]
Answer = TypeVar("Answer", bound=ApiModel)
Result = TypeVar("Result")

DEFAULT_URL = "http://127.0.0.1:8080"
CONNECT_ATTEMPTS = 3
CONNECT_PAUSE_SECONDS = 0.2
QUICK_SECONDS = 60.0
"""The timeout of queries and GET requests."""
PATIENT_SECONDS = 3600.0
"""The read timeout of changes, such as a registration, a fit or a gate: the service continues even after a timeout."""
MAX_TIMEOUT_SECONDS = 1e6
MAX_REQUESTS = 100
"""Concurrent requests of an AsyncClient, not counting streams."""
TIMEOUT = "REGRAFT_TIMEOUT"
NO_CONTENT = 204
STRICT = "Python 3.13 and later demand these extensions, so it must be issued again (docs/deployment.md, TLS)"
HINTS = {
    "mismatch, certificate is not valid": "use the name or address that the certificate has",
    **dict.fromkeys(("key usage extension", "Key Identifier", "Basic Constraints of CA"), STRICT),
    "CERTIFICATE_VERIFY_FAILED": "for a private authority, set SSL_CERT_FILE to the file of its certificate",
    "WRONG_VERSION_NUMBER": "does this address speak http:// instead of https://?",
}
"""What may help against errors of TLS, by OpenSSL's words for them; the first that fits."""


class Problem(RegraftError):
    """The service refused the request (RFC 9457 problem+json).

    `errors` lists every fault with its JSON pointer; `request_id` finds the request in the service's log.
    """

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.detail = str(body.get("detail") or body.get("title") or f"the service answered with status {status}")
        errors = body.get("errors")
        # A gateway's answer may have other things of this name.
        self.errors: list[Json] = [one for one in errors if isinstance(one, dict)] if isinstance(errors, list) else []
        self.request_id: str | None = body.get("request_id")
        super().__init__(self.detail, pointer=str(self.errors[0].get("pointer") or "") if self.errors else "")
        self.status = status
        self.code = str(body.get("code") or "http_error")

    def __reduce__(self) -> tuple[Any, ...]:
        # By default it could not be unpickled, and a process pool would wait for ever.
        fields = {name: getattr(self, name) for name in ("detail", "code", "errors", "request_id")}
        return type(self), (self.status, fields)


class Unreachable(RegraftError):
    """The service could not be reached."""

    status = 503
    code = "unreachable"


class TimedOut(Unreachable):
    """The service did not answer in time and may still process the request."""

    status = 504
    code = "timed_out"


class UnexpectedAnswer(RegraftError):
    """The response is not from a Regraft service, or from an incompatible release."""

    status = 502
    code = "unexpected_answer"


class Connection(ABC):
    """HTTP to one service, the common part of both clients.

    `url`, `api_key` and `timeout` default to the environment variables REGRAFT_URL, REGRAFT_API_KEY and
    REGRAFT_TIMEOUT, as in the command. `timeout`: seconds to wait for an answer; by default a minute for queries and
    reads, an hour for changes.

    Methods raise Problem if the service refuses, and Unreachable if it does not answer; its subclass TimedOut if the
    service was reached but did not answer in time. Only GET requests are retried, and only if the connection failed: a
    write is never sent twice.
    """

    _http: httpx.Client | httpx.AsyncClient

    def __init__(self, url: str | None, api_key: str | None, timeout: float | None) -> None:
        url = url or os.environ.get("REGRAFT_URL") or DEFAULT_URL
        api_key = api_key or os.environ.get("REGRAFT_API_KEY")
        if not _is_address(url):
            raise InvalidArgument(f"url {url!r} must be http:// or https:// with a host", pointer="/url")
        if url.rstrip("/").endswith("/v1"):
            raise InvalidArgument(f"url {url!r} must be the address of the service, without /v1", pointer="/url")
        if "?" in url or "#" in url:
            raise InvalidArgument(f"url {url!r} must be the address of the service, without ? or #", pointer="/url")
        if api_key and not is_header_value(api_key):
            raise InvalidArgument(
                "the API key must be printable ASCII, without a space or line break at either end",
                pointer="/api_key",
            )
        seconds = _seconds(os.environ.get(TIMEOUT) or None if timeout is None else timeout)
        # Requests wait for a free connection without a time limit.
        self._quick = httpx.Timeout(seconds or QUICK_SECONDS, pool=None)
        self._patient = httpx.Timeout(seconds or QUICK_SECONDS, read=seconds or PATIENT_SECONDS, pool=None)
        self.url = url.rstrip("/")
        self._options: Json = {
            "base_url": f"{self.url}/v1/",
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            # A proxy from the environment must not get requests to a loopback service.
            "trust_env": False,
            # Without TLS a missing file of certificates must not be an error.
            "verify": certificates() if httpx.URL(url).scheme == "https" else SSLContext(PROTOCOL_TLS_CLIENT),
        }

    @abstractmethod
    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        """Send one request."""

    @abstractmethod
    def _streamed(self, path: str, **request: Any) -> AsyncGenerator[str, None]:
        """Stream the lines of the response to a GET request. Raises Problem if it is refused."""

    @abstractmethod
    async def _pause(self, seconds: float) -> None:
        """Wait."""

    @abstractmethod
    async def _run_blocking(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a slow function that does not wait for the service."""

    async def _ask(self, answer: type[Answer], method: str, path: str, **request: Any) -> Answer:
        return read(answer, (await self._send(method, path, **request)).content)

    async def _delete(self, path: str, **request: Any) -> None:
        """Send a DELETE request whose answer has no body. Raises UnexpectedAnswer if another server gave it."""
        status = (await self._send("DELETE", path, **request)).status_code
        if status != NO_CONTENT:
            raise UnexpectedAnswer(f"the answer of {self.url} to a deletion has status {status}, not {NO_CONTENT}")

    async def _send(self, method: str, path: str, *, quick: bool = False, **request: Any) -> httpx.Response:
        """Send a request and check its response; `quick`: with the timeout of a GET request."""
        attempts = CONNECT_ATTEMPTS if method == "GET" else 1
        timeout = self._quick if quick or method == "GET" else self._patient
        if "json" in request:
            request["content"] = as_json(request.pop("json"), ascii_only=False)
            request["headers"] = {**request.get("headers", {}), "content-type": "application/json"}
        try:
            sent = self._http.build_request(method, path, timeout=timeout, **request)
        except ValueError as error:
            raise InvalidInput(
                f"the request cannot be sent, because a value is not finite or not UTF-8: {error}"
            ) from error
        try:
            response = await self._with_retries(sent, attempts)
        except httpx.ReadTimeout as error:
            raise TimedOut(
                f"{self.url} did not answer within {timeout.read:g} s and may still process the request; "
                f"set a larger timeout in seconds: --timeout or {TIMEOUT}"
            ) from error
        except httpx.DecodingError as error:
            raise self._compressed_badly(error) from error
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            hint = next((told for sign, told in HINTS.items() if sign in why), "is `regraft serve` running?")
            raise Unreachable(f"no answer from {self.url} ({why}); {hint}") from error
        if not response.is_success:
            raise problem_of(response)
        return response

    async def _with_retries(self, request: httpx.Request, attempts: int) -> httpx.Response:
        for attempt in range(1, attempts):
            try:
                return await self._exchange(request)
            except httpx.ConnectError:
                await self._pause(CONNECT_PAUSE_SECONDS * attempt)
        return await self._exchange(request)

    async def _texts(self, path: str, headers: Mapping[str, str], silence: float) -> AsyncGenerator[str, None]:
        """Stream the text of a response, in parts of any length.

        Raises:
            Unreachable: it broke, or `silence` seconds passed without a part.
            UnexpectedAnswer: it cannot be decompressed.
        """
        timeout = httpx.Timeout(silence, connect=silence)
        try:
            async with aclosing(self._streamed(path, headers=dict(headers), timeout=timeout)) as texts:
                async for text in texts:
                    yield text
        except httpx.DecodingError as error:
            raise self._compressed_badly(error) from error
        except httpx.TransportError as error:
            raise Unreachable(
                f"the stream from {self.url} was interrupted ({str(error) or type(error).__name__})"
            ) from error

    def _compressed_badly(self, error: httpx.DecodingError) -> UnexpectedAnswer:
        return UnexpectedAnswer(f"the answer of {self.url} cannot be decompressed: {error}")


class SyncConnection(Connection):
    """A connection whose steps block; safe to share between threads and with forked processes."""

    _http: httpx.Client

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout)
        self._new_client = partial(httpx.Client, transport=transport, **self._options)
        self._http, self._process = self._new_client(), os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        return self._process_client().send(request)

    async def _streamed(self, path: str, **request: Any) -> AsyncGenerator[str, None]:
        with self._process_client().stream("GET", path, **request) as response:
            if not response.is_success:
                response.read()
                raise problem_of(response)
            for text in response.iter_text():
                yield text

    def _process_client(self) -> httpx.Client:
        """The HTTP client of this process: a forked one must not read from its parent's connections."""
        if self._process != os.getpid():
            self._http, self._process = self._new_client(), os.getpid()
        return self._http

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _run_blocking(self, function: Callable[..., Result], *args: Any) -> Result:
        return function(*args)


class AsyncConnection(Connection):
    """A connection for one event loop, which its tasks may share."""

    _http: httpx.AsyncClient

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, api_key, timeout)
        # Not limited by the pool, which streams would use up, and whose cost per request grows with those waiting.
        limits = httpx.Limits(max_keepalive_connections=MAX_REQUESTS)
        self._http = httpx.AsyncClient(transport=transport, limits=limits, **self._options)
        self._turns = asyncio.Semaphore(MAX_REQUESTS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        async with self._turns:
            return await self._http.send(request)

    async def _streamed(self, path: str, **request: Any) -> AsyncGenerator[str, None]:
        async with self._http.stream("GET", path, **request) as response:
            if not response.is_success:
                await response.aread()
                raise problem_of(response)
            async for text in response.aiter_text():
                yield text

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _run_blocking(self, function: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.to_thread(function, *args)


@cache
def certificates() -> SSLContext:
    """The trusted certificates: of SSL_CERT_FILE or SSL_CERT_DIR, else the public certificate authorities.

    Cached for all clients of a process, because reading them takes longer than many requests.

    Raises:
        InvalidArgument: the file has no certificates.
    """
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        named = ("SSL_CERT_FILE", "SSL_CERT_DIR")
        source = next((f"{name}={os.environ[name]}" for name in named if os.environ.get(name)), "certifi")
        raise InvalidArgument(f"the certificates of {source} cannot be read: {error}") from error


def read(answer: type[Answer], body: str | bytes) -> Answer:
    """Parse a response into its model.

    Raises:
        UnexpectedAnswer: it does not fit the model; names the first wrong field.
    """
    try:
        return answer.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"/{part}" for part in first["loc"])
        raise UnexpectedAnswer(
            f"the answer is not a valid {answer.__name__}: {place or 'the body'}: {first['msg']}"
        ) from error


def _is_address(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
        parsed.raw_host.decode().encode("idna")  # as sockets do, whose UnicodeError is not an httpx.TransportError
    except (httpx.InvalidURL, ValueError):
        return False
    return parsed.scheme in {"http", "https"} and bool(parsed.host)


def is_header_value(text: str) -> bool:
    """Whether a header can hold a text, such as an API key, which the error about an invalid header would show."""
    return text.isascii() and text.isprintable() and text == text.strip()


def _seconds(given: str | float | None) -> float | None:
    """Parse a timeout. Raises InvalidArgument if it is not a legal timeout of a socket."""
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise InvalidArgument(
            f"timeout must be above 0 and at most {MAX_TIMEOUT_SECONDS:,.0f} seconds, not {given!r}",
            pointer="/timeout",
        )
    return seconds


def problem_of(response: httpx.Response) -> Problem:
    """The Problem of a refused request."""
    try:
        body = response.json()
    except ValueError:
        body = None
    # A proxy may answer without problem+json.
    said = f"{response.status_code} {response.reason_phrase}".strip()
    if response.has_redirect_location:
        said += f": requests are redirected to {response.headers['location']}; give that server's address as the url"
    return Problem(response.status_code, body if isinstance(body, dict) else {"detail": said})
