"""`OnnxFile`: a version made of an ONNX file and a preprocess.

Shape suffixes: N images, C channels, H height, W width, D dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from index.creation import onnx_graph
from index.creation.probes import compare, probe_files, write_image_probe
from index.encoders.image import decode_image, preprocess_batch
from index.errors import InvalidArgument
from index.space import Cosine, Vectors, space_from_json
from index.version import ENCODER, Card, Preprocess
from index.version_folder.folder import sha256

TRIED = 3
"""Images per run while a model is rewritten and compared."""


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX model of images and its preprocessing.

    Args:
        path: a model with one input, (N, C, H, W) or (N, H, W, C), N free or 1; external weights are included.
        preprocess: from an image to that input.
        space: the `space` field of a card. For `cosine` the output is normalised to length 1.
        pool: `none` for an output (N, D), `mean` or `cls` for (N, tokens, D), `mean` for (N, D, H, W) or (N, H, W, D).
        output: name of the output, if there are several.
    """

    path: Path
    preprocess: Preprocess
    space: Mapping[str, Any] = field(default_factory=lambda: {"kind": "cosine"})
    pool: str = "none"
    output: str = ""

    def write(self, folder: Path, name: str) -> Card:
        space = space_from_json(dict(self.space))
        given = onnx_graph.with_one_output(read_model(self.path), self.output)
        onnx_graph.check_one_input(given)
        images_NCHW = preprocess_batch([decode_image(data) for data in probe_files()], self.preprocess)
        source = onnx_graph.with_pixel_input(given, self.preprocess)
        free = onnx_graph.with_free_batch(source, images_NCHW[:TRIED])
        raw = onnx_graph.run_one_by_one(onnx_graph.open_session(source), images_NCHW)
        if onnx_graph.has_channels_last(raw.shape[1:], self.preprocess):
            free, raw = onnx_graph.with_channels_first(free), raw.transpose(0, 3, 1, 2)
        pooled_ND = _pooled(raw, self.pool)
        if isinstance(space, Cosine) and (zero := int((~pooled_ND.any(axis=1)).sum())):
            raise InvalidArgument(
                f"the model returns only zeros for {zero} of {len(pooled_ND)} images: these have no direction",
                pointer="/onnx",
            )
        expected_ND = space.normalise(pooled_ND)
        encoder = onnx_graph.with_pooling(free, raw.shape[1:], self.pool)
        encoder = onnx_graph.with_float_output(encoder, expected_ND.shape[1], unit=isinstance(space, Cosine))
        (folder / ENCODER).write_bytes(encoder.SerializeToString(deterministic=True))
        run = onnx_graph.open_session(encoder)
        encoded_ND = np.concatenate([run(images_NCHW[row : row + TRIED]) for row in range(0, len(images_NCHW), TRIED)])
        parity = compare(encoded_ND, expected_ND, self.path.name, ENCODER)
        write_image_probe(folder, images_NCHW[:1], encoded_ND[:1])
        return Card(
            name,
            encoded_ND.shape[1],
            space.as_json(),
            self.preprocess,
            method="onnx",
            recipe={"onnx": self.path.name, "sha256": sha256(self.path), "pool": self.pool, "output": self.output},
            metrics={"parity": {"images": parity.as_json()}},
        )


def read_model(path: Path) -> onnx_graph.ModelProto:
    """Read an ONNX model with its external weights. Raises InvalidArgument."""
    try:
        model = onnx.load(path)
    except Exception as error:  # of the files, or of protobuf on corrupt bytes
        raise InvalidArgument(f"{path} cannot be read as an ONNX model: {error}", pointer="/onnx") from error
    if not len(model.graph.output):
        raise InvalidArgument(f"{path} is not an ONNX model", pointer="/onnx")
    return model


def _pooled(raw: Vectors, pool: str) -> Vectors:
    """The NumPy equivalent of `onnx_graph.with_pooling`."""
    if pool == "cls":
        return raw[:, 0]
    if pool == "mean" and raw.ndim > 2:
        axes = (1,) if raw.ndim == 3 else (2, 3)
        averaged: Vectors = raw.mean(axis=axes, dtype=np.float32)
        return averaged
    return raw.reshape(len(raw), -1)
