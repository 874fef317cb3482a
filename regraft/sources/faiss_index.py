"""`FaissIndex`: the reconstructed vectors of a FAISS index in a file; those of a quantising index are approximate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from faiss.contrib.inspect_tools import get_invlist
from numpy.typing import NDArray

from index.errors import InvalidArgument
from regraft.sources.base import Batch, Column, Wanted

METRICS = {faiss.METRIC_L2: "l2", faiss.METRIC_INNER_PRODUCT: "ip"}


class FaissIndex:
    """The vectors of an index, by the ids in the index or row numbers from 0; the index is loaded into memory."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._path = path
        self._version = wanted.vector("")[1]
        try:
            index: Any = faiss.read_index(str(path))
            _restore_quantizer(index)
            mapped = faiss.vector_to_array(index.id_map) if hasattr(index, "id_map") else None
            self._index = index if mapped is None else faiss.downcast_index(index.index)
            self._keys = _keys(self._index)
        except RuntimeError as error:
            raise InvalidArgument(f"{path.name} is not a FAISS index: {str(error)[-200:]}") from error
        self._whole = index  # keeps the wrapped index alive
        self._ids = self._keys if mapped is None else mapped

    @property
    def identity(self) -> str:
        stat = self._path.stat()
        return f"{self._path.resolve()} {stat.st_size} {stat.st_mtime_ns}"

    @property
    def count(self) -> int:
        return len(self._keys)

    @property
    def note(self) -> str:
        """That the vectors are approximations, if the index stores fewer bytes of each than its numbers take."""
        stored = self._index
        while hasattr(stored, "storage"):  # of a graph
            stored = faiss.downcast_index(stored.storage)
        try:
            size, whole = stored.sa_code_size(), 4 * stored.d
        except RuntimeError:  # some kinds do not tell
            return ""
        if size >= whole:
            return ""
        return (
            f"{self._path.name} stores {size} bytes of each vector of {whole}: approximations are imported; "
            "the original vectors give better answers"
        )

    @property
    def metrics(self) -> Mapping[str | None, str]:
        metric = self._whole.metric_type
        return {self._version: METRICS.get(metric, f"metric {metric}")}

    @property
    def fields(self) -> None:
        return None  # it holds vectors alone

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        for at in range(int(after or 0), self.count, size):
            part = slice(at, at + size)
            try:
                rows = self._index.reconstruct_batch(self._keys[part])
            except RuntimeError as error:
                raise InvalidArgument(
                    f"a FAISS index of this kind cannot return its vectors: {self._path.name}"
                ) from error
            names = list(map(str, self._ids[part].tolist()))
            many = len(names)
            yield Batch(many, names, [None] * many, [Column(self._version, np.arange(many), rows)], at + many)


def _restore_quantizer(index: Any) -> None:
    """Set what FAISS (1.15) does not restore of a fast-scan index in inverted lists: `reconstruct` would crash."""
    inner = faiss.try_extract_index_ivf(index)
    lists: Any = None if inner is None else faiss.downcast_index(inner)
    own = getattr(lists, "pq", None) or getattr(lists, "aq", None)
    if own is not None and getattr(lists, "fine_quantizer", own) is None:
        lists.fine_quantizer = own


def _keys(index: Any) -> NDArray[np.int64]:
    """The arguments of an index's `reconstruct`: row numbers, or the ids in inverted lists."""
    lists = faiss.try_extract_index_ivf(index)
    if lists is None:
        return np.arange(index.ntotal)
    keys = np.sort(np.concatenate([get_invlist(lists.invlists, number)[0] for number in range(lists.nlist)]))
    numbered = np.array_equal(keys, np.arange(len(keys)))
    kinds = lists.direct_map
    lists.set_direct_map_type(kinds.Array if numbered else kinds.Hashtable)
    return keys
