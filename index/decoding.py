"""A bound on the memory of decoded images, shared by all threads that decode."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from index.image import MAX_PIXELS, Pixels, load_image, open_image, preprocess
from index.version import Preprocess

MAX_DECODED_BYTES = 1 << 30
PIXEL_BYTES = 8
"""Memory a pixel takes: four bytes where it lies, and as many while it is turned upright or its colours converted."""


def decoded_bytes(width: int, height: int) -> int:
    """Memory that an image of this size counts for, known before it is decoded."""
    return width * height * PIXEL_BYTES


class Decoder:
    """Decodes images of at most `max_pixels`, with `max_bytes` for those of all threads.

    A larger image is decoded alone. Threads are served in the order in which they asked, so that small images do not
    delay a large one for ever. A thread must not ask for an image while it holds another: both could wait for each
    other.
    """

    def __init__(self, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_DECODED_BYTES) -> None:
        self._max_pixels = max_pixels
        self._max_bytes = max_bytes
        self._taken = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def decoded(self, data: bytes) -> Iterator[Image.Image]:
        """One image as `decode_image` gives it, until the block ends. Raises InvalidImage as that does."""
        image = open_image(data, max_pixels=self._max_pixels)
        with self._room(decoded_bytes(*image.size)):
            image = load_image(image)  # what was read of the file is not held beside it
            yield image

    def pixels(self, data: bytes, spec: Preprocess) -> Pixels:
        """One image as an encoder's input. Raises InvalidImage."""
        with self.decoded(data) as image:
            return preprocess(image, spec)

    @contextmanager
    def _room(self, size: int) -> Iterator[None]:
        self._take(size)
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()

    def _take(self, size: int) -> None:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is turn and self._fits(size))
                self._taken += size
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()  # what comes next may fit beside it

    def _fits(self, size: int) -> bool:
        return not self._taken or self._taken + size <= self._max_bytes
