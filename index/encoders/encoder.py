"""`Encoder`: images or pixel arrays -> embeddings, by the ONNX models of a version folder.

`verify_version` runs all checks of a registration. `index.encoders.text` is the same for texts.
Shape suffixes: N images, C channels, H height, W width, D dimension, S side-information.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from PIL import Image

from index.edges.transform import load_transform
from index.encoders.image import Pixels, preprocess_batch
from index.encoders.model import (
    Model,
    check_probe,
    check_shape,
    legal_difference,
    ready_to_compare,
    single_node,
    space_of,
)
from index.encoders.text import TextEncoder, read_text_probe
from index.errors import InvalidArgument, NoEncoder
from index.execution import ONE_THREAD, Execution
from index.query.edge_maps import check_calibration
from index.space import Vectors
from index.version import ENCODER, PROBE, SIDE, TEXT_ENCODER, TEXT_PROBE, Card, Edge, Preprocess, Version
from index.version_folder.artifacts import read_arrays, wrong_file
from index.version_folder.folder import load_version

BATCH = 64


@dataclass(frozen=True)
class Embedded:
    """Vectors (N, D), valid for the version's space, and side-information (N, S) if the version has it."""

    vectors: Vectors
    side: Vectors | None


class Encoder:
    """The encoder of one version, verified against its card and its probe. Safe to share between threads."""

    def __init__(self, version: Version, execution: Execution = ONE_THREAD) -> None:
        """Open the models and run the probe.

        Raises:
            NoEncoder: the version takes embeddings only.
            InvalidVersionFolder: a model or the probe does not match the card.
            DeviceUnavailable: a model cannot run on the device.
        """
        self.card: Card = version.card
        if not self.card.encoder or self.card.preprocess is None:
            raise NoEncoder(f"version {version.name!r} has no encoder: it accepts embeddings, not images")
        self.spec = self.card.preprocess
        self._space = space_of(self.card)
        shape = (self.spec.channels, self.spec.height, self.spec.width)
        self._encoder = _image_model(version, ENCODER, shape, self.card.dim, execution)
        side_dim = self.card.side_dim
        self._side = _image_model(version, SIDE, shape, side_dim, execution) if side_dim else None
        self._run_probe(version.folder)

    def encode(self, images: Sequence[Image.Image]) -> Embedded:
        """Embed decoded images.

        Raises:
            InvalidVersionFolder: the output does not match the card.
        """
        parts = [
            self.encode_arrays(preprocess_batch(images[start : start + BATCH], self.spec))
            for start in range(0, max(len(images), 1), BATCH)
        ]
        side = np.concatenate([p.side for p in parts if p.side is not None]) if self._side else None
        return Embedded(np.concatenate([p.vectors for p in parts]), side)

    def encode_arrays(self, batch_NCHW: Pixels) -> Embedded:
        """Embed preprocessed pixels, float32 (N, C, H, W), in one run.

        Raises:
            InvalidArgument: another shape.
            InvalidVersionFolder: as `encode`.
        """
        return Embedded(self.vectors(batch_NCHW), _run(self._side, batch_NCHW) if self._side else None)

    def vectors(self, batch_NCHW: Pixels) -> Vectors:
        """The vectors of `encode_arrays` without side-information, which queries do not need."""
        expected = (self.spec.channels, self.spec.height, self.spec.width)
        if batch_NCHW.ndim != 4 or batch_NCHW.shape[1:] != expected:
            raise InvalidArgument(
                f"pixels must have shape (N, {', '.join(map(str, expected))}), not {batch_NCHW.shape}"
            )
        return ready_to_compare(_run(self._encoder, batch_NCHW), self._space, ENCODER, "image")

    def run_batches(self, folder: Path) -> None:
        """Embed the probe's image alone, in the largest batch of a service, and between other images.

        Raises:
            InvalidVersionFolder: as `encode`, the probe does not match, or the other images change the embedding.
        """
        probe = _read_probe(folder, self.card)
        # Copies cannot show an average over the batch, or attention along it.
        before_CHW, after_CHW = _shades(self.spec)
        mixed_NCHW = np.stack([before_CHW, probe["image"][0], after_CHW])
        for model in self._models():
            alone = _run(model, probe["image"])
            self._check_probe(model, alone, probe)
            off = float(np.abs(_run(model, mixed_NCHW)[1] - alone).max())
            if not off <= legal_difference(alone):
                raise wrong_file(
                    model.name,
                    f"embeds the probe's image differently beside other images (by {off:.2g}); `regraft version create "
                    "--onnx` makes a version that runs such a model image by image",
                )
        self.encode_arrays(np.repeat(probe["image"], BATCH, axis=0))

    def _run_probe(self, folder: Path) -> None:
        probe = _read_probe(folder, self.card)
        several_NCHW = np.repeat(probe["image"], 3, axis=0)  # a model with a fixed batch size passes only one
        for model in self._models():
            self._check_probe(model, _run(model, several_NCHW), probe)

    def _models(self) -> Iterator[Model]:
        return filter(None, (self._encoder, self._side))

    def _check_probe(self, model: Model, given: Vectors, probe: Mapping[str, Pixels]) -> None:
        """Check what a model gave for copies of the probe's image."""
        if model is self._encoder:
            given = ready_to_compare(given, self._space, ENCODER, "image")
        part = "embedding" if model is self._encoder else "side"
        check_probe(PROBE, part, given, probe[part])


