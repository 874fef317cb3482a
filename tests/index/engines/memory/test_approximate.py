"""index.engines.memory.approximate: how a graph is built in blocks, and how its rows lie."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

from index.engines.config import IndexKind, Storage
from index.engines.memory import approximate
from index.engines.memory.approximate import Approximate, build

ROWS, DIM = 400, 8


def rows() -> np.ndarray:
    """Two of each in the first half: a graph need not reach both."""
    drawn = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    drawn[: ROWS // 4] = drawn[ROWS // 4 : ROWS // 2]
    return drawn


def built(kind: IndexKind, storage: Storage) -> Approximate:
    index = build(kind, storage, rows(), inner_product=False, stopped=lambda: False)
    assert index is not None
    return index


def test_of_a_graph_that_is_built_in_blocks_the_first_rows_are_in_the_upper_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(approximate, "ADD_BATCH", 50)
    monkeypatch.setattr(approximate, "LINKS", 7)
    graph = built(IndexKind.HNSW, Storage.FLOAT32)
    layers = faiss.vector_to_array(graph.index.hnsw.levels)
    assert layers.tolist() == sorted(layers.tolist(), reverse=True)
    assert np.bincount(layers).tolist() == [0, ROWS - ROWS // 7, ROWS // 7 - ROWS // 49, ROWS // 49 - 1, 1]


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("kind", [IndexKind.HNSW, IndexKind.IVF])
def test_rows_that_are_numbered_anew_are_found_as_before(kind: IndexKind, storage: Storage) -> None:
    index, queries = built(kind, storage), rows()[:60]
    scores, at = index.search(queries, 5, 64)
    order = index.reorder()
    assert (order is None) is (kind is IndexKind.IVF)
    if order is None:
        return
    assert sorted(order) == list(range(ROWS)) != order.tolist()
    again, numbered = index.search(queries, 5, 64)
    assert again.tolist() == scores.tolist()
    # Of rows that are equally near any may be named.
    np.testing.assert_array_equal(rows()[order[numbered]], rows()[at])
    if (kept := index.rows()) is not None:
        np.testing.assert_array_equal(kept, rows()[order])
