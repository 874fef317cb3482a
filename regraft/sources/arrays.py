"""`ArrayFile`: matrices in .npy, .fvecs and .fbin files, memory-mapped in pieces, with ids in a separate file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from index.errors import InvalidArgument
from index.numpy_file import HoldsObjects, load_array
from regraft.sources.base import Batch, Column, Wanted, as_id


class ArrayFile:
    """Rows (N, D) of a file; their ids are the lines of a text file, the rows of a .npy file, or row numbers from 0."""

    def __init__(self, path: Path, wanted: Wanted, ids: Path | None) -> None:
        self._path, self._wanted, self._ids = path, wanted, ids
        try:
            self._rows = OPEN[path.suffix](path)
        except HoldsObjects as error:
            raise InvalidArgument(f"{path.name} must hold a matrix of numbers: {error}") from error
        except ValueError as error:
            raise InvalidArgument(f"{path.name} is not a {path.suffix} file: {error}") from error
        self._version = wanted.vector("")[1]
        if self._rows.ndim != 2 or self._rows.dtype.kind not in "fiu":
            raise InvalidArgument(f"{path.name} must hold a matrix of numbers, not {self._rows.shape}")
        if ids is not None and not ids.is_file():
            raise InvalidArgument(f"the file {ids} does not exist", pointer="/ids")
        if ids is not None and (held := _held(ids)) != len(self._rows):
            raise InvalidArgument(f"{ids} has {held} ids, {path.name} {len(self._rows)} rows", pointer="/ids")

    @property
    def identity(self) -> str:
        stats = [path.stat() for path in (self._path, self._ids) if path is not None]
        return f"{self._path.resolve()} {[(stat.st_size, stat.st_mtime_ns) for stat in stats]} {self._wanted}"

    @property
    def count(self) -> int:
        return len(self._rows)

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        start = int(after or 0)
        names = self._names(start)
        for at in range(start, self.count, size):
            with np.errstate(over="ignore"):  # values beyond float32 become infinite and are reported as such
                rows = np.asarray(self._rows[at : at + size], np.float32)
            ids = list(islice(names, len(rows)))
            yield Batch(
                len(ids), ids, [None] * len(ids), [Column(self._version, np.arange(len(ids)), rows)], at + len(rows)
            )

    def _names(self, start: int) -> Iterator[str]:
        if self._ids is None:
            yield from map(str, range(start, self.count))
        elif self._ids.suffix == ".npy":
            ids = _npy(self._ids)[start:]
            # As raw bytes, because NumPy strips trailing zeros of strings, which a UUID may have.
            yield from map(as_id, ids.view(f"V{ids.itemsize}") if ids.dtype.kind == "S" else ids)
        else:
            with self._ids.open(encoding="utf-8-sig") as lines:
                yield from (line.rstrip("\r\n") for line in islice(lines, start, None))


def _held(ids: Path) -> int:
    """The number of ids in a file."""
    try:
        if ids.suffix == ".npy":
            (held,) = _npy(ids).shape  # ValueError for a matrix
            return int(held)
        with ids.open(encoding="utf-8-sig") as lines:
            return sum(1 for _ in lines)
    except (ValueError, TypeError) as error:  # an array without rows, or a file that is not UTF-8
        raise InvalidArgument(
            f"{ids} must have ids, one per line or rows of a .npy file: {error}", pointer="/ids"
        ) from error


def _npy(path: Path) -> Any:
    return load_array(path, "r")


def _fvecs(path: Path) -> Any:
    """Each row: its length as int32, then its numbers as float32."""
    numbers = np.memmap(path, "<i4", "r")
    width = int(numbers[0]) + 1
    if width < 2 or len(numbers) % width or (numbers[::width] != width - 1).any():
        raise InvalidArgument(f"{path.name} is not an .fvecs file with rows of one length")
    return numbers.reshape(-1, width)[:, 1:].view("<f4")


def _fbin(path: Path) -> Any:
    """Two int32, the number of rows and their length, then all numbers as float32 (format of big-ann-benchmarks)."""
    count, dim = np.fromfile(path, "<u4", 2).tolist()
    if path.stat().st_size != 8 + 4 * count * dim:
        raise InvalidArgument(f"{path.name} is not an .fbin file: its header declares {count} rows of {dim} numbers")
    return np.memmap(path, "<f4", "r", 8, (count, dim))


OPEN = {".npy": _npy, ".fvecs": _fvecs, ".fbin": _fbin}
