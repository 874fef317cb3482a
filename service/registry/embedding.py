"""Embed the images or texts of a request by any version, in batches with other requests.

`embed_images` and `embed_texts` return an `Encode`: `encode(version)` embeds the queries, once per version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from index.encoders.decoding import Decoder, PixelBudget
from index.encoders.encoder import BATCH
from index.encoders.image import Pixels, preprocess
from index.errors import RegraftError
from index.query.query_plan import Encode
from index.space import Vectors
from index.version import Preprocess
from service.registry.encoders.batching import X
from service.registry.image_losses import ImageLosses, Size
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry


def read_pixels(
    file: BinaryIO, spec: Preprocess, decoder: Decoder, note: Callable[[Size], None], budget: PixelBudget | None = None
) -> Pixels:
    """An image in a file as an encoder's input; `note` is called with its upright size. Raises as `Decoder.decoded`."""
    file.seek(0)
    with decoder.decoded(file.read(), budget) as image:
        note(image.size)
        return preprocess(image, spec)


def embed_images(
    registry: Registry,
    files: Sequence[BinaryIO],
    decoder: Decoder,
    image_losses: ImageLosses,
    budget: PixelBudget | None = None,
) -> Encode:
    """An `Encode` of images; holds only a batch of encoder inputs at a time. Errors point to `/images/<number>`.

    Images that lose much in a version's preprocessing are added to `image_losses`. All versions share the `budget`.
    """

    def encode(version: LoadedVersion) -> Vectors:
        images = version.images()

        def read(number: int) -> Pixels:
            pointer, spec = f"/images/{number}", images.encoder.spec
            with errors_at(pointer):
                note = functools.partial(image_losses.note, version.name, spec, pointer)
                return read_pixels(files[number], spec, decoder, note, budget)

        return np.concatenate([images.queries(ready) for ready in _blocks(len(files), read)])

    return _cached_by_version(registry, encode)


def embed_texts(registry: Registry, texts: Sequence[str]) -> Encode:
    """An `Encode` of texts, which raises NoTextEntrance for a version without one, InvalidText at `/texts/<number>`."""

    def encode(version: LoadedVersion) -> Vectors:
        registry.check_reads_texts(version, "/texts")
        entrance = version.texts()

        def read(number: int) -> Any:
            with errors_at(f"/texts/{number}"):
                return entrance.encoder.prepare(texts[number])

        return np.concatenate([entrance.queries(ready) for ready in _blocks(len(texts), read)])

    return _cached_by_version(registry, encode)


@contextmanager
def errors_at(pointer: str) -> Iterator[None]:
    """Make errors point to this part of the request."""
    try:
        yield
    except RegraftError as error:
        error.pointer = pointer
        raise


def _blocks(count: int, read: Callable[[int], X]) -> Iterator[Callable[[], list[X]]]:
    """For each block of queries, a function that reads its inputs."""
    for start in range(0, count, BATCH):
        numbers = range(start, min(start + BATCH, count))
        yield functools.partial(_read_all, read, numbers)


def _read_all(read: Callable[[int], X], numbers: range) -> list[X]:
    return [read(number) for number in numbers]


def _cached_by_version(registry: Registry, encode: Callable[[LoadedVersion], Vectors]) -> Encode:
    return functools.cache(lambda version: encode(registry.named(version)))
