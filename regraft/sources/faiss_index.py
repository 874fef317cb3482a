"""A FAISS index in a file, whose vectors are reconstructed: of one that quantises, as it approximates them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from index.errors import InvalidArgument
from regraft.sources.base import Batch, Column, Wanted


class FaissIndex:
    """The vectors of an index by their numbers, or by the ids of an IndexIDMap; the index is held in memory."""

    def __init__(self, path: Path, wanted: Wanted) -> None:
        self._path, self._wanted = path, wanted
        self._version = wanted.vector("")[1]
        try:
            index: Any = faiss.read_index(str(path))
        except RuntimeError as error:
            raise InvalidArgument(f"{path.name} is no index of FAISS: {str(error)[-200:]}") from error
        self._whole = index  # what it holds goes with it
        self._ids = faiss.vector_to_array(index.id_map) if hasattr(index, "id_map") else None
        self._index = faiss.downcast_index(index.index) if self._ids is not None else index
        if isinstance(self._index, faiss.IndexIVF):
            self._index.make_direct_map()

    @property
    def identity(self) -> str:
        stat = self._path.stat()
        return f"{self._path.resolve()} {stat.st_size} {stat.st_mtime_ns} {self._wanted}"

    @property
    def count(self) -> int:
        return int(self._index.ntotal)

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        for at in range(int(after or 0), self.count, size):
            many = min(size, self.count - at)
            try:
                rows = self._index.reconstruct_n(at, many)
            except RuntimeError as error:
                raise InvalidArgument(f"an index of this kind gives its vectors not back: {self._path.name}") from error
            ids = range(at, at + many) if self._ids is None else self._ids[at : at + many].tolist()
            names = list(map(str, ids))
            yield Batch(many, names, [None] * many, [Column(self._version, np.arange(many), rows)], at + many)
