"""The encoders of one version in memory: loaded on first use, batched over requests, dropped when idle.

Dropping only removes a reference: a caller that uses an encoder keeps it until it is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from index.encoders.encoder import BATCH, Encoder
from index.encoders.image import Pixels
from index.encoders.text import TextEncoder
from index.space import Vectors
from index.version import Version
from service.registry.encoders.batching import Batcher, R, X, free_runs
from service.registry.encoders.embedding_api import ApiEncoder
from service.registry.encoders.text_entrances import open_texts
from service.settings import Settings

T = TypeVar("T")
Embed = Callable[[Callable[[], Sequence[Any]]], Vectors]
"""Embeds the inputs that a function prepares."""

Embedded = tuple[Vectors, Vectors | None]
"""The vector (D,) and the side-information (S,) of one item."""


class ImageModality:
    """The image encoder of a version. Queries and items are batched separately: ingests do not delay queries."""

    def __init__(self, version: Version, settings: Settings) -> None:
        """Load the encoder. Raises NoEncoder, InvalidVersionFolder."""
        self.encoder = encoder = Encoder(version, settings.execution)
        self.queries: Batcher[Pixels, Vectors] = _batcher(lambda px: encoder.vectors(np.stack(px)), settings)
        self.items: Batcher[Pixels, list[Embedded]] = _batcher(self._rows, settings)

    def _rows(self, pixels: Sequence[Pixels]) -> list[Embedded]:
        embedded = self.encoder.encode_arrays(np.stack(pixels))
        sides = [None] * len(pixels) if embedded.side is None else embedded.side
        return list(zip(embedded.vectors, sides, strict=True))


class TextModality:
    """The text entrance of a version; queries and items are batched separately, as in `ImageModality`."""

    def __init__(self, version: Version, settings: Settings) -> None:
        """Load the entrance. Raises NoTextEntrance, InvalidVersionFolder, ProviderUnavailable."""
        self.encoder: TextEncoder | ApiEncoder = open_texts(version, settings.execution, settings.apis)
        self.queries: Embed = self._calls(settings, queries=True)
        self.items: Embed = self._calls(settings, queries=False)

    def _calls(self, settings: Settings, *, queries: bool) -> Embed:
        encoder = self.encoder
        if isinstance(encoder, TextEncoder):
            return _batcher(encoder.vectors, settings)
        # Calls to a provider gain nothing from batching, and one failure would affect all requests.
        embed = encoder.query_vectors if queries else encoder.vectors
        return lambda prepare: embed(prepare())


class Lazy(Generic[T]):
    """A value that is created on first use. Thread-safe."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._value: T | None = None
        self._used = 0.0

    @property
    def loaded(self) -> bool:
        """Whether it is in memory."""
        return self._value is not None

    def get(self) -> T:
        """The value; created if necessary, by one thread while others wait."""
        with self._lock:
            self._used = time.monotonic()
            if self._value is None:
                self._value = self._make()
            return self._value

    def touch(self) -> None:
        """Count this moment as a use, without creating the value."""
        self._used = time.monotonic()

    def drop(self, idle_seconds: float) -> None:
        """Drop the value if it has not been used for `idle_seconds`."""
        with self._lock:
            if time.monotonic() - self._used >= idle_seconds:
                self._value = None


def _batcher(encode: Callable[[Sequence[X]], R], settings: Settings) -> Batcher[X, R]:
    return Batcher(
        encode, size=BATCH, wait_seconds=settings.batch_wait_ms / 1000, runs=free_runs(settings.encoder_threads)
    )
