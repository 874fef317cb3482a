"""`Model`, the base of encoders: an ONNX model with one output (N, width), checked against its version's card.

Shape suffixes: N inputs, D dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from index.errors import InvalidArgument, InvalidVersionFolder, raise_if_out_of_memory
from index.execution import Execution
from index.space import UNIT_TOLERANCE, Cosine, Space, Vectors, space_from_json
from index.version import Card, Version
from index.version_folder.artifacts import open_model, wrong_file

PROBE_TOLERANCE = 1e-3
"""Largest difference from the stored probe, relative to its largest absolute number if that is above 1; CPUs and
releases of onnxruntime differ by about 1e-5."""

FLOAT, INT64 = "tensor(float)", "tensor(int64)"

CheckInputs = Callable[[Sequence[ort.NodeArg]], None]


class Model:
    """An ONNX model with one output, float32 (N, width). Safe to share between threads."""

    def __init__(
        self, version: Version, name: str, width: int, check_inputs: CheckInputs, execution: Execution
    ) -> None:
        """Open the file `name` of the version's folder; `check_inputs` checks its declared inputs.

        Raises:
            InvalidVersionFolder: not such a model.
            DeviceUnavailable: it cannot run on the device.
            ChangedOnDisk: the file does not have the sha256 that the card lists.
        """
        self.name, self.width = name, width
        expected = version.card.files.get(name)
        self.session = open_model(version.folder / name, name, execution=execution, expected=expected)
        self.inputs: Sequence[ort.NodeArg] = self.session.get_inputs()
        check_inputs(self.inputs)
        output = single_node(name, "output", self.session.get_outputs())
        check_shape(name, "output", output.shape, (width,))

    def run(self, inputs: Mapping[str, NDArray[Any]], what: str) -> Vectors:
        """Run the model on arrays of equal length N; `what` names one input in messages ("image").

        Raises:
            InvalidVersionFolder: it fails, or its output has another shape or is not finite.
            MemoryError: out of memory.
        """
        count = len(next(iter(inputs.values())))
        try:
            (given,) = self.session.run(None, dict(inputs))
        except Exception as error:  # onnxruntime's own exception types share no public base
            raise_if_out_of_memory(error)
            raise wrong_file(self.name, f"fails on a batch of {count} ({error})") from error
        if given.shape != (count, self.width):
            raise wrong_file(self.name, f"gives shape {given.shape} for {count} {what}s, not (N, {self.width})")
        if not np.isfinite(given).all():
            row = int(np.argmin(np.isfinite(given).all(axis=1)))
            raise wrong_file(self.name, f"gives numbers that are not finite for {what} {row}")
        return np.asarray(given, dtype=np.float32)


def ready_to_compare(vectors_ND: Vectors, space: Space, name: str, what: str) -> Vectors:
    """Normalise a model's output for its space. Raises InvalidVersionFolder unless cosine vectors have length 1."""
    if isinstance(space, Cosine):
        length_N = np.linalg.norm(vectors_ND, axis=1)
        if (off_N := np.abs(length_N - 1) > UNIT_TOLERANCE).any():
            row = int(np.argmax(off_N))
            raise wrong_file(name, f"gives a vector of length {length_N[row]:.4g} for {what} {row}, not a unit vector")
    return space.normalise(vectors_ND)


def check_probe(name: str, part: str, given: Vectors, expected: Vectors) -> None:
    """Raise InvalidVersionFolder unless `given` is close to `expected`, the array `part` of the probe file `name`."""
    off, legal = float(np.abs(given - expected).max()), legal_difference(expected)
    if not off <= legal:
        raise wrong_file(name, f"expects another {part}: it differs by {off:.2g}, at most {legal:.2g} is legal")


def legal_difference(expected: Vectors) -> float:
    """The largest legal absolute difference from expected vectors."""
    return PROBE_TOLERANCE * max(1.0, float(np.abs(expected).max()))


def space_of(card: Card) -> Space:
    """The card's space. Raises InvalidVersionFolder."""
    try:
        return space_from_json(card.space)
    except InvalidArgument as error:
        raise InvalidVersionFolder(f"card.json: {error.message}", pointer=error.pointer) from error


def single_node(name: str, side: str, found: Sequence[ort.NodeArg]) -> ort.NodeArg:
    """The only input or output of a model. Raises InvalidVersionFolder if there are several, or it is not FLOAT."""
    if len(found) != 1 or found[0].type != FLOAT:
        given = ", ".join(f"{n.name}: {n.type}" for n in found)
        raise wrong_file(name, f"needs exactly one {side} of type {FLOAT}, not {given}")
    return found[0]


def check_shape(name: str, side: str, given: Sequence[int | str | None], rest: Sequence[int | str]) -> None:
    """Raise InvalidVersionFolder unless a declared shape fits (N, *rest); names and None are dynamic sizes."""
    fits = len(given) == len(rest) + 1 and not isinstance(given[0], int)
    pairs = zip(given[1:], rest, strict=True) if fits else ()
    if not fits or any(isinstance(g, int) and isinstance(r, int) and g != r for g, r in pairs):
        wanted = ", ".join(map(str, ("N", *rest)))
        raise wrong_file(name, f"{side} has shape {list(given)}; the card says ({wanted}) with N free")
