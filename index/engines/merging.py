"""Which segments become one, and how: what has no index yet is added to a graph there is, where that takes less.

A graph takes rows at the end as well as it took its first ones, so that a row is added once in a while that its segment
grows, and not once for each size that it goes through. What changed in between is copied, hashed and written down: so a
segment waits until what joins it is a share of it, a smaller one once writes have stopped.

Shape suffixes: R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from index.engines.approximate import INDEX
from index.engines.base import MISSING
from index.engines.config import IndexConfig, IndexKind
from index.engines.segment import Segment

T = TypeVar("T", bound=np.generic)

GROWN, GROWN_AT_REST = 8, 32
"""A segment may be so many times larger than what joins it, while others are written, and once nothing is."""
BUILT_ANEW = 2
"""The same of an index that takes no more rows."""
MOST_DEAD = 0.3
"""A segment with a larger share of dead rows is written anew."""
MOST_DEAD_GROWN = 0.1
"""A graph with a larger share does not grow: its dead rows stay in it."""


def due(segments: Sequence[Segment], config: IndexConfig, *, at_rest: bool) -> tuple[Segment, ...]:
    """The segments to be made one next, or one to be made anew; none: nothing is to be done."""
    grown = BUILT_ANEW if config.kind is IndexKind.IVF else GROWN_AT_REST if at_rest else GROWN
    indexed = sorted((one for one in segments if one.config == config), key=lambda one: one.held())
    joined = [one for one in segments if one.config != config]
    if not joined:
        # Several of a share of the next: each of them is small, and together they are not.
        fits = [place for place in range(1, len(indexed)) if _fits(indexed[place], indexed[:place], grown)]
        if fits:
            return tuple(indexed[: fits[-1] + 1])
        return next(((one,) for one in segments if one.dead > MOST_DEAD * len(one.keys_R)), ())
    for one in indexed:
        if _fits(one, joined, grown):
            joined.append(one)
    return tuple(joined)


def _fits(larger: Segment, joined: Sequence[Segment], grown: int) -> bool:
    return larger.held() <= grown * sum(one.held() for one in joined)


def base_of(segments: Sequence[Segment], config: IndexConfig) -> Segment | None:
    """The one whose graph the rows of the others are added to; None: an index is built anew."""
    graphs = [
        one
        for one in segments
        if one.tuned is not None
        and one.tuned.index.kind is IndexKind.HNSW
        and one.config == config
        and one.dead <= MOST_DEAD_GROWN * len(one.keys_R)
        and (one.folder is None or (one.folder / INDEX).exists())
    ]
    return max(graphs, key=lambda one: one.held()) if graphs and len(segments) > 1 else None


def merged(segments: Sequence[Segment], base: Segment | None = None) -> Segment:
    """One segment of the rows of several that are not dead now, in random order: as graphs are built best.

    All rows of `base` come first, as they lie there, dead ones without a key. `Segment.index_by` takes the last of all
    for those that queries are like.
    """
    ordered = [one for one in segments if one is not base]
    kept = [np.flatnonzero(one.alive_R) for one in ordered]
    first = 0 if base is None else len(base.keys_R)
    drawn = first + np.random.default_rng(0).permutation(sum(map(len, kept)))
    places = np.split(drawn, np.cumsum([len(at) for at in kept])[:-1])
    if base is not None:
        ordered, kept, places = [base, *ordered], [np.arange(first), *kept], [np.arange(first), *places]

    def together(parts: Sequence[NDArray[T]]) -> NDArray[T]:
        made = np.empty((sum(map(len, kept)), *parts[0].shape[1:]), parts[0].dtype)
        for part, at, to in zip(parts, kept, places, strict=True):
            made[to] = part[at]
        return made

    keys_R = together([one.keys_R for one in ordered])
    if base is not None:
        keys_R[:first][~base.alive_R] = MISSING
    return Segment(
        segments[0].space,
        together([one.rows_RW for one in ordered]),
        keys_R,
        together([one.slots_R for one in ordered]),
        together([one.served_R for one in ordered]),
    )
