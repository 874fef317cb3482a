"""Approximate indexes over fixed rows (`build`), by FAISS: a graph (HNSW) or inverted lists (IVF).

FAISS is imported where it is used, so that evaluation can import these modules on machines without it.
Shape suffixes: Q queries, R rows, W their width, C candidates wanted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from index.engines.config import IndexKind, Storage
from index.scan import Rows
from index.space import Vectors

LINKS = 32
"""Neighbours of a node in the upper layers of the graph; twice as many in the lowest (M of Malkov 2016)."""
BUILD_EFFORT = 60
"""`efConstruction`: candidates from which the neighbours of a new node are chosen."""
LISTS_PER_ROOT = 4
"""Inverted lists per square root of the rows."""
NODE_COST = 20
"""Cost of a graph search per unit of effort, as the number of gathered rows compared in the same time."""
LISTED_COST = 0.2
"""Cost per row of a list, in the same unit; its rows are consecutive in memory."""
MAX_CACHED = 64
"""Number of efforts whose search parameters are cached."""
ADD_BATCH = 8_192
"""Rows added in one step, which takes about a second."""
TRAINING_ROWS, TRAINING_ROUNDS = 32, 6
"""k-means rows per list, and iterations: twice as many rows and ten iterations take three times as long, for the same
effort (decision 0046)."""


@dataclass(frozen=True)
class Approximate(ABC):
    """An approximate FAISS index over R rows.

    Attributes:
        index: the FAISS index.
        lossy: whether it stores quantised rows, so that its scores are inexact.
    """

    index: Any
    lossy: bool
    _params: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    kind: ClassVar[IndexKind]

    @property
    @abstractmethod
    def efforts(self) -> Sequence[int]:
        """Useful values of `efSearch` or `nprobe`, ascending."""

    @abstractmethod
    def cost(self, effort: float) -> float:
        """The cost of a search, as a number of gathered rows compared."""

    @abstractmethod
    def min_effort(self, candidates: float) -> float:
        """The smallest effort that can find this many candidates."""

    @abstractmethod
    def _params_of(self, effort: int) -> Any: ...

    def params(self, effort: int) -> Any:
        """FAISS's search parameters; cached, because creating them costs as much as a search."""
        if (found := self._params.get(effort)) is None:
            if len(self._params) >= MAX_CACHED:
                self._params.clear()
            found = self._params[effort] = self._params_of(effort)
        return found

    def search(self, queries_QW: Vectors, c: int, effort: int) -> tuple[Vectors, Rows]:
        """Scan scores and row numbers (Q, C), best first, then -1; `queries_QW` must be C-contiguous."""
        scanned_QC, at_QC = np.empty((len(queries_QW), c), np.float32), np.empty((len(queries_QW), c), np.int64)
        pointer = _faiss().swig_ptr
        # Not by FAISS's Python wrapper, whose checks and allocations take a tenth of a small search.
        self.index.search_c(
            len(queries_QW), pointer(queries_QW), c, pointer(scanned_QC), pointer(at_QC), self.params(effort)
        )
        return scanned_QC, at_QC

    def add(self, rows_RW: Vectors) -> None:
        """Append rows."""
        self.index.add(rows_RW)

    def rows(self) -> Vectors | None:
        """Its float32 rows (R, W), without a copy; None if it does not store them."""
        return None

    def reorder(self) -> Rows | None:
        """Reorder the rows for faster searches; returns the old number of each row (R,), or None if unchanged.

        Invalidates arrays that `rows` returned before.
        """
        return None

    def write(self, path: Path) -> None:
        """Write the index to a file. Raises OSError."""
        try:
            _faiss().write_index(self.index, str(path))
        except RuntimeError as error:  # of FAISS, if the file cannot be written
            raise OSError(str(error)) from error