def verify_version(folder: Path, known: Mapping[str, Card] | None = None, *, batches: bool = False) -> Version:
    """Run all checks of a registration: structure, hashes, space, models, probe, and each edge.

    Args:
        folder: a version folder.
        known: the registered versions by name; None: unknown, so only the structure of edges is checked.
        batches: also run the models alone and in the largest batch of a service, and images between others.

    Raises:
        InvalidVersionFolder: names the file and, inside JSON, the field at fault.
    """
    version = load_version(folder)
    space_of(version.card)
    if version.card.encoder:
        images = Encoder(version)
        if batches:
            images.run_batches(folder)
    if TEXT_ENCODER in version.card.files:
        texts = TextEncoder(version)
        if batches:
            texts.run_batches(version, BATCH)
    elif TEXT_PROBE in version.card.files:
        read_text_probe(version)
    if known is None:
        return version
    for edge in version.edges:
        if edge.old not in known:
            raise wrong_file(f"edges/{edge.old}", f"leads to version {edge.old!r}, which is not registered")
        check_edge(edge, version.card, known[edge.old])
    return version


def check_edge(edge: Edge, new: Card, old: Card) -> None:
    """Check the calibration and the files of an edge against the cards of its versions.

    Raises:
        InvalidVersionFolder: names the file and, inside JSON, the field at fault.
    """
    check_calibration(edge, new, old)
    load_transform(edge, new, old)


def _image_model(version: Version, name: str, shape: tuple[int, int, int], width: int, execution: Execution) -> Model:
    """Open a model with one input (N, C, H, W)."""

    def check(inputs: Sequence[ort.NodeArg]) -> None:
        check_shape(name, "input", single_node(name, "input", inputs).shape, shape)

    return Model(version, name, width, check, execution)


def _run(model: Model, batch_NCHW: Pixels) -> Vectors:
    return model.run({model.inputs[0].name: np.ascontiguousarray(batch_NCHW, dtype=np.float32)}, "image")


def _shades(spec: Preprocess) -> Pixels:
    """Two images of all shades between black and white, as the encoder's input (2, C, H, W)."""
    count = spec.height * spec.width
    shades_HW1 = (np.arange(1, count + 1, dtype=np.float32) / (count + 1)).reshape(spec.height, spec.width, 1)
    pixels_2HWC = np.stack([shades_HW1, 1 - shades_HW1**2]) - np.asarray(spec.mean, np.float32)
    return np.ascontiguousarray((pixels_2HWC / np.asarray(spec.std, np.float32)).transpose(0, 3, 1, 2))


def _read_probe(folder: Path, card: Card) -> dict[str, Pixels]:
    assert card.preprocess is not None
    spec = card.preprocess
    wanted = {"image": (1, spec.channels, spec.height, spec.width), "embedding": (1, card.dim)}
    if card.side_dim:
        wanted["side"] = (1, card.side_dim)
    return read_arrays(folder / PROBE, PROBE, wanted, expected=card.files.get(PROBE))
