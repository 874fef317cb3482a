"""index.evaluation.relevance: lists and classes give the same, also without queries or items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from index.errors import InvalidArgument
from index.evaluation.metrics import Compared, retrieval
from index.evaluation.relevance import LabelRelevance, ListedRelevance, label_codes, retrieval_by
from index.evaluation.score_maps import fit_evalue_maps, fit_maps
from index.space import Cosine
from naive import units

NONE = np.arange(0)


@pytest.mark.parametrize("fit", [fit_maps, fit_evalue_maps])
@pytest.mark.parametrize(("items", "rows"), [(30, NONE), (0, np.arange(3))])
def test_maps_of_no_query_or_no_item_are_refused(fit: Callable[..., Any], items: int, rows: np.ndarray) -> None:
    ways = [Compared(units(3, 4), units(30, 4)[:items], Cosine())] * 2
    with pytest.raises(InvalidArgument, match="at least one query and one item"):
        fit(ways, LabelRelevance(np.arange(3), np.arange(items), np.full(3, -1)), rows)


def test_where_nothing_is_there_no_query_has_a_right_item() -> None:
    assert LabelRelevance(np.arange(3), NONE, np.full(3, -1)).valid.tolist() == [False] * 3


def test_what_is_listed_one_by_one_measures_as_the_classes_it_comes_of() -> None:
    generator = np.random.default_rng(0)
    asked, held = generator.integers(1, 7, 20), generator.integers(1, 6, 30)
    asked[0] = held[0] = 0  # of which only item 0 is right
    nobody = np.full(20, -1)
    classes = LabelRelevance(asked, held, nobody)
    right = np.full((20, 30), -1)
    for row, mine in zip(right, classes.relevant(slice(None)), strict=True):
        row[: mine.sum()] = np.flatnonzero(mine)
    listed = ListedRelevance(right, 30, nobody)
    way = Compared(units(20, 4), units(30, 4), Cosine())

    found = [
        retrieval_by(way, listed),
        retrieval_by(way, classes),
        retrieval(way.queries, asked, way.items, held, way.space),
    ]

    np.testing.assert_array_equal(listed.relevant(np.arange(5)), classes.relevant(np.arange(5)))
    np.testing.assert_array_equal(listed.valid, classes.valid)
    for one in found:
        np.testing.assert_array_equal(one.valid, (asked[:, None] == held).any(axis=1))
        for metric in ("cmc@1", "cmc@5", "mAP@1.0"):
            np.testing.assert_array_equal(one.per_query(metric), found[0].per_query(metric))


def test_labels_are_told_apart_by_their_whole_text_as_numbers() -> None:
    assert label_codes(["b", "a", "b", "a ", "b\0"]).tolist() == [0, 1, 0, 2, 3]
    assert label_codes([]).shape == (0,)
