"""The binary files of a version folder, opened without trusting them: ONNX models and .npz arrays.

onnx and onnxruntime are imported where a model is opened: edges without one also run where neither is installed.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from index.errors import ChangedOnDisk, InvalidVersionFolder

if TYPE_CHECKING:
    import onnxruntime as ort

FIRST_OPSET = 11


def legal_opsets() -> range:
    """Opsets of the default domain, from `FIRST_OPSET` to the newest that the onnx package defines."""
    import onnx

    return range(FIRST_OPSET, onnx.defs.onnx_opset_version() + 1)


def open_model(path: Path, name: str, *, threads: int = 1, expected: str | None = None) -> ort.InferenceSession:
    """Open an ONNX file for inference on the CPU.

    Args:
        path: the file.
        name: how messages call it, its path inside the version folder.
        threads: CPU threads one run may use.
        expected: the sha256 it must have, None: any.

    Raises:
        ChangedOnDisk: it has another.
        InvalidVersionFolder: not an ONNX model, an opset outside `legal_opsets()`, external data, or an operator
            unknown to onnxruntime.
    """
    import onnx
    import onnxruntime as ort

    content = read_expected(path, name, expected)
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's exception types differ between its implementations
        raise _refused(name, f"is not an ONNX model ({error})") from error
    opset = next((o.version for o in model.opset_import if o.domain in {"", "ai.onnx"}), 0)
    if opset not in (legal := legal_opsets()):
        raise _refused(name, f"has opset {opset}; legal: {legal.start} to {legal.stop - 1}")
    # onnxruntime resolves external data of a model given as bytes against the working directory.
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in _tensors(model)):
        raise _refused(name, "keeps weights in external data; save it as one file")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # failures become exceptions below, once
    try:
        return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exception types share no public base
        raise _refused(name, f"cannot be loaded ({error})") from error


def read_arrays(
    path: Path,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    optional: frozenset[str] = frozenset(),
    expected: str | None = None,
) -> dict[str, NDArray[np.float32]]:
    """Read arrays of finite floats from an .npz file.

    Args:
        path: the file.
        name: how messages call it, its path inside the version folder.
        shapes: the arrays to read and the shape each must have.
        optional: those of them that may be missing.
        expected: the sha256 it must have, None: any.

    Raises:
        ChangedOnDisk: it has another.
        InvalidVersionFolder: not an .npz file, an array missing, of another shape or type, or not finite.
    """
    try:
        content = io.BytesIO(read_expected(path, name, expected))
        with np.load(content, allow_pickle=False) as stored:
            found = {array: stored[array] for array in shapes if array in stored}
    except ChangedOnDisk:
        raise
    except Exception as error:  # zip, zlib, tokenize and numpy raise whatever the broken bytes lead them to
        raise _refused(name, f"is not a readable .npz of arrays ({error})") from error
    for array, shape in shapes.items():
        if array not in found and array not in optional:
            raise _refused(name, f"lacks the array {array!r}")
        given = found.get(array, np.zeros(shape, np.float32))
        if given.shape != shape or given.dtype.kind != "f":
            raise _refused(name, f"{array} must be floats of shape {shape}, not {given.dtype} of shape {given.shape}")
        if not np.isfinite(given).all():
            raise _refused(name, f"{array} must be finite numbers")
    return {array: values.astype(np.float32) for array, values in found.items()}


def read_expected(path: Path, name: str, expected: str | None) -> bytes:
    """The content of a file, hashed as it was read: files are opened long after their folder was verified.

    Raises:
        ChangedOnDisk: its sha256 is not the `expected` one, or it is gone.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        if expected is None:
            raise
        raise ChangedOnDisk(f"{name} cannot be read any more ({error})", pointer=f"/{name}") from error
    if expected is not None and hashlib.sha256(content).hexdigest() != expected:
        raise ChangedOnDisk(f"{name} changed on disk since it was accepted", pointer=f"/{name}")
    return content


def _tensors(message: Any) -> Iterator[Any]:
    """Every tensor anywhere in a protobuf message: initializers, constants, subgraphs, functions."""
    import onnx

    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in [value] if hasattr(value, "ListFields") else value:
            yield from _tensors(part)


def _refused(name: str, why: str) -> InvalidVersionFolder:
    return InvalidVersionFolder(f"{name} {why}", pointer=f"/{name}")
