"""Read arrays of a user's .npz, with one clear error for whatever is wrong with the file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from index.errors import InvalidArgument


@contextmanager
def open_npz(path: Path, what: str, pointer: str) -> Iterator[Mapping[str, NDArray[Any]]]:
    """The arrays of a file by name; each is read when it is asked for.

    Args:
        path: the file.
        what: what it is, for errors.
        pointer: JSON pointer of the errors.

    Raises:
        InvalidArgument: it is no .npz, it is damaged, or the block asks for an array that it lacks or cannot use.
    """
    try:
        with path.open("rb") as file, _opened(file) as held:
            yield held
    except KeyError as error:
        raise InvalidArgument(f"{what} {path} cannot be used: {error.args[0]}", pointer=pointer) from error
    except (OSError, ValueError, AttributeError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise InvalidArgument(f"{what} {path} cannot be used: {error}", pointer=pointer) from error


def _opened(file: BinaryIO) -> NpzFile:
    held = np.load(file, allow_pickle=False)
    if not isinstance(held, NpzFile):
        raise TypeError("it is an .npy of one array, not an .npz")
    return held
