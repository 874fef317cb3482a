"""A provider's embedding API as the text entrance of a version: `POST {url}/embeddings`, as OpenAI's has it.

Nothing that a provider answers is believed: each vector is held to the card, and at the first use to the version's
probe. Its key is read from the environment where it is needed, and is in no message. Vectors are (N, D).
"""

from __future__ import annotations

import base64
import binascii
import email.utils
import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from ssl import SSLContext
from typing import Any

import httpx
import numpy as np

from index.errors import InvalidText, InvalidVector, RegraftError
from index.retry import attempts
from index.space import Vectors, check_vectors, space_from_json
from index.text import check_text, read_text_probe
from index.version import TEXT_PROBE, EmbeddingApi, Version

QUERY_SECONDS = 10.0
"""A query waits so long for the provider, attempts and pauses included."""
CALL_SECONDS = 60.0
"""One call for items may take so long."""
MOST_ATTEMPTS = 5
FIRST_PAUSE, MOST_PAUSE = 0.5, 60.0
"""Seconds between attempts, doubled each time; a provider that asks for more is left alone for now."""
MOST_BYTES_A_NUMBER = 40
"""Of an answer: what takes more is no list of embeddings."""
PROBE_COSINE = 0.99
"""Providers do not repeat themselves to the last bit, but another model is nowhere near this."""
CHARACTERS_A_TOKEN = 4
"""Where the provider does not say how many tokens it counted."""
SHOWN = 200


class ProviderUnavailable(RegraftError):
    """The provider of the embeddings cannot be asked now. No text is at fault."""

    status = 503
    code = "provider_unavailable"


class ProviderTimeout(ProviderUnavailable):
    """The provider did not answer in time."""

    status = 504
    code = "provider_timeout"


class ProviderFault(ProviderUnavailable):
    """The provider answered something that is not what the version's card says."""

    status = 502
    code = "provider_fault"


