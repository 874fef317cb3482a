"""The cost of a backfill on paper."""

from __future__ import annotations

import pytest

from index.errors import InvalidArgument
from index.evaluation.cost import BackfillCost, ItemCost, estimate_backfill


def test_a_billion_items_on_paper() -> None:
    reckoned = estimate_backfill(10**9, ItemCost(4 * 10**9, 0.01, 256), old_floats=128, workers=100)

    assert reckoned == BackfillCost(10**9, 1e5, 4 * 10**18, 512 * 10**9, 1536 * 10**9)
    limited = estimate_backfill(1000, ItemCost(None, 0.001, 1), old_floats=1, rate=10)
    assert (limited.seconds, limited.macs) == (100, None)


def test_what_cannot_be_reckoned_is_refused() -> None:
    for wrong in ({"workers": 0}, {"rate": 0.0}):
        with pytest.raises(InvalidArgument, match="workers at least 1, and rate above 0"):
            estimate_backfill(1, ItemCost(None, None, 1), old_floats=1, **wrong)
