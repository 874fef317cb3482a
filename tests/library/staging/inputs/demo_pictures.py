"""Pictures and answers for the tests of the demo's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from examples.demo.measure import Answer
from examples.demo.pictures import Pictures
from regraft.models import SearchResponse
from staging.api.answers import filled


def pictures(pairs: int = 1) -> Pictures:
    """Two items of digit 0, one of digit 1, and queries of 0 and 1 in turns."""
    return Pictures([], {"a": 0, "b": 1, "c": 0}, [b"", b""] * pairs, np.array([0, 1] * pairs), [])


def answer(*rows: str, scores: tuple[float, ...] = (0.9, 0.8, 0.7)) -> Answer:
    return Answer([list(row) for row in rows], [list(scores[: len(row)]) for row in rows], frozenset(), {})


def body(*ids: str, degraded: Sequence[str] = ()) -> SearchResponse:
    matches = [{"id": i, "score": 1 - n / 10, "raw_score": 1 - n / 10} for n, i in enumerate(ids)]
    left_out = [{"version": version} for version in degraded]
    return answered([{"matches": matches}], left_out)


def answered(results: Sequence[dict[str, Any]], degraded: Sequence[dict[str, Any]] = ()) -> SearchResponse:
    return SearchResponse(**filled(SearchResponse, {"results": list(results), "degraded": list(degraded)}))
