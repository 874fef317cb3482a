"""A version's embeddings of a data set's queries and items, made as in serving: by the exported encoder.

Where onnxruntime is missing, or the folder was written without ONNX models, the trained weights in torch stand in.
Shape suffixes: Q queries, N items, D dimension, S side-information.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from index.errors import NoEncoder
from index.execution import Execution
from index.space import Space, Vectors, space_from_json
from index.version import Version
from training.data.images import Data, ImageSet
from training.measurement import embed, embed_side
from training.trained import WEIGHTS, Trained

EncodeImages = Callable[[ImageSet], tuple[Vectors, Vectors | None]]
"""Images -> embeddings (N, D), and side-information (N, S) where the version has it."""


@dataclass(frozen=True)
class VersionEmbeddings:
    """One version's embeddings of the queries and of the items.

    Attributes:
        version: whose embeddings these are.
        queries_QD: of the query images.
        items_ND: of the gallery images.
        side_NS: the items' side-information, where the version has it.
    """

    version: Version
    queries_QD: Vectors
    items_ND: Vectors
    side_NS: Vectors | None = None

    @property
    def space(self) -> Space:
        """The space in which these embeddings are compared."""
        return space_from_json(self.version.card.space)


def embed_version(version: Version, data: Data) -> VersionEmbeddings:
    """Embed a data set's queries and items; once, where they are the same images.

    A version whose embeddings come with the data is not run.

    Raises:
        NoEncoder: the folder holds nothing that embeds images.
        InvalidVersionFolder: an encoder is not what its card says.
    """
    if version.name == data.stored and data.query.stored is not None and data.gallery.stored is not None:
        return VersionEmbeddings(version, data.query.stored, data.gallery.stored)
    encode = open_encoder(version)
    items_ND, side_NS = encode(data.gallery)
    return VersionEmbeddings(version, items_ND if data.same else encode(data.query)[0], items_ND, side_NS)


def open_encoder(version: Version) -> EncodeImages:
    """The version's encoder: its ONNX models, else its weights in torch. Raises as `embed_version`."""
    return _onnx_encoder(version) if version.card.encoder and has_onnxruntime() else _torch_encoder(version)


def has_onnxruntime() -> bool:
    """Whether ONNX models can be checked and run here."""
    return all(importlib.util.find_spec(package) is not None for package in ("onnx", "onnxruntime"))


def _onnx_encoder(version: Version) -> EncodeImages:
    from index.encoders.encoder import BATCH, Encoder

    encoder = Encoder(version, Execution(threads=os.cpu_count() or 1))

    def encode(images: ImageSet) -> tuple[Vectors, Vectors | None]:
        parts = [
            encoder.encode([images.images[row] for row in range(start, min(start + BATCH, len(images)))])
            for start in range(0, len(images), BATCH)
        ]
        side = [part.side for part in parts if part.side is not None]
        return np.concatenate([part.vectors for part in parts]), np.concatenate(side) if side else None

    return encode


def _torch_encoder(version: Version) -> EncodeImages:
    if WEIGHTS not in version.card.files:
        missing = "onnxruntime is not installed" if version.card.encoder else "it has no encoder.onnx"
        raise NoEncoder(f"version {version.name!r} cannot embed images: {missing}, and it has no {WEIGHTS}")
    trained = Trained.load(version.folder)
    return lambda images: (embed(trained, images), embed_side(trained, images))
