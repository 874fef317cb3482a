"""Approximate indexes over fixed rows, built by FAISS: a graph (HNSW) or inverted lists (IVF).

FAISS is imported where it is used: evaluation reads modules above this one on machines that have none.
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
"""Neighbours a node of the graph keeps on its upper layers, twice as many at the bottom (M of Malkov 2016)."""
BUILD_EFFORT = 60
"""`efConstruction`: candidates a new node's neighbours are chosen from."""
LISTS_PER_ROOT = 4
"""Inverted lists per square root of the rows."""
NODE_COST = 20
"""Rows copied together and compared in the time that a graph search takes per unit of effort."""
LISTED_COST = 0.2
"""The same for each row in a list, which lies in order."""
MAX_CACHED = 64
"""Efforts whose search parameters are cached."""
ADD_BATCH = 8_192
"""Rows added at once, about a second's work."""
TRAINING_ROWS, TRAINING_ROUNDS = 32, 6
"""k-means rows per list, and iterations: twice as many rows and ten iterations take three times as long, for the same
effort (decision 0046)."""


@dataclass(frozen=True)
class Approximate(ABC):
    """An approximate FAISS index over R rows.

    Attributes:
        index: FAISS's own.
        lossy: whether it stores quantised rows, so that its scores are rounded.
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
        """The cost of a search, in rows copied together and compared."""

    @abstractmethod
    def min_effort(self, candidates: float) -> float:
        """The least effort that can find so many candidates."""

    @abstractmethod
    def _params_of(self, effort: int) -> Any: ...

    def params(self, effort: int) -> Any:
        """FAISS's search parameters; cached, since creating them costs as much as a search."""
        if (found := self._params.get(effort)) is None:
            if len(self._params) >= MAX_CACHED:
                self._params.clear()
            found = self._params[effort] = self._params_of(effort)
        return found

    def search(self, queries_QW: Vectors, c: int, effort: int) -> tuple[Vectors, Rows]:
        """Scanned scores and row numbers (Q, C), the best first, -1 where it found no more; queries lie in C order."""
        scanned_QC, at_QC = np.empty((len(queries_QW), c), np.float32), np.empty((len(queries_QW), c), np.int64)
        pointer = _faiss().swig_ptr
        # Skips FAISS's Python wrapper, whose checks and allocations take a tenth of a small search.
        self.index.search_c(
            len(queries_QW), pointer(queries_QW), c, pointer(scanned_QC), pointer(at_QC), self.params(effort)
        )
        return scanned_QC, at_QC

    def add(self, rows_RW: Vectors) -> None:
        """Append rows."""
        self.index.add(rows_RW)

    def rows(self) -> Vectors | None:
        """Its float32 rows (R, W), without a copy; None if it stores none."""
        return None

    def reorder(self) -> Rows | None:
        """Reorder the rows for faster searches: the old number of each (R,), None if they stay.

        An array that `rows` returned before is invalid afterwards.
        """
        return None

    def write(self, path: Path) -> None:
        """Write it to a file. Raises OSError."""
        try:
            _faiss().write_index(self.index, str(path))
        except RuntimeError as error:  # FAISS's error of a file that cannot be written
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
        """Put linked rows beside each other, for fewer cache misses in searches (Coleman 2022, 2104.03221)."""
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
    """Inverted lists around centres; effort is `nprobe`."""

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
    """Build an index over these rows, on FAISS's threads; takes seconds for each hundred thousand rows.

    Rows must be in random order: a graph links a row with those before it, and the first ones in its upper layers.
    `stopped` is polled; once it is true, None is returned.
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

    FAISS does the same for rows added in one call; if it draws layers for each block, the upper layers are linked
    last. At 100,000 rows that took a quarter more effort for one recall, at 200,000 no more (decision 0042).
    """
    return 1 + np.floor(np.log(rows / np.arange(1, rows + 1)) / math.log(LINKS)).astype(np.int32)


def read(path: Path) -> Approximate:
    """An index that `write` wrote, memory-mapped: pages are read when searched, and shared between processes."""
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
