"""Open a user's .npy or .npz, with one type of error for whatever is wrong with the file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

NPY = b"\x93NUMPY"
NPZ = (b"PK\x03\x04", b"PK\x05\x06")
"""What the files begin with; an archive without arrays is the second."""


OBJECTS = ("Object arrays cannot be loaded", "Python objects in dtype")
"""NumPy's words for an array of objects, read and memory-mapped."""


class HoldsObjects(ValueError):
    """An array of Python objects, which may run any code when they are read."""


@contextmanager
def one_error() -> Iterator[None]:
    """Raise ValueError for what NumPy raises, opening a file or reading an array of it, if it cannot be read."""
    try:
        yield
    except ValueError as error:
        if any(words in str(error) for words in OBJECTS):
            raise HoldsObjects("its elements are Python objects (dtype object), not numbers or strings") from error
        raise
    except (EOFError, BadZipFile, zlib.error, TokenError, NotImplementedError) as error:
        raise ValueError(str(error)) from error


@contextmanager
def opened(path: Path) -> Iterator[NDArray[Any] | NpzFile]:
    """The array of an .npy, or the arrays of an .npz, each of which is read when the block asks for it.

    Raises:
        OSError: the file cannot be read.
        HoldsObjects: an array does; raised inside the block.
        ValueError: it is damaged or neither of both; also raised inside the block.
    """
    with path.open("rb") as file, one_error():
        _check(file.peek(1))
        yield np.load(file, allow_pickle=False)


def load_array(path: Path, mmap_mode: Literal["r"] | None = None) -> NDArray[Any]:
    """The array of an .npy. Raises as `opened`, and ValueError for an .npz."""
    with path.open("rb") as file:
        start = file.peek(1)
    _check(start)
    if start.startswith(NPZ):
        raise ValueError("it is an .npz, not an .npy of one array")
    with one_error():
        array: NDArray[Any] = np.load(path, mmap_mode, allow_pickle=False)
    return array


def _check(start: bytes) -> None:
    """Refuse what NumPy would take for a pickle, advising to load it unsafely."""
    if start and not start.startswith((NPY, *NPZ)):
        raise ValueError("it is neither an .npy nor an .npz")
