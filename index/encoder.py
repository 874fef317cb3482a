"""Encoder: images or pixel arrays -> embeddings, by the ONNX models of a version folder.

Shape suffixes: N images, C channels, H height, W width, D dimension, S side-information.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from PIL import Image

from index.artifacts import open_model, read_arrays
from index.edge_maps import check_calibration
from index.errors import InvalidArgument, InvalidVersionFolder, NoEncoder
from index.folder import load_version
from index.image import Pixels, preprocess_batch
from index.space import UNIT_TOLERANCE, Cosine, Space, Vectors, space_from_json
from index.transform import load_transform
from index.version import ENCODER, PROBE, SIDE, Card, Version

BATCH = 64
PROBE_TOLERANCE = 1e-3
"""Largest absolute difference from the stored probe; CPUs and onnxruntime releases differ by about 1e-5."""


@dataclass(frozen=True)
class Embedded:
    """Vectors (N, D), valid for the version's space, and side-information (N, S) where the version has it."""

    vectors: Vectors
    side: Vectors | None


class Encoder:
    """The encoder of one version, verified against its card and its probe. Safe to share between threads."""

    def __init__(self, version: Version, threads: int = 1) -> None:
        """Open the models and run the probe.

        Raises:
            NoEncoder: the version takes embeddings only.
            InvalidVersionFolder: a model or the probe is not what the card says.
        """
        self.card: Card = version.card
        if not self.card.encoder or self.card.preprocess is None:
            raise NoEncoder(f"version {version.name!r} has no encoder: it takes embeddings, not images")
        self.spec = self.card.preprocess
        self._space = _space(self.card)
        shape = (self.spec.channels, self.spec.height, self.spec.width)
        self._encoder = _Model(version.folder, ENCODER, shape, self.card.dim, threads)
        self._side = _Model(version.folder, SIDE, shape, self.card.side_dim, threads) if self.card.side_dim else None
        self._run_probe(version.folder)

    def encode(self, images: Sequence[Image.Image]) -> Embedded:
        """Embed decoded images.

        Raises:
            InvalidVersionFolder: the encoder gave something that is not what its card says.
        """
        parts = [
            self.encode_arrays(preprocess_batch(images[start : start + BATCH], self.spec))
            for start in range(0, max(len(images), 1), BATCH)
        ]
        side = np.concatenate([p.side for p in parts if p.side is not None]) if self._side else None
        return Embedded(np.concatenate([p.vectors for p in parts]), side)

    def encode_arrays(self, batch_NCHW: Pixels) -> Embedded:
        """Embed preprocessed pixels, float32 (N, C, H, W), in one run. Raises as `encode` does."""
        expected = (self.spec.channels, self.spec.height, self.spec.width)
        if batch_NCHW.ndim != 4 or batch_NCHW.shape[1:] != expected:
            raise InvalidArgument(
                f"pixels must have shape (N, {', '.join(map(str, expected))}), not {batch_NCHW.shape}"
            )
        vectors_ND = self._encoder.run(batch_NCHW)
        if isinstance(self._space, Cosine):
            length_N = np.linalg.norm(vectors_ND, axis=1)
            if (off_N := np.abs(length_N - 1) > UNIT_TOLERANCE).any():
                row = int(np.argmax(off_N))
                raise _wrong(
                    ENCODER, f"gives a vector of length {length_N[row]:.4g} for image {row}, not a unit vector"
                )
        return Embedded(self._space.normalise(vectors_ND), self._side.run(batch_NCHW) if self._side else None)

    def _run_probe(self, folder: Path) -> None:
        probe = _read_probe(folder, self.card)
        # Three copies: a model with a frozen batch size, or one that mixes its batch, does not repeat the answer.
        given = self.encode_arrays(np.repeat(probe["image"], 3, axis=0))
        for name, array in (("embedding", given.vectors), ("side", given.side)):
            if array is None:
                continue
            off = float(np.abs(array - probe[name]).max())
            if not off <= PROBE_TOLERANCE:
                raise _wrong(
                    PROBE, f"expects another {name}: it differs by {off:.2g}, at most {PROBE_TOLERANCE} is legal"
                )


