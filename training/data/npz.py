"""Read arrays of a user's .npz, with one clear error for whatever is wrong with the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from index.errors import InvalidArgument
from index.numpy_file import opened


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
        with opened(path) as held:
            yield _several(held)
    except KeyError as error:
        raise InvalidArgument(f"{what} {path} cannot be used: {error.args[0]}", pointer=pointer) from error
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InvalidArgument(f"{what} {path} cannot be used: {error}", pointer=pointer) from error


def _several(held: NDArray[Any] | NpzFile) -> NpzFile:
    if not isinstance(held, NpzFile):
        raise TypeError("it is an .npy of one array, not an .npz")
    return held
