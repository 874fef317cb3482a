"""The estimated cost of a backfill: time, multiply-accumulates and storage, and the limits and price of a provider."""

from __future__ import annotations

import math
from dataclasses import dataclass

from index.errors import InvalidArgument
from index.version import EmbeddingApi

FLOAT_BYTES = 4


@dataclass(frozen=True)
class ItemCost:
    """The cost of moving one item.

    Attributes:
        macs: multiply-accumulates; None: unknown.
        seconds: of one worker; None: unknown.
        floats: numbers stored in addition, of the vector and its side-information.
    """

    macs: int | None
    seconds: float | None
    floats: int


@dataclass(frozen=True)
class BackfillCost:
    """The estimated cost of a backfill: seconds of wall clock, multiply-accumulates, and bytes of stored vectors."""

    items: int
    seconds: float | None
    macs: int | None
    bytes_before: int
    bytes_after: int


def estimate_backfill(
    items: int, cost: ItemCost, *, old_floats: int, workers: int = 1, rate: float | None = None
) -> BackfillCost:
    """Estimate a backfill; old embeddings are kept, because they are stored until their version is retired.

    Args:
        items: number of items, at least 0.
        cost: cost of one item.
        old_floats: numbers stored per item before, vector and side-information.
        workers: number of workers, assumed independent.
        rate: limit of items per second over all workers; None: no limit.
    """
    if items < 0 or workers < 1 or (rate is not None and rate <= 0):
        raise InvalidArgument("items must be at least 0, workers at least 1, and rate above 0")
    seconds = None if cost.seconds is None else items * cost.seconds / workers
    if rate is not None:
        seconds = max(seconds or 0.0, items / rate)
    return BackfillCost(
        items,
        seconds,
        None if cost.macs is None else items * cost.macs,
        items * old_floats * FLOAT_BYTES,
        items * (old_floats + cost.floats) * FLOAT_BYTES,
    )


def provider_seconds(api: EmbeddingApi, items: int, tokens: float) -> float:
    """Least seconds to embed items of `tokens` tokens each by a provider's API, within the limits of one process."""
    calls = math.ceil(items / api.batch_size)
    minutes = max(calls / (api.requests_per_minute or math.inf), items * tokens / (api.tokens_per_minute or math.inf))
    return 60 * minutes


def provider_price(api: EmbeddingApi, items: int, tokens: float) -> float | None:
    """The provider's price of embedding items of `tokens` tokens each; None: unknown."""
    return None if api.price is None else items * tokens * api.price / 1e6