class Hnsw(Approximate):
    """A navigable small-world graph; effort is `efSearch`."""

    kind = IndexKind.HNSW

    @property
    def efforts(self) -> Sequence[int]:
        fine = (*range(4, 16), *range(16, 32, 2))
        return *fine, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048

    def cost(self, effort: float) -> float:
        return effort * NODE_COST

    def min_effort(self, candidates: float) -> float:
        return candidates

    def _params_of(self, effort: int) -> Any:
        return _faiss().SearchParametersHNSW(efSearch=effort)

    def rows(self) -> Vectors | None:
        return _flat_rows(self.index.storage)

    def reorder(self) -> Rows | None:
        """Reorder so that linked rows are close in memory, for fewer cache misses (Coleman 2022, 2104.03221)."""
        order_R = self._breadth_first()
        self.index.permute_entries(order_R)
        return order_R

    def _breadth_first(self) -> Rows:
        """All rows in breadth-first order from the entry point, along the links of the lowest layer."""
        hnsw = self.index.hnsw
        links, starts_R = (_faiss().rev_swig_ptr(one.data(), one.size()) for one in (hnsw.neighbors, hnsw.offsets))
        lowest = np.arange(hnsw.nb_neighbors(0), dtype=np.uint64)
        new_R = np.ones(self.index.ntotal, np.bool_)
        order = deque([np.array([hnsw.entry_point], np.int64)])
        new_R[hnsw.entry_point] = False
        found = []
        while order:
            found.append(at_N := order.popleft())
            for start in range(0, len(at_N), ADD_BATCH):
                linked = links[starts_R[at_N[start : start + ADD_BATCH], np.newaxis] + lowest].ravel()
                linked = linked[linked >= 0]
                linked = linked[new_R[linked]]
                _, first = np.unique(linked, return_index=True)
                if len(first):
                    order.append(linked[np.sort(first)].astype(np.int64))
                    new_R[order[-1]] = False
        return np.concatenate([*found, np.flatnonzero(new_R)])


class Ivf(Approximate):
    """Inverted lists of k-means clusters; effort is `nprobe`."""

    kind = IndexKind.IVF

    @property
    def efforts(self) -> Sequence[int]:
        lists = self.index.nlist
        return sorted({lists, *(round(2 ** (half / 2)) for half in range(int(2 * math.log2(lists))))})

    def cost(self, effort: float) -> float:
        lists = self.index.nlist
        return LISTED_COST * float(lists + effort * self.index.ntotal / lists)

    def min_effort(self, candidates: float) -> float:
        return candidates * float(self.index.nlist / self.index.ntotal)

    def _params_of(self, effort: int) -> Any:
        return _faiss().SearchParametersIVF(nprobe=min(effort, self.index.nlist))


def build(
    kind: IndexKind, storage: Storage, rows_RW: Vectors, *, inner_product: bool, stopped: Callable[[], bool]
) -> Approximate | None:
    """Build an index, on FAISS's threads; takes seconds per hundred thousand rows.

    Rows must be in random order, because a graph links each row with earlier ones and has the first rows in its upper
    layers. `stopped` is polled; returns None once it is true.
    """
    faiss = _faiss()
    metric = faiss.METRIC_INNER_PRODUCT if inner_product else faiss.METRIC_L2
    width, code = rows_RW.shape[1], _code(storage)
    if kind is IndexKind.IVF:
        lists = min(len(rows_RW), round(LISTS_PER_ROOT * math.sqrt(len(rows_RW))))
        centres = faiss.IndexFlat(width, metric)
        index = (
            faiss.IndexIVFFlat(centres, width, lists, metric)
            if code is None
            else faiss.IndexIVFScalarQuantizer(centres, width, lists, code, metric)
        )
        index.cp.min_points_per_centroid = 1
        index.cp.niter = TRAINING_ROUNDS
        index.train(rows_RW[:: max(1, len(rows_RW) // (lists * TRAINING_ROWS))])
    elif code is None:
        index = faiss.IndexHNSWFlat(width, LINKS, metric)
    else:
        index = faiss.IndexHNSWSQ(width, code, LINKS, metric)
        index.train(rows_RW)
    layers_R = None
    if kind is not IndexKind.IVF:
        index.hnsw.efConstruction = BUILD_EFFORT
        layers_R = _layers(len(rows_RW))
    for start in range(0, len(rows_RW), ADD_BATCH):
        if stopped():
            return None
        if layers_R is not None:
            faiss.copy_array_to_vector(layers_R[: start + ADD_BATCH], index.hnsw.levels)
        index.add(rows_RW[start : start + ADD_BATCH])
    return _wrap(index)


def _layers(rows: int) -> NDArray[np.int32]:
    """The number of graph layers of each row, distributed as in Malkov 2016, in descending order (R,).

    FAISS does the same for rows added in one call. If it drew the layers of each batch, the upper layers would be
    linked last, which took a quarter more effort for equal recall at 100,000 rows, none at 200,000 (decision 0042).
    """
    return 1 + np.floor(np.log(rows / np.arange(1, rows + 1)) / math.log(LINKS)).astype(np.int32)


def read(path: Path) -> Approximate:
    """Open an index that `write` wrote, memory-mapped: pages are read on demand and shared between processes."""
    return _wrap(_faiss().read_index(str(path), _faiss().IO_FLAG_MMAP_IFC))


def _wrap(index: Any) -> Approximate:
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


@cache
def _faiss() -> Any:
    import faiss

    return faiss
