"""Check and convert arguments of the client's methods before anything is sent: images, vectors, texts, metadata.

Arrays of NumPy, torch and others are accepted wherever lists are; NumPy arrays are sent in binary.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from index.errors import InvalidArgument
from index.version_folder.archive import pack_version


class InvalidInput(InvalidArgument):
    """An argument of the client is invalid, so nothing was sent; the message says which and what is legal."""

    code = "invalid_input"


class ArrayLike(Protocol):
    """A NumPy array, a tensor, or any other object with `tolist`."""

    def tolist(self) -> Any: ...


NPY = "application/x-npy"
"""The content type of `npy`."""
EMBEDDED_ITEM_FIELDS = {"id", "metadata", "embedding", "text"}
"""Legal fields of an item in an ingest of embeddings."""
Vector = Sequence[float] | ArrayLike
Vectors = Sequence[Vector] | ArrayLike


def image(value: object, name: str) -> bytes:
    """The bytes of an image file.

    Raises:
        InvalidInput: a path, an array, a decoded image, or empty.
    """
    if isinstance(value, str | PathLike):
        raise InvalidInput(f"{name} is a path: give the file's bytes, as Path({str(value)!r}).read_bytes()")
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput(
            f"{name} must be the bytes of an image file (PNG, JPEG, WebP ...), not {type(value).__name__}"
        )
    if not value:
        raise InvalidInput(f"{name} is empty: give the bytes of an image file")
    return bytes(value)


def images(value: object, name: str = "images") -> list[bytes]:
    """The bytes of several image files.

    Raises:
        InvalidInput: not a list, or as `image`.
    """
    if isinstance(value, str | PathLike):
        raise InvalidInput(f"{name} is a path: give a list of files' bytes, as [Path({str(value)!r}).read_bytes()]")
    if isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput(f"{name} is one image: give a list, as [image]")
    return [image(one, f"{name}[{n}]") for n, one in enumerate(_as_list(value, name))]


def strings(value: object, name: str) -> list[str]:
    """Texts or ids.

    Raises:
        InvalidInput: not a list, or an element that is not a string.
    """
    if isinstance(value, str):
        raise InvalidInput(f"{name} is one string: give a list, as [{value!r}]")
    listed = _as_list(value, name)
    for n, one in enumerate(listed):
        if not isinstance(one, str):
            raise InvalidInput(f"{name}[{n}] must be a string, not {type(one).__name__}")
    return [str(one) for one in listed]


def several(value: object, name: str = "items") -> list[Any]:
    """The items of a list, or of any other iterable, such as a generator, which can be read only once.

    Raises:
        InvalidInput: a single item, or not a list.
    """
    if isinstance(value, Mapping):
        raise InvalidInput(f"{name} is one item: give a list, as [item]")
    return _as_list(value, name)


def vector(value: object, name: str) -> list[float]:
    """One vector of finite numbers.

    Raises:
        InvalidInput: not numbers, several vectors, NaN or infinity, or empty.
    """
    try:
        numbers = [float(number) for number in _as_list(value, name)]
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name} must be one vector, a list of numbers: {error}") from error
    wrong = next((n for n, number in enumerate(numbers) if not math.isfinite(number)), None)
    if wrong is not None:
        raise InvalidInput(f"{name}[{wrong}] must be finite, not {numbers[wrong]}")
    if not numbers:
        raise InvalidInput(f"{name} is empty: give one number for each dimension of the version")
    return numbers


def vectors(value: object, name: str = "embeddings") -> list[list[float]]:
    """Several vectors of equal length.

    Raises:
        InvalidInput: a single vector, vectors of different lengths, or as `vector`.
    """
    listed = _as_list(value, name)
    if listed and isinstance(listed[0], int | float):
        raise InvalidInput(f"{name} is one vector: give a list of vectors, as [vector], or an array of two dimensions")
    rows = [vector(row, f"{name}[{n}]") for n, row in enumerate(listed)]
    odd = next((n for n, row in enumerate(rows) if len(row) != len(rows[0])), None)
    if odd is not None:
        raise InvalidInput(f"{name}[{odd}] has {len(rows[odd])} numbers, {name}[0] has {len(rows[0])}")
    return rows


def metadata(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Metadata as JSON values; NumPy numbers and arrays become plain ones.

    Raises:
        InvalidInput: not a mapping, or a value that JSON cannot express, such as NaN.
    """
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{name} must be a dictionary, not {type(value).__name__}")
    try:
        plain: dict[str, Any] = json.loads(as_json(dict(value)))
    except InvalidInput as error:
        raise InvalidInput(f"{name} cannot be written as JSON: {error.__cause__}") from error
    return plain


