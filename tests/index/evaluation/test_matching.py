"""index.evaluation.matching: where nobody asks, or nothing is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from index.errors import InvalidArgument
from index.evaluation.matching import Matching, fit_evalue_maps, fit_maps
from index.evaluation.metrics import Compared
from index.space import Cosine
from naive import units

NONE = np.arange(0)


@pytest.mark.parametrize("fit", [fit_maps, fit_evalue_maps])
@pytest.mark.parametrize(("items", "rows"), [(30, NONE), (0, np.arange(3))])
def test_maps_of_no_query_or_no_item_are_refused(fit: Callable[..., Any], items: int, rows: np.ndarray) -> None:
    ways = [Compared(units(3, 4), units(30, 4)[:items], Cosine())] * 2
    with pytest.raises(InvalidArgument, match="at least one query and one item"):
        fit(ways, Matching(np.arange(3), np.arange(items), np.full(3, -1)), rows)


def test_where_nothing_is_there_no_query_has_a_right_item() -> None:
    assert Matching(np.arange(3), NONE, np.full(3, -1)).valid.tolist() == [False] * 3
