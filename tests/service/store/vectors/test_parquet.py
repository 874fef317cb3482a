"""Files of vectors: how much of one is fetched to read a part of it."""

from __future__ import annotations

import numpy as np

from index.engines.digest import digests
from service.store.vectors.parquet import GROUP, describe, read_groups, write_vectors

DIM = 128
N = 3 * GROUP + 5


def test_what_describes_a_file_and_some_of_its_groups_are_one_fetch_each_of_no_more_than_they_take() -> None:
    vectors = np.random.default_rng(0).normal(size=(N, DIM)).astype("<f4")
    numbers = np.arange(N)
    content = write_vectors(numbers, numbers, digests(vectors), [row.tobytes() for row in vectors], {})
    fetched: list[int] = []

    def fetch(start: int, end: int) -> bytes:
        fetched.append(end - start)
        return content[start:end]

    about = describe(len(content), fetch)
    assert len(fetched) == 1
    for first, last in ((0, 0), (1, 2), (2, 3)):
        fetched.clear()
        groups = read_groups(about, first, last, len(content), fetch)
        wanted = vectors[first * GROUP : (last + 1) * GROUP]
        assert b"".join(group.tobytes() for group in groups) == wanted.tobytes()
        assert len(fetched) == 1
        assert wanted.nbytes < fetched[0] < 1.1 * wanted.nbytes
