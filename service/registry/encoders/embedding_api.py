"""A provider's embedding API as the text entrance of a version (`ApiEncoder`): `POST {url}/embeddings`, as by OpenAI.

Answers are not trusted: each vector is checked against the card, and at the first use the model against the version's
probe. The key is read from the environment when needed, and never appears in a message. Vectors are (N, D).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import email.utils
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from ssl import SSLContext
from typing import Any

import httpx
import numpy as np

from index.encoders.text import check_text, read_text_probe
from index.errors import InvalidText, InvalidVector, RegraftError
from index.retry import attempts
from index.space import Vectors, check_vectors, space_from_json
from index.version import TEXT_PROBE, EmbeddingApi, Version

QUERY_SECONDS = 10.0
"""How long a query waits for the provider, including retries and pauses."""
CALL_SECONDS = 60.0
"""How long one call for items may take."""
MAX_ATTEMPTS = 5
FIRST_PAUSE, MAX_PAUSE = 0.5, 60.0
"""Seconds between attempts, doubled each time; there is no retry if a provider asks for a longer pause."""
MAX_BYTES_PER_NUMBER = 40
"""Most bytes of an answer per number of its embeddings; a longer answer is refused."""
PROBE_COSINE = 0.99
"""Least cosine with the probe: the same model's answers differ in the last bits, another model's far more."""
CHARACTERS_PER_TOKEN = 4
"""Estimate, for providers that do not report how many tokens they counted."""
MAX_SHOWN = 200


class ProviderUnavailable(RegraftError):
    """The embedding API is unavailable; the texts are not the cause."""

    status = 503
    code = "provider_unavailable"


class ProviderTimeout(ProviderUnavailable):
    """The embedding API did not answer in time."""

    status = 504
    code = "provider_timeout"


class ProviderFault(ProviderUnavailable):
    """The embedding API's answer does not match the version's card."""

    status = 502
    code = "provider_fault"


class _RetryableError(Exception):
    """A failed call that may be retried; `after`: the seconds that the provider asked to wait."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class ApiEncoder:
    """The text entrance of a version whose card names an API. Thread-safe."""

    def __init__(self, version: Version, allowed: Collection[str]) -> None:
        """Call nothing yet, so that a version can be loaded while its provider is unreachable.

        Args:
            version: its card has an `api`.
            allowed: the base URLs that may be called.

        Raises:
            ProviderUnavailable: its URL is not in `allowed`.
        """
        card = version.card
        assert card.api is not None
        if card.api.url not in allowed:
            why = f"version {card.name!r} calls {card.api.url}, which REGRAFT_EMBEDDING_APIS does not list"
            raise ProviderUnavailable(why)
        self.api: EmbeddingApi = card.api
        self.batch = card.api.batch_size
        self.tokens = 0
        """Tokens that the provider has billed so far, or an estimate."""
        self._name, self._dim, self._space = card.name, card.dim, space_from_json(dict(card.space))
        self._prompts = card.prompts
        # None: the provider could not be called when the version was created.
        self._probe = read_text_probe(version) if TEXT_PROBE in card.files else None
        self._rate_limiter = _RateLimiter(card.api)
        # Asynchronous, because only there can a whole exchange have a time limit: a provider that sends its answer byte
        # by byte reaches no limit of a single read.
        self._loop = _event_loop()
        self._http = httpx.AsyncClient(timeout=CALL_SECONDS, follow_redirects=False, verify=_certificates())
        self._close = weakref.finalize(self, _close, self._http, self._loop)
        self._close.atexit = False
        self._count_lock = threading.Lock()

    def prepare(self, text: str, side: str = "query") -> str:
        """A text, with the version's prompt for its side as a prefix. Raises InvalidText."""
        return self._prompts.get(side, "") + check_text(text, None)

    def query_vectors(self, texts: Sequence[str]) -> Vectors:
        """Embed prepared texts within `QUERY_SECONDS`. Raises as `vectors`."""
        return self._embed(texts, time.monotonic() + QUERY_SECONDS)

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Embed prepared texts in calls of the card's batch size.

        Raises:
            ProviderUnavailable: it is unreachable, its limits are reached, or it rejects the key; no text is at fault.
            ProviderTimeout: it does not answer in time.
            ProviderFault: its answer does not match the card, or is another model's.
            InvalidText: it refuses one of the texts.
        """
        return self._embed(texts, None)

    def close(self) -> None:
        """Close the connections to the provider; dropping the encoder does so as well, some time later."""
        if (closing := self._close()) is not None:
            closing.result()

    def _embed(self, texts: Sequence[str], until: float | None) -> Vectors:
        if self._probe is not None:
            self._check_probe(*self._probe, until)
        parts = [texts[start : start + self.batch] for start in range(0, len(texts), self.batch)]
        return np.concatenate([np.empty((0, self._dim), np.float32), *(self._call(part, until) for part in parts)])

    def _check_probe(self, text: str, expected: Vectors, until: float | None) -> None:
        """Check the probe once: the provider may have put another model behind the same name."""
        try:
            vector = self._call([text], until)[0]
        except InvalidText as error:  # no user's text: it was embedded once, so the provider has changed
            raise ProviderFault(
                f"the probe of version {self._name!r} was embedded at its creation, but now {error.message}"
            ) from error
        cosine = float(vector @ expected[0] / (np.linalg.norm(vector) * np.linalg.norm(expected)))
        if not cosine >= PROBE_COSINE:
            raise ProviderFault(
                f"{self.api.url} embeds the probe of version {self._name!r} differently than at its creation (cosine "
                f"{cosine:.3f}, at least {PROBE_COSINE} is legal): the provider's model has changed"
            )
        self._probe = None

    def _call(self, texts: Sequence[str], until: float | None) -> Vectors:
        """One call, with retries after temporary errors."""
        try:
            for attempt in attempts(_RetryableError, lambda error, number: _pause(error, number, until)):
                with attempt:
                    self._rate_limiter.wait(sum(map(len, texts)) / CHARACTERS_PER_TOKEN, until)
                    return self._read(texts, self._post(texts, until))
        except _RetryableError as error:
            raise ProviderUnavailable(f"{self.api.url} {error}") from error
        raise AssertionError("an attempt returns or raises")

    def _post(self, texts: Sequence[str], until: float | None) -> bytes:
        """The body of a successful answer. Raises _RetryableError, and as `vectors`."""
        body: dict[str, Any] = {"model": self.api.model, "input": list(texts), "encoding_format": self.api.encoding}
        if self.api.shorten:
            body["dimensions"] = self._dim
        seconds = CALL_SECONDS if until is None else until - time.monotonic()
        if seconds <= 0:
            raise self._timeout()
        headers = {} if not self.api.key else {"authorization": f"Bearer {self._key()}"}
        max_bytes = len(texts) * self._dim * MAX_BYTES_PER_NUMBER + (1 << 16)
        exchange = self._exchange(body, headers, seconds, max_bytes)
        try:
            response, content = asyncio.run_coroutine_threadsafe(exchange, self._loop).result()
        except (TimeoutError, httpx.TimeoutException) as error:
            if until is not None:
                raise self._timeout() from error
            raise _RetryableError(f"did not answer within {seconds:.0f} seconds") from error
        except httpx.HTTPError as error:
            raise _RetryableError(f"did not answer ({type(error).__name__})") from error
        if response.status_code != 200:
            self._refuse(response, content)
        return content

    async def _exchange(
        self, body: Mapping[str, Any], headers: Mapping[str, str], seconds: float, max_bytes: int
    ) -> tuple[httpx.Response, bytes]:
        """One answer and its body. Raises TimeoutError after `seconds` in all, httpx.HTTPError and ProviderFault."""
        content = b""
        async with (
            asyncio.timeout(seconds),
            self._http.stream("POST", f"{self.api.url}/embeddings", json=body, headers=headers) as response,
        ):
            async for block in response.aiter_bytes():
                content += block
                if len(content) > max_bytes:
                    raise ProviderFault(
                        f"{self.api.url} sends more than {max_bytes} bytes for {len(body['input'])} texts"
                    )
        return response, content

    def _refuse(self, response: httpx.Response, content: bytes) -> None:
        """Raise the error of an answer other than 200."""
        status = response.status_code
        if status == 429 or status >= 500:
            after = _seconds(response.headers.get("retry-after"))
            why = " (too many requests, or a quota is used up)" * (status == 429)
            wait = "" if after is None else f"; it asks to wait {after:.0f} seconds"
            raise _RetryableError(f"answered status {status}{why}{wait}", after)
        if status in {400, 413, 422}:
            raise InvalidText(f"{self.api.url} refuses the texts ({status}): {self._message(content)}")
        # The provider's message about a key may contain a part of it.
        hint = f"; check the key in {self.api.key}" if status in {401, 403} and self.api.key else ""
        raise ProviderUnavailable(f"{self.api.url} returned status {status} for model {self.api.model!r}{hint}")

    def _message(self, content: bytes) -> str:
        """The provider's message, on one line and without the key."""
        words = " ".join(content[: 4 * MAX_SHOWN].decode(errors="replace").split())
        key = os.environ.get(self.api.key, "") if self.api.key else ""
        return (words.replace(key, "...") if key else words)[:MAX_SHOWN]

    def _read(self, texts: Sequence[str], content: bytes) -> Vectors:
        """The vectors of an answer in the order of the texts. Raises ProviderFault."""
        with self._provider_fault():
            answer = json.loads(content)
            rows = {row["index"]: row["embedding"] for row in answer["data"]}
            if sorted(rows) != list(range(len(texts))) or len(answer["data"]) != len(texts):
                raise ValueError(
                    f"{len(answer['data'])} embeddings for {len(texts)} texts, or an index is missing or repeated"
                )
            numbers = np.stack([_numbers(rows[number]) for number in range(len(texts))])
            if numbers.shape[1] != self._dim:
                raise ValueError(f"embeddings of {numbers.shape[1]} numbers, not {self._dim}")
            vectors = check_vectors(numbers, self._dim, self._space, pointer="")
            self._count(answer.get("usage"), sum(map(len, texts)) / CHARACTERS_PER_TOKEN)
            return vectors

    def _count(self, usage: object, guessed: float) -> None:
        reported = usage.get("total_tokens") if isinstance(usage, dict) else None
        counted = reported if type(reported) is int and reported >= 0 else round(guessed)
        self._rate_limiter.correct(counted - guessed)
        with self._count_lock:
            self.tokens += counted

    @contextmanager
    def _provider_fault(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidVector) as error:
            what = f"no such field: {error}" if isinstance(error, KeyError) else str(error)[:MAX_SHOWN]
            raise ProviderFault(
                f"{self.api.url} returned no valid embeddings for version {self._name!r}: {what}"
            ) from error

    def _key(self) -> str:
        key = os.environ.get(self.api.key, "")
        if not key or not (key.isascii() and key.isprintable()):
            why = "is not set" if not key else "has no valid key"
            raise ProviderUnavailable(
                f"the environment variable {self.api.key}, which version {self._name!r} names, {why}"
            )
        return key

    def _timeout(self) -> ProviderTimeout:
        return ProviderTimeout(f"{self.api.url} did not answer within {QUERY_SECONDS:.0f} seconds")


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all calls of this process, which runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="providers", daemon=True).start()
    return loop


