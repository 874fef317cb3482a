"""Open the untrusted binary files of a version folder: ONNX models (`open_model`) and .npz arrays (`read_arrays`).

onnx and onnxruntime are imported only to open a model, so edges without a model work where they are not installed.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from index.errors import ChangedOnDisk, DeviceUnavailable, InvalidVersionFolder
from index.execution import ONE_THREAD, Execution

if TYPE_CHECKING:
    import onnxruntime as ort

FIRST_OPSET = 11
Shape = tuple[int | None, ...]
MAX_ARRAY = 1 << 28
"""Largest number of elements of one array of an .npz file, 1 GiB as float32: its header may state any number."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Legal compression methods in an archive: others can allocate any amount of memory by a short header."""


def legal_opsets() -> range:
    """Opsets of the default domain, from `FIRST_OPSET` to the newest that the onnx package defines."""
    import onnx

    return range(FIRST_OPSET, onnx.defs.onnx_opset_version() + 1)


def open_model(
    path: Path, name: str, *, execution: Execution = ONE_THREAD, expected: str | None = None
) -> ort.InferenceSession:
    """Open an ONNX file for inference.

    Args:
        path: the file.
        name: its path inside the version folder, for messages.
        execution: threads and device.
        expected: the sha256 it must have; None: any.

    Raises:
        ChangedOnDisk: it has another sha256, or cannot be read although one is expected.
        DeviceUnavailable: it cannot run on the device.
        InvalidVersionFolder: not an ONNX model, an opset outside `legal_opsets()`, external data, or an operator
            unknown to onnxruntime.
    """
    import onnx

    content = read_expected(path, name, expected)
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's exception types differ between its implementations
        raise wrong_file(name, f"is not an ONNX model ({error})") from error
    opset = next((o.version for o in model.opset_import if o.domain in {"", "ai.onnx"}), 0)
    if opset not in (legal := legal_opsets()):
        raise wrong_file(name, f"has opset {opset}; legal: {legal.start} to {legal.stop - 1}")
    # onnxruntime resolves external data of a model given as bytes against the working directory.
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in _tensors(model)):
        raise wrong_file(name, "keeps weights in external data; save it as one file")
    try:
        return execution.open(content)
    except DeviceUnavailable:
        raise
    except Exception as error:  # onnxruntime's own exception types share no public base
        raise wrong_file(name, f"cannot be loaded ({error})") from error


def read_arrays(
    path: Path,
    name: str,
    shapes: Mapping[str, Shape],
    optional: frozenset[str] = frozenset(),
    expected: str | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Read arrays of finite floats from an .npz file.

    Args:
        path: the file.
        name: its path inside the version folder, for messages.
        shapes: the arrays to read and the shape each must have; None in a shape: any length.
        optional: those of them that may be missing.
        expected: the sha256 it must have; None: any.

    Raises:
        ChangedOnDisk: it has another sha256, or cannot be read although one is expected.
        InvalidVersionFolder: not an .npz file, an array missing, of another shape or type, or not finite.
    """
    content = io.BytesIO(read_expected(path, name, expected))
    try:
        with zipfile.ZipFile(content) as stored:
            found = {
                array: _read_array(stored, name, array, shape)
                for array, shape in shapes.items()
                if f"{array}.npy" in stored.namelist()
            }
    except InvalidVersionFolder:
        raise
    except Exception as error:  # on corrupt bytes zipfile, zlib, tokenize and NumPy raise many types of exceptions
        raise wrong_file(name, f"is not a readable .npz of arrays ({error})") from error
    if missing := sorted(set(shapes) - set(found) - optional):
        raise wrong_file(name, f"has no array {missing[0]!r}")
    return found


def _read_array(stored: zipfile.ZipFile, name: str, array: str, shape: Shape) -> NDArray[np.float32]:
    """Read one array; its header is checked against the shape before its data are read."""
    if math.prod(wanted for wanted in shape if wanted is not None) > MAX_ARRAY:
        raise wrong_file(name, f"{array} would have more than {MAX_ARRAY} numbers")
    if stored.getinfo(f"{array}.npy").compress_type not in METHODS:
        raise wrong_file(name, f"{array} must be stored or deflated, no other compression")
    with stored.open(f"{array}.npy") as stream:
        if (version := np.lib.format.read_magic(stream)) != (1, 0):  # others have headers of any length
            raise wrong_file(name, f"{array} is an .npy of version {version}, not (1, 0)")
        given, _, dtype = np.lib.format.read_array_header_1_0(stream)
        is_legal = len(given) == len(shape) and all(
            wanted in (None, held) for held, wanted in zip(given, shape, strict=True)
        )
        if not is_legal or dtype.kind != "f":
            raise wrong_file(name, f"{array} must be floats of shape {shape}, not {dtype} of shape {given}")
        if math.prod(given) > MAX_ARRAY:
            raise wrong_file(name, f"{array} has more than {MAX_ARRAY} numbers")
    with stored.open(f"{array}.npy") as stream:
        values = np.lib.format.read_array(stream, allow_pickle=False)
    if not np.isfinite(values).all() or not (np.abs(values) <= np.finfo(np.float32).max).all():
        raise wrong_file(name, f"{array} must be finite numbers (float32)")
    return np.asarray(values, np.float32)


def read_expected(path: Path, name: str, expected: str | None) -> bytes:
    """Read a file and check its sha256 again: it may be opened long after its folder was verified.

    Raises:
        ChangedOnDisk: its sha256 is not the `expected` one, or it cannot be read.
        OSError: it cannot be read, and no sha256 is expected.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        if expected is None:
            raise
        raise ChangedOnDisk(f"{name} can no longer be read ({error})", pointer=f"/{name}") from error
    if expected is not None and hashlib.sha256(content).hexdigest() != expected:
        raise ChangedOnDisk(f"{name} changed on disk after it was accepted", pointer=f"/{name}")
    return content


def _tensors(message: Any) -> Iterator[Any]:
    """All tensors in a protobuf message: initializers, constants, those of subgraphs and functions."""
    import onnx

    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in [value] if hasattr(value, "ListFields") else value:
            yield from _tensors(part)


def wrong_file(name: str, why: str) -> InvalidVersionFolder:
    """The error about a file of a version folder, by its path in there."""
    return InvalidVersionFolder(f"{name} {why}", pointer=f"/{name}")
