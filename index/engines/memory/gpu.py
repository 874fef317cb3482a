"""Search sealed segments on a GPU by FAISS, if the process is configured to (`use`). Never tested on a GPU.

The GPU finds candidates; scores are computed from the float32 rows in memory, as everywhere. FAISS's GPU indexes ignore
which rows are allowed (facebookresearch/faiss#3114), return at most 2,048 results, support no graphs, and allow one
search at a time. All other searches run on the CPU, also if GPU memory is full.

Shape suffixes: Q queries, D dimension, R rows, W their width, C candidates, K wanted.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np

from index.engines.base import MISSING
from index.engines.exact import score_rows
from index.engines.memory.approximate import Approximate, Ivf
from index.errors import DeviceUnavailable
from index.events import Event
from index.execution import Device
from index.scan import Mask, Rows
from index.space import Lorentz, Space, Vectors

logger = logging.getLogger(__name__)

MAX_RESULTS = 2_048
"""Largest number of results, and of lists, per query on a GPU (GPU_MAX_SELECTION_K of FAISS)."""
MORE, LEAST_MORE = 2, 32
"""Candidates as a factor of the results wanted, and at least this many more: some are dead, and it may round."""
DEVICE_NUMBER = 0
"""The GPU that is used."""


def check_device(device: Device) -> None:
    """Raise DeviceUnavailable if FAISS cannot search on this device."""
    if device is Device.CPU:
        return
    import faiss

    built = hasattr(faiss, "StandardGpuResources")
    if not built or not faiss.get_num_gpus():
        why = "finds no GPU" if built else "was built without GPUs"
        legal = "pip install 'regraft[gpu-index]' instead of regraft[serve], or REGRAFT_INDEX_DEVICE=cpu"
        raise DeviceUnavailable(
            f"REGRAFT_INDEX_DEVICE=cuda requires FAISS with GPUs, but the installed FAISS {why}: {legal}"
        )


class Gpu:
    """The GPU of this process. Its indexes share scratch memory, so one thread searches at a time."""

    def __init__(self) -> None:
        """Raises DeviceUnavailable."""
        import faiss

        check_device(Device.CUDA)
        self._faiss, self._resources = faiss, faiss.StandardGpuResources()
        self._turn = threading.Lock()

    def copy(self, index: Any, rows_RW: Vectors | None = None) -> Any:
        """Copy a CPU index to the GPU and add these rows. Raises RuntimeError if GPU memory is full."""
        with self._turn:
            made = self._faiss.index_cpu_to_gpu(self._resources, DEVICE_NUMBER, index)
            if rows_RW is not None:
                made.add(rows_RW)
        return made

    def search(self, index: Any, queries_QW: Vectors, c: int, params: Any = None) -> Rows:
        """Row numbers of the best candidates (Q, C), in the GPU's order, then MISSING."""
        with self._turn:
            found: Rows = index.search(np.ascontiguousarray(queries_QW, np.float32), c, params=params)[1]
        return found


class OnGpu:
    """The rows of one segment on the GPU, and its inverted lists if any; each is copied by the first search."""

    def __init__(self, gpu: Gpu, space: Space, rows_RW: Vectors, index: Approximate | None) -> None:
        """`index`: the segment's index on the CPU."""
        self._gpu, self._space, self._rows_RW = gpu, space, rows_RW
        self._lists = index if isinstance(index, Ivf) else None
        self._copies: dict[bool, Any] = {}
        self._copying = threading.Lock()

    def search(self, queries_QD: Vectors, k: int, effort: int, allowed_R: Mask | None) -> tuple[Vectors, Rows] | None:
        """`nearest_rows`, or a search of `effort` lists if that is not 0; None: the CPU must search."""
        wanted = min(len(self._rows_RW), max(MORE * k, k + LEAST_MORE))
        can = not isinstance(self._space, Lorentz) and (not effort or self._lists is not None)
        if (
            not can
            or max(wanted, effort) > MAX_RESULTS
            or not len(queries_QD)
            or (index := self._copy(bool(effort))) is None
        ):
            return None
        params = self._lists.params(effort) if effort and self._lists is not None else None
        at_QC = self._gpu.search(index, self._space.queries(queries_QD), wanted, params)
        if allowed_R is not None:
            at_QC = np.where((at_QC != MISSING) & allowed_R[at_QC], at_QC, MISSING)
        available = len(self._rows_RW) if allowed_R is None else int(np.count_nonzero(allowed_R))
        if ((at_QC != MISSING).sum(axis=1) < min(k, available)).any():
            return None  # too few of the nearest rows are allowed
        return score_rows(self._space, queries_QD, self._rows_RW, at_QC, k)

    def _copy(self, lists: bool) -> Any:
        """The lists or the rows on the GPU; None if its memory was full."""
        with self._copying:
            if lists not in self._copies:
                try:
                    self._copies[lists] = self._gpu.copy(self._lists.index) if lists and self._lists else self._rows()
                except RuntimeError as error:
                    what = {"items": len(self._rows_RW), "reason": error, "then": "the CPU searches them"}
                    logger.warning(Event("not_on_gpu", **what))
                    self._copies[lists] = None
            return self._copies[lists]

    def _rows(self) -> Any:
        import faiss

        metric = faiss.METRIC_INNER_PRODUCT if self._space.inner_product else faiss.METRIC_L2
        return self._gpu.copy(faiss.IndexFlat(self._rows_RW.shape[1], metric), self._rows_RW)


# One per process.
_used: Gpu | None = None


def use(device: Device) -> None:
    """Search sealed segments of this process on a device from now on. Raises DeviceUnavailable."""
    global _used
    _used = Gpu() if device is Device.CUDA else None


def used() -> Gpu | None:
    """The GPU that searches sealed segments; None: the CPU."""
    return _used
