"""index.engines.digest: what differs has another digest, and a digest stays what it is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from index.engines.digest import BLOCK, digests

WORDS = st.integers(0, 2**32 - 1)


@given(arrays.arrays(np.uint32, (3, 4), elements=WORDS), st.integers(0, 3), st.integers(0, 31))
def test_one_bit_makes_another_digest_of_its_row_only(words: np.ndarray, at: int, bit: int) -> None:
    before = digests(words.view(np.float32))
    words[1, at] ^= np.uint32(1 << bit)
    assert (digests(words.view(np.float32)) == before).tolist() == [True, False, True]


def test_digests_are_those_of_every_other_release() -> None:
    rows = np.arange(2 * BLOCK, dtype=np.float32)[:, np.newaxis] * np.array([1, -0.5, 0.25], np.float32)
    found = digests(rows)
    assert found[0] == -2220425975135213076
    assert len(set(found.tolist())) == len(rows)
    assert found.tolist() == digests(np.asfortranarray(rows)).tolist()