def patches(value: object, name: str) -> list[dict[str, Any]]:
    """Items {id, metadata}; their metadata as in `metadata`.

    Raises:
        InvalidInput: not a list, or an element that is not such an item.
    """
    if isinstance(value, Mapping):
        raise InvalidInput(f"{name} is one item: give a list of {{id, metadata}}")
    found: list[dict[str, Any]] = []
    for n, one in enumerate(_as_list(value, name)):
        if not isinstance(one, Mapping):
            raise InvalidInput(f"{name}[{n}] must be {{id, metadata}}, not {type(one).__name__}")
        changed = one.get("metadata")
        found.append(dict(one) if changed is None else {**one, "metadata": metadata(changed, f"{name}[{n}].metadata")})
    return found


def as_json(value: object, *, ascii_only: bool = True) -> str:
    """Serialise as JSON; NumPy numbers and arrays become plain ones.

    Raises:
        InvalidInput: a value that JSON cannot express, such as NaN.
    """
    try:
        return json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=ascii_only, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the request cannot be sent as JSON: {error}") from error


def embedded_items(items: Sequence[Mapping[str, Any]], name: str = "items") -> list[dict[str, Any]]:
    """Items of an ingest of embeddings.

    Raises:
        InvalidInput: as `vector` and `metadata`, with the index of the item.
    """
    checked = {"embedding": vector, "metadata": metadata}
    found = []
    for n, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise InvalidInput(f"{name}[{n}] must be {{id, metadata, embedding}}, not {type(item).__name__}")
        fields = item.items()
        found.append({f: checked[f](v, f"{name}[{n}].{f}") if f in checked and v is not None else v for f, v in fields})
    return found


def npy(value: object) -> bytes | None:
    """A matrix of finite floats as .npy; None for any other value, which `vectors` must check."""
    if not _is_plain(value) or value.ndim != 2 or value.dtype.kind != "f" or value.dtype.itemsize > 8:
        return None
    if not value.size or not np.isfinite(value).all():
        return None
    np.save(file := io.BytesIO(), value, allow_pickle=False)
    return file.getvalue()


@runtime_checkable
class ArrowTable(Protocol):
    """A `pyarrow.Table`; the client needs pyarrow only for such an argument."""

    @property
    def schema(self) -> Any:
        """Its columns."""

    def to_batches(self) -> list[Any]:
        """Its rows."""


def arrow_stream(value: ArrowTable) -> bytes:
    """A pyarrow table in Arrow's stream format."""
    import pyarrow as pa

    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), value.schema) as written:
        for batch in value.to_batches():
            written.write_batch(batch)
    return bytes(sink.getvalue())


def stacked_embeddings(items: Sequence[Mapping[str, Any]]) -> bytes | None:
    """The embeddings of items {id, metadata, embedding} as `npy`; None unless all are arrays of one shape and type."""
    found = [
        item.get("embedding") for item in items if isinstance(item, Mapping) and item.keys() <= EMBEDDED_ITEM_FIELDS
    ]
    arrays = [one for one in found if _is_plain(one)]
    if len(arrays) != len(items) or len({(one.shape, one.dtype) for one in arrays}) != 1:
        return None
    return npy(np.stack(arrays))


def archive(folder: Path, scratch: Path) -> Path:
    """The .zip of a version or an edge: the file itself, or the folder packed into `scratch`."""
    if not folder.is_dir():
        return folder
    packed = scratch / f"{folder.name}.zip"
    pack_version(folder, packed)
    return packed


def check_not_empty(**value: Sequence[Any]) -> None:
    """Raise InvalidInput if all lists of queries are empty."""
    if not any(value.values()):
        raise InvalidInput(f"the query is empty: give at least one of {', '.join(value)}")


def _as_list(value: object, name: str) -> list[Any]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise InvalidInput(f"{name} must be a list, not {type(value).__name__}")
    return list(value)


def _is_plain(value: object) -> TypeGuard[NDArray[Any]]:
    """Whether it is an array without a mask, which .npy would drop."""
    return isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)


def _plain(value: object) -> Any:
    # Of times in nanoseconds `tolist` would make plain numbers; those of other units are refused as dates.
    if hasattr(value, "tolist") and getattr(getattr(value, "dtype", None), "kind", None) not in ("M", "m"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