def _close(client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop) -> Future[None]:
    return asyncio.run_coroutine_threadsafe(client.aclose(), loop)


@cache
def _certificates() -> SSLContext:
    """The certificates that TLS trusts; read once for all versions, as it takes 40 ms."""
    return httpx.create_ssl_context()


class _RateLimiter:
    """Delays the calls of one process to stay within an API's limits."""

    def __init__(self, api: EmbeddingApi) -> None:
        self._seconds_per_call = 60 / api.requests_per_minute if api.requests_per_minute else 0.0
        self._seconds_per_token = 60 / api.tokens_per_minute if api.tokens_per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, tokens: float, until: float | None) -> None:
        """Wait until a call of about so many tokens may start. Raises ProviderTimeout."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            if until is not None and start > until:
                raise ProviderTimeout("the query would exceed the rate limits in the version's card")
            self._next = start + max(self._seconds_per_call, tokens * self._seconds_per_token)
        if start > now:
            time.sleep(start - now)

    def correct(self, tokens: float) -> None:
        """Account for tokens billed beyond the estimate (or fewer, if negative)."""
        with self._lock:
            self._next += tokens * self._seconds_per_token


def _numbers(embedding: object) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One embedding (D,), from a list of numbers or base64 of little-endian float32. Raises ValueError."""
    if isinstance(embedding, str):
        try:
            return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4").astype(np.float32)
        except binascii.Error as error:
            raise ValueError(f"an embedding is not base64: {error}") from error
    numbers = np.asarray(embedding)
    if numbers.ndim != 1 or numbers.dtype.kind not in "fiu":
        raise ValueError("an embedding is not a list of numbers")
    with np.errstate(over="ignore"):  # infinities are refused later, like NaN
        return numbers.astype(np.float32)


def _pause(error: BaseException, number: int, until: float | None) -> float | None:
    """Seconds before the next attempt, after `number` attempts; None: there is no further attempt."""
    assert isinstance(error, _RetryableError)
    pause = error.after if error.after is not None else min(FIRST_PAUSE * 2 ** (number - 1), MAX_PAUSE)
    if number >= MAX_ATTEMPTS or pause > MAX_PAUSE or (until is not None and time.monotonic() + pause >= until):
        return None
    return pause


def _seconds(after: str | None) -> float | None:
    """The seconds of a Retry-After header, which is a number or a date; None: missing or invalid."""
    if after is None:
        return None
    try:
        return None if math.isnan(seconds := float(after)) else max(seconds, 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