class _Again(Exception):
    """A call that may go better the next time; `after`: the seconds that the provider asked to wait."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class ApiEncoder:
    """The text entrance of a version whose card names an API. Safe to share between threads."""

    def __init__(self, version: Version, allowed: Collection[str]) -> None:
        """Open nothing yet: a version can be loaded while its provider is away.

        Args:
            version: its card has an `api`.
            allowed: the base URLs that may be called.

        Raises:
            ProviderUnavailable: its URL is not among them.
        """
        card = version.card
        assert card.api is not None
        if card.api.url not in allowed:
            why = f"version {card.name!r} calls {card.api.url}, which REGRAFT_EMBEDDING_APIS does not list"
            raise ProviderUnavailable(why)
        self.api: EmbeddingApi = card.api
        self.batch = card.api.batch_size
        self.tokens = 0
        """Tokens that the provider has counted so far, or about so many."""
        self._name, self._dim, self._space = card.name, card.dim, space_from_json(dict(card.space))
        self._prompts = card.prompts
        # None: nobody could ask the provider when the version was made.
        self._probe = read_text_probe(version) if TEXT_PROBE in card.files else None
        self._pace = _Pace(card.api)
        self._http = httpx.Client(timeout=CALL_SECONDS, follow_redirects=False, verify=_certificates())
        self._counting = threading.Lock()

    def prepare(self, text: str, side: str = "query") -> str:
        """A text with the version's prompt for its side before it. Raises InvalidText."""
        return self._prompts.get(side, "") + check_text(text, None)

    def query_vectors(self, texts: Sequence[str]) -> Vectors:
        """The same as `vectors`, within the time that a query has. Raises as `vectors`."""
        return self._embed(texts, time.monotonic() + QUERY_SECONDS)

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Embed prepared texts, as many a call as the card says.

        Raises:
            ProviderUnavailable: it is away, its limits are reached, or it does not take the key; no text is at fault.
            ProviderTimeout: it does not answer in time.
            ProviderFault: it answers something else than the card says, or by another model.
            InvalidText: it refuses one of the texts.
        """
        return self._embed(texts, None)

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def _embed(self, texts: Sequence[str], until: float | None) -> Vectors:
        if self._probe is not None:
            self._check_probe(*self._probe, until)
        parts = [texts[start : start + self.batch] for start in range(0, len(texts), self.batch)]
        return np.concatenate([np.empty((0, self._dim), np.float32), *(self._call(part, until) for part in parts)])

    def _check_probe(self, text: str, expected: Vectors, until: float | None) -> None:
        """Once: the provider may have put another model behind the same name since the version was made."""
        given = self._call([text], until)[0]
        cosine = float(given @ expected[0] / (np.linalg.norm(given) * np.linalg.norm(expected)))
        if not cosine >= PROBE_COSINE:
            raise ProviderFault(
                f"{self.api.url} embeds the probe of version {self._name!r} otherwise than when it was made (cosine "
                f"{cosine:.3f}, at least {PROBE_COSINE} is legal): it is another model by now"
            )
        self._probe = None

    def _call(self, texts: Sequence[str], until: float | None) -> Vectors:
        """One call, and others where it may go better the next time."""
        try:
            for attempt in attempts(_Again, lambda error, number: _pause(error, number, until)):
                with attempt:
                    self._pace.wait(sum(map(len, texts)) / CHARACTERS_A_TOKEN, until)
                    return self._read(texts, self._post(texts, until))
        except _Again as error:
            raise ProviderUnavailable(f"{self.api.url}: {error}") from error
        raise AssertionError("an attempt returns or raises")

    def _post(self, texts: Sequence[str], until: float | None) -> bytes:
        """The body of a good answer. Raises _Again, and what `vectors` raises."""
        body: dict[str, Any] = {"model": self.api.model, "input": list(texts), "encoding_format": self.api.encoding}
        if self.api.shorten:
            body["dimensions"] = self._dim
        seconds = CALL_SECONDS if until is None else until - time.monotonic()
        if seconds <= 0:
            raise self._late()
        headers = {} if not self.api.key else {"authorization": f"Bearer {self._key()}"}
        most = len(texts) * self._dim * MOST_BYTES_A_NUMBER + (1 << 16)
        ends = time.monotonic() + seconds
        try:
            asked = self._http.stream(
                "POST", f"{self.api.url}/embeddings", json=body, headers=headers, timeout=httpx.Timeout(seconds)
            )
            with asked as response:
                content = b""
                for block in response.iter_bytes():
                    content += block
                    if len(content) > most:
                        raise ProviderFault(f"{self.api.url} answers more than {most} bytes for {len(texts)} texts")
                    if time.monotonic() > ends:
                        raise httpx.ReadTimeout("the answer does not end")
        except httpx.TimeoutException as error:
            if until is not None:
                raise self._late() from error
            raise _Again(f"no answer within {seconds:.0f} seconds") from error
        except httpx.HTTPError as error:
            raise _Again(f"no answer ({type(error).__name__})") from error
        if response.status_code != 200:
            self._refuse(response, content)
        return content

    def _refuse(self, response: httpx.Response, content: bytes) -> None:
        """Raise what an answer other than 200 means."""
        status = response.status_code
        if status == 429 or status >= 500:
            raise _Again(f"it answers {status}", _seconds(response.headers.get("retry-after")))
        if status in {400, 413, 422}:
            raise InvalidText(f"{self.api.url} refuses the texts ({status}): {self._words(content)}")
        # What it says of a key may hold a part of it.
        hint = f"; is {self.api.key} the right key?" if status in {401, 403} and self.api.key else ""
        raise ProviderUnavailable(f"{self.api.url} answers {status} for model {self.api.model!r}{hint}")

    def _words(self, content: bytes) -> str:
        """What the provider says, on one line and without the key."""
        words = " ".join(content[: 4 * SHOWN].decode(errors="replace").split())
        key = os.environ.get(self.api.key, "") if self.api.key else ""
        return (words.replace(key, "...") if key else words)[:SHOWN]

    def _read(self, texts: Sequence[str], content: bytes) -> Vectors:
        """The vectors of an answer in the order of the texts. Raises ProviderFault."""
        with self._at_fault():
            answer = json.loads(content)
            rows = {row["index"]: row["embedding"] for row in answer["data"]}
            if sorted(rows) != list(range(len(texts))) or len(answer["data"]) != len(texts):
                raise ValueError(f"{len(answer['data'])} embeddings for {len(texts)} texts, or not each index once")
            numbers = np.stack([_numbers(rows[number]) for number in range(len(texts))])
            if numbers.shape[1] != self._dim:
                raise ValueError(f"embeddings of {numbers.shape[1]} numbers, not {self._dim}")
            vectors = check_vectors(numbers, self._dim, self._space, pointer="")
            self._count(answer.get("usage"), sum(map(len, texts)) / CHARACTERS_A_TOKEN)
            return vectors

    def _count(self, usage: object, guessed: float) -> None:
        told = usage.get("total_tokens") if isinstance(usage, dict) else None
        counted = told if type(told) is int and told >= 0 else round(guessed)
        self._pace.correct(counted - guessed)
        with self._counting:
            self.tokens += counted

    @contextmanager
    def _at_fault(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidVector) as error:
            what = f"no such field: {error}" if isinstance(error, KeyError) else str(error)[:SHOWN]
            raise ProviderFault(f"{self.api.url} answers no embeddings of version {self._name!r}: {what}") from error

    def _key(self) -> str:
        key = os.environ.get(self.api.key, "")
        if not key or not (key.isascii() and key.isprintable()):
            why = "is not set" if not key else "holds no key"
            raise ProviderUnavailable(
                f"the environment variable {self.api.key}, which version {self._name!r} names, {why}"
            )
        return key

    def _late(self) -> ProviderTimeout:
        return ProviderTimeout(f"{self.api.url} did not answer within {QUERY_SECONDS:.0f} seconds")


@cache
def _certificates() -> SSLContext:
    """Whom TLS trusts; read once for all versions, as it takes 40 ms."""
    return httpx.create_ssl_context()


class _Pace:
    """Lets calls through no faster than an API's limits allow, those of one process."""

    def __init__(self, api: EmbeddingApi) -> None:
        self._a_call = 60 / api.requests_per_minute if api.requests_per_minute else 0.0
        self._a_token = 60 / api.tokens_per_minute if api.tokens_per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, tokens: float, until: float | None) -> None:
        """Wait for the turn of a call of about so many tokens. Raises ProviderTimeout."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next)
            if until is not None and start > until:
                raise ProviderTimeout("the limits of the version's card leave no room for this query in time")
            self._next = start + max(self._a_call, tokens * self._a_token)
        if start > now:
            time.sleep(start - now)

    def correct(self, tokens: float) -> None:
        """So many tokens more were counted than was thought."""
        with self._lock:
            self._next += tokens * self._a_token


def _numbers(embedding: object) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One embedding, a list of numbers or base64 of little-endian float32. Raises ValueError."""
    if isinstance(embedding, str):
        try:
            return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4").astype(np.float32)
        except binascii.Error as error:
            raise ValueError(f"an embedding is no base64: {error}") from error
    numbers = np.asarray(embedding)
    if numbers.ndim != 1 or numbers.dtype.kind not in "fiu":
        raise ValueError("an embedding is no list of numbers")
    with np.errstate(over="ignore"):  # infinity is refused with all else that is not finite
        return numbers.astype(np.float32)


def _pause(error: BaseException, number: int, until: float | None) -> float | None:
    """Seconds before the next attempt, after `number` of them; None: there is none."""
    assert isinstance(error, _Again)
    pause = error.after if error.after is not None else min(FIRST_PAUSE * 2 ** (number - 1), MOST_PAUSE)
    if number >= MOST_ATTEMPTS or pause > MOST_PAUSE or (until is not None and time.monotonic() + pause >= until):
        return None
    return pause


def _seconds(after: str | None) -> float | None:
    """What Retry-After says, a number of seconds or a date; None: nothing that can be read."""
    if after is None:
        return None
    try:
        return max(float(after), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
    except ValueError:
        return None
