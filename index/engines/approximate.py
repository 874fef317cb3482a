"""Approximate indexes over fixed rows, built by FAISS: a graph (HNSW) or inverted lists (IVF).

FAISS is imported where it is used: evaluation reads modules above this one on machines that have none.
Shape suffixes: Q queries, R rows, W their width, C candidates wanted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from index.engines.config import IndexKind, Storage
from index.scan import Mask, Rows
from index.space import Vectors

LINKS = 32
"""Neighbours a node of the graph keeps on its upper layers, twice as many at the bottom (M of Malkov 2016)."""
BUILD_EFFORT = 60
"""`efConstruction`: candidates a new node's neighbours are chosen from."""
LISTS_PER_ROOT = 4
"""Inverted lists per square root of the rows."""
ADDED_ROWS = 8_192
"""Rows added at once: about a second's work."""
TRAINING_ROWS = 64
"""Rows a list that its centre is fitted to."""


@dataclass(frozen=True)
class Approximate(ABC):
    """A FAISS index over R rows that finds most of the best of them.

    Attributes:
        index: FAISS's own.
        lossy: whether it keeps codes of the rows, so that its scores are rounded.
    """

    index: Any
    lossy: bool

    kind: ClassVar[IndexKind]

    @property
    @abstractmethod
    def efforts(self) -> Sequence[int]:
        """From the cheapest to the dearest search that makes sense."""

    @abstractmethod
    def params(self, c: int, effort: int, allowed: Any) -> Any:
        """FAISS's parameters of a search for `c` rows."""

    def search(self, queries_QW: Vectors, c: int, effort: int, allowed: Any) -> tuple[Vectors, Rows]:
        """Scanned scores and row numbers (Q, C), the best first, -1 where it found no more; `allowed`: a `selector`."""
        found: tuple[Vectors, Rows] = self.index.search(queries_QW, c, params=self.params(c, effort, allowed))
        return found

    def rows(self) -> Vectors | None:
        """The float32 rows it keeps (R, W), without a copy; None where it has no such array."""
        return None

    def write(self, path: Path) -> None:
        """Write it to a file."""
        _faiss().write_index(self.index, str(path))


class Hnsw(Approximate):
    """A navigable small-world graph; effort is `efSearch`."""

    kind = IndexKind.HNSW

    @property
    def efforts(self) -> Sequence[int]:
        return 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048

    def params(self, c: int, effort: int, allowed: Any) -> Any:
        return _faiss().SearchParametersHNSW(efSearch=max(effort, c), sel=allowed)

    def rows(self) -> Vectors | None:
        return _flat_rows(self.index.storage)


class Ivf(Approximate):
    """Inverted lists around centres; effort is `nprobe`."""

    kind = IndexKind.IVF

    @property
    def efforts(self) -> Sequence[int]:
        lists = self.index.nlist
        return sorted({lists, *(round(2 ** (half / 2)) for half in range(int(2 * math.log2(lists))))})

    def params(self, c: int, effort: int, allowed: Any) -> Any:
        return _faiss().SearchParametersIVF(nprobe=min(effort, self.index.nlist), sel=allowed)


def selector(allowed_R: Mask) -> Any:
    """What restricts a search to some rows; keeps what it needs alive."""
    faiss = _faiss()
    bits = np.packbits(allowed_R, bitorder="little")
    chosen = faiss.IDSelectorBitmap(bits)
    chosen.bits = bits  # FAISS keeps a pointer into them
    return chosen


def build(
    kind: IndexKind, storage: Storage, rows_RW: Vectors, *, inner_product: bool, stopped: Callable[[], bool]
) -> Approximate | None:
    """An index over these rows, on as many threads as FAISS may use; takes seconds for each hundred thousand rows.

    `stopped` is asked now and then; once it holds, there is no index.
    """
    faiss = _faiss()
    metric = faiss.METRIC_INNER_PRODUCT if inner_product else faiss.METRIC_L2
    width, code = rows_RW.shape[1], _code(storage)
    if kind is IndexKind.IVF:
        lists = max(1, round(LISTS_PER_ROOT * math.sqrt(len(rows_RW))))
        centres = faiss.IndexFlat(width, metric)
        index = (
            faiss.IndexIVFFlat(centres, width, lists, metric)
            if code is None
            else faiss.IndexIVFScalarQuantizer(centres, width, lists, code, metric)
        )
        index.cp.min_points_per_centroid = 1
        index.train(rows_RW[:: max(1, len(rows_RW) // (lists * TRAINING_ROWS))])
    elif code is None:
        index = faiss.IndexHNSWFlat(width, LINKS, metric)
    else:
        index = faiss.IndexHNSWSQ(width, code, LINKS, metric)
        index.train(rows_RW)
    if kind is not IndexKind.IVF:
        index.hnsw.efConstruction = BUILD_EFFORT
    for start in range(0, len(rows_RW), ADDED_ROWS):
        if stopped():
            return None
        index.add(rows_RW[start : start + ADDED_ROWS])
    return _wrapped(index)


def read(path: Path) -> Approximate:
    """An index that `write` wrote, mapped into memory: pages are read when they are searched, and shared."""
    return _wrapped(_faiss().read_index(str(path), _faiss().IO_FLAG_MMAP_IFC))


def _wrapped(index: Any) -> Approximate:
    if hasattr(index, "nlist"):
        return Ivf(index, hasattr(index, "sq"))
    return Hnsw(index, _flat_rows(index.storage) is None)


def _code(storage: Storage) -> int | None:
    faiss = _faiss()
    codes = {Storage.FLOAT16: faiss.ScalarQuantizer.QT_fp16, Storage.INT8: faiss.ScalarQuantizer.QT_8bit}
    return codes.get(storage)


def _flat_rows(storage: Any) -> Vectors | None:
    faiss = _faiss()
    storage = faiss.downcast_index(storage)
    if not isinstance(storage, faiss.IndexFlat):
        return None
    rows: Vectors = faiss.rev_swig_ptr(storage.get_xb(), storage.ntotal * storage.d).reshape(-1, storage.d)
    return rows


def _faiss() -> Any:
    import faiss

    return faiss
