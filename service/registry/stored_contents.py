"""Read stored images and texts as inputs of several versions (`read_inputs`), and embed them (`embed`).

Each one is decoded once for all versions, one at a time. An image goes through a version's image encoder, a text
through its text entrance, by default with the prompt for items. Vectors are (N, D), side-information (N, S).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from index.encoders.decoding import Decoder
from index.encoders.encoder import Embedded, Encoder
from index.encoders.image import preprocess
from index.errors import InvalidImage, InvalidText
from index.space import Vectors
from index.version import Card
from service.store.image_store.keys import is_text


class ContentSource(Protocol):
    """A store from which images and texts are read."""

    def read_all(self, keys: Iterable[str]) -> Iterator[Callable[[], bytes]]:
        """For each key, in order, a function that returns its content.

        The function raises:
            FileNotFoundError: there is no such content.
            OSError: it exists and cannot be read.
            RegraftError: the store does not answer, which is no fault of the item.
        """


class TextEntrance(Protocol):
    """Embeds the texts of a version, as `index.encoders.text.TextEncoder` does. Thread-safe."""

    batch: int
    """The best number of texts per call."""
    tokens: int
    """Tokens that a provider has billed so far; 0 if there is no provider."""

    def prepare(self, text: str, side: str = ...) -> Any:
        """A text as an input of `vectors`, with the version's prompt for its side. Raises InvalidText."""

    def vectors(self, texts: Sequence[Any]) -> Vectors:
        """Embed prepared texts -> (N, D), valid for the version's space."""


class Embeds(Protocol):
    """A version, such as `service.registry.loaded_version.LoadedVersion`."""

    @property
    def name(self) -> str: ...
    @property
    def card(self) -> Card: ...
    def encoder(self) -> Encoder: ...
    def text_encoder(self) -> TextEntrance: ...


@dataclass(frozen=True)
class Input:
    """A stored image (C, H, W) or text as a version's input, and the seconds of its preprocessing without decoding."""

    value: Any
    text: bool
    seconds: float = 0.0


Inputs = Mapping[str, Input]
"""Version name -> input."""


@dataclass(frozen=True)
class InputRequest:
    """A blob key (None: no content), and the versions to embed it; `side`: the prompt of a text, `query` or `item`."""

    blob: str | None
    versions: Sequence[Embeds]
    side: str = "item"


def decode_text(content: bytes) -> str:
    """Decode a stored text. Raises InvalidText."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidText(f"the stored text is not UTF-8: {error}") from error


def embeds(card: Card, blob: str) -> bool:
    """Whether a version can embed the image or text of this key."""
    return card.text if is_text(blob) else bool(card.encoder)


def make_input(version: Embeds, blob: str, content: bytes, decoder: Decoder) -> Input:
    """A stored image or text as a version's input. Raises InvalidImage, InvalidText; NoEncoder, NoTextEntrance."""
    if is_text(blob):
        return Input(version.text_encoder().prepare(decode_text(content), "item"), text=True)
    return Input(decoder.pixels(content, version.encoder().spec), text=False)


def read_inputs(contents: ContentSource, decoder: Decoder, requests: Sequence[InputRequest]) -> Iterator[Inputs | None]:
    """The inputs of each request, in order; None if its content is missing or cannot be read.

    Raises:
        StoreUnreachable: the store does not answer.
        NoEncoder, NoTextEntrance: a version does not embed images, or texts.
    """
    reads = contents.read_all(request.blob for request in requests if request.blob)
    for request in requests:
        yield _read_inputs(next(reads), decoder, request) if request.blob else None


def _read_inputs(read: Callable[[], bytes], decoder: Decoder, request: InputRequest) -> Inputs | None:
    try:
        if is_text(request.blob or ""):
            text = decode_text(read())
            entrances = {version.name: version.text_encoder() for version in request.versions}
            prepared = {name: partial(one.prepare, text, request.side) for name, one in entrances.items()}
            return {name: _timed(prepare, text=True) for name, prepare in prepared.items()}
        specs = {version.name: version.encoder().spec for version in request.versions}
        with decoder.decoded(read()) as image:
            return {name: _timed(partial(preprocess, image, spec), text=False) for name, spec in specs.items()}
    except (OSError, InvalidImage, InvalidText):
        return None


def embed(version: Embeds, inputs: Sequence[Input]) -> Embedded:
    """Embed N >= 0 inputs; side-information is None unless all inputs are images and the version has it."""
    vectors = np.empty((len(inputs), version.card.dim), np.float32)
    side = None
    for text in (False, True):
        rows = [n for n, one in enumerate(inputs) if one.text is text]
        values = [inputs[n].value for n in rows]
        if text and rows:
            vectors[rows] = version.text_encoder().vectors(values)
        elif rows:
            made = version.encoder().encode_arrays(np.stack(values))
            vectors[rows], side = made.vectors, made.side if len(rows) == len(inputs) else None
    return Embedded(vectors, side)


def time_each(version: Embeds, inputs: Sequence[Input]) -> list[float]:
    """The seconds of embedding each input alone, including preprocessing, without decoding."""
    seconds = []
    for each in inputs:
        started = time.perf_counter()
        embed(version, [each])
        seconds.append(each.seconds + time.perf_counter() - started)
    return seconds


def _timed(make: Callable[[], Any], *, text: bool) -> Input:
    started = time.perf_counter()
    value = make()
    return Input(value, text, time.perf_counter() - started)
