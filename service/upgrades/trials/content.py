"""The images or texts of a request, so that a trial can hash them and embed them by another version."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import BinaryIO

from index.encoders.decoding import Decoder
from index.query.query_plan import Encode
from service.registry.embedding import embed_images, embed_texts
from service.registry.image_losses import ImageLosses
from service.registry.registry import Registry


class ImageContent:
    """The images of a form, which closes after the response."""

    def __init__(self, registry: Registry, files: Sequence[BinaryIO], decoder: Decoder) -> None:
        self._registry = registry
        self._files = files
        self._decoder = decoder
        self.encoders = registry.encoders()
        """Versions that can embed it."""

    def digest(self) -> bytes:
        """A hash of the images."""
        return _digest([_read(file) for file in self._files])

    def size(self) -> int:
        """Bytes of all images."""
        return sum(file.seek(0, io.SEEK_END) for file in self._files)

    def keep(self) -> Encode:
        """An encoder of a copy of the images, which outlives the form."""
        files = [io.BytesIO(_read(file)) for file in self._files]
        return embed_images(self._registry, files, self._decoder, ImageLosses())


class TextContent:
    """The texts of a request."""

    def __init__(self, registry: Registry, texts: Sequence[str]) -> None:
        self._registry = registry
        self._texts = texts
        self.encoders = registry.text_encoders()
        """Versions that can embed it."""

    def digest(self) -> bytes:
        """A hash of the texts."""
        return _digest([text.encode() for text in self._texts])

    def size(self) -> int:
        """Approximate bytes of all texts."""
        return sum(map(len, self._texts))

    def keep(self) -> Encode:
        """An encoder of the same texts."""
        return embed_texts(self._registry, self._texts)


def _digest(parts: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def _read(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()
