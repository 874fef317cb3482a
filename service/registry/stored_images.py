"""Stored images as the inputs of several encoders at once: each is decoded once, and only one at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from index.decoding import Decoder
from index.errors import InvalidImage
from index.image import Pixels, preprocess
from index.version import Preprocess
from service.store.blobs import Blobs


@dataclass(frozen=True)
class Input:
    """An image as an encoder's input (C, H, W), and how long it took to make that of the decoded image."""

    pixels: Pixels
    seconds: float


Inputs = Mapping[str, Input]
"""By the name of a version."""


def read_inputs(blobs: Blobs, decoder: Decoder, blob: str | None, specs: Mapping[str, Preprocess]) -> Inputs | None:
    """A stored image as the input of each version; None where it is gone or cannot be read. Raises StoreUnreachable."""
    try:
        with decoder.decoded(blobs.read(blob or "")) as image:
            made = {}
            for name, spec in specs.items():
                started = time.perf_counter()
                pixels = preprocess(image, spec)
                made[name] = Input(pixels, time.perf_counter() - started)
            return made
    except (OSError, InvalidImage):
        return None