def verify_version(folder: Path, known: Mapping[str, Card] | None = None) -> Version:
    """Everything a registration checks: structure, hashes, space, models, probe, and each edge.

    Args:
        folder: a version folder.
        known: the registered versions by name. None: no registry at hand, edges are only checked by their structure.

    Raises:
        InvalidVersionFolder: names the file and, inside JSON, the field at fault.
    """
    version = load_version(folder)
    _space(version.card)
    if version.card.encoder:
        Encoder(version)
    if known is None:
        return version
    for edge in version.edges:
        if edge.old not in known:
            raise _wrong(f"edges/{edge.old}", f"leads to version {edge.old!r}, which is not registered")
        check_calibration(edge, version.card, known[edge.old])
        load_transform(edge, version.card, known[edge.old])
    return version


class _Model:
    """An ONNX model of one input (N, C, H, W) and one output (N, width)."""

    def __init__(self, folder: Path, name: str, shape: tuple[int, int, int], width: int, threads: int) -> None:
        self.name, self.width = name, width
        self.session = open_model(folder / name, name, threads=threads)
        self.input = _only(name, "input", self.session.get_inputs())
        output = _only(name, "output", self.session.get_outputs())
        _check_shape(name, "input", self.input.shape, shape)
        _check_shape(name, "output", output.shape, (width,))

    def run(self, batch_NCHW: Pixels) -> Vectors:
        pixels = np.ascontiguousarray(batch_NCHW, dtype=np.float32)
        try:
            (given,) = self.session.run(None, {self.input.name: pixels})
        except Exception as error:  # onnxruntime's own exception types share no public base
            raise _wrong(self.name, f"fails on a batch of {len(pixels)} ({error})") from error
        if given.shape != (len(pixels), self.width):
            raise _wrong(self.name, f"gives shape {given.shape} for {len(pixels)} images, not (N, {self.width})")
        if not np.isfinite(given).all():
            row = int(np.argmin(np.isfinite(given).all(axis=1)))
            raise _wrong(self.name, f"gives numbers that are not finite for image {row}")
        return np.asarray(given, dtype=np.float32)


def _space(card: Card) -> Space:
    try:
        return space_from_json(card.space)
    except InvalidArgument as error:
        raise InvalidVersionFolder(f"card.json: {error.message}", pointer=error.pointer) from error


def _only(name: str, side: str, found: Sequence[ort.NodeArg]) -> ort.NodeArg:
    if len(found) != 1 or found[0].type != "tensor(float)":
        given = ", ".join(f"{n.name}: {n.type}" for n in found)
        raise _wrong(name, f"needs exactly one {side} of type tensor(float), not {given}")
    return found[0]


def _check_shape(name: str, side: str, given: Sequence[int | str | None], rest: tuple[int, ...]) -> None:
    """Compare the declared shape; names and None stand for sizes that only running it tells."""
    fits = len(given) == len(rest) + 1 and not isinstance(given[0], int)
    if not fits or any(isinstance(g, int) and g != r for g, r in zip(given[1:], rest, strict=True)):
        wanted = ", ".join(map(str, ("N", *rest)))
        raise _wrong(name, f"{side} has shape {list(given)}; the card says ({wanted}) with N free")


def _read_probe(folder: Path, card: Card) -> dict[str, Pixels]:
    assert card.preprocess is not None
    spec = card.preprocess
    wanted = {"image": (1, spec.channels, spec.height, spec.width), "embedding": (1, card.dim)}
    if card.side_dim:
        wanted["side"] = (1, card.side_dim)
    return read_arrays(folder / PROBE, PROBE, wanted)


def _wrong(name: str, why: str) -> InvalidVersionFolder:
    return InvalidVersionFolder(f"{name} {why}", pointer=f"/{name}")
