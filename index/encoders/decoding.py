"""`Decoder`: decodes images, with one limit on the memory of decoded images for all threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from index.encoders.image import MAX_PIXELS, Pixels, load_image, open_image, preprocess
from index.errors import TooManyPixels
from index.version import Preprocess

MAX_DECODED_BYTES = 1 << 30
PIXEL_BYTES = 8
"""Memory per pixel: four bytes, and four for the copy while it is turned upright or its colours are converted."""


def decoded_bytes(width: int, height: int) -> int:
    """Memory counted for an image of this size."""
    return width * height * PIXEL_BYTES


class PixelBudget:
    """The pixels that may still be decoded for one request, which bound its time: small files can be large images."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = self._left = max_pixels

    def take(self, pixels: int) -> None:
        """Take an image's pixels, each time that it is decoded. Raises TooManyPixels if fewer are left."""
        self._left -= pixels
        if self._left < 0:
            most = f"at most {self._max_pixels:,} pixels in total are decoded for one request"
            raise TooManyPixels(f"{most}; send fewer images at a time")


class Decoder:
    """Decodes images of at most `max_pixels`; those decoded at one time take at most `max_bytes`.

    An image above `max_bytes` is decoded alone. Threads are served first come, first served, so that small images do
    not delay a large one for ever. A thread that holds an image must not ask for another: threads could deadlock.
    """

    def __init__(self, max_pixels: int = MAX_PIXELS, max_bytes: int = MAX_DECODED_BYTES) -> None:
        self._max_pixels = max_pixels
        self._max_bytes = max_bytes
        self._taken = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def decoded(self, data: bytes, budget: PixelBudget | None = None) -> Iterator[Image.Image]:
        """Decode an image as `decode_image` does, and count its memory until the block ends.

        Raises:
            InvalidImage: as `decode_image`.
            TooManyPixels: the budget is used up; nothing was decoded.
        """
        image = open_image(data, max_pixels=self._max_pixels)
        if budget is not None:
            budget.take(image.width * image.height)
        with self._room(decoded_bytes(*image.size)):
            image = load_image(image)  # frees the opened file
            yield image

    def pixels(self, data: bytes, spec: Preprocess) -> Pixels:
        """Decode and preprocess an image, (C, H, W). Raises InvalidImage."""
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
                self._changed.notify_all()  # the next image may fit too

    def _fits(self, size: int) -> bool:
        return not self._taken or self._taken + size <= self._max_bytes
