"""`Segment`: immutable rows, two bits per row, and the index over them.

A segment is searched exactly until `build_index`, which runs concurrently with queries, has built its index. A row is
alive unless its item was replaced or deleted, and served unless another shard serves its item; a row with both bits is
live.
Shape suffixes: Q queries, D dimension, R rows, W their width, K wanted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from index.engines.base import MISSING, Hits, Keys, Scanned, is_full
from index.engines.config import IndexConfig, IndexKind
from index.engines.digest import UNKNOWN, digests
from index.engines.exact import nearest_rows, sort_ties
from index.engines.memory import gpu
from index.engines.memory.approximate import build
from index.engines.memory.tuning import (
    TunedIndex,
    filter_allowed,
    max_expected,
    oversampled,
    search_depth,
    search_index,
    tune,
)
from index.events import Event
from index.scan import COPY_COST, Mask, Rows
from index.space import Space, Vectors

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=np.generic)

MIN_APPROXIMATE = 10_000
"""Fewest rows for an index by `auto`: a scan of fewer takes no longer than the rest of a query."""
KINDS_OF_AUTO = IndexKind.IVF, IndexKind.HNSW
"""The kinds that `auto` tries, in order: inverted lists are built in a fifth of the time of a graph."""
FEW_LISTS = 8
"""If inverted lists reach the recall aim with at most this `nprobe`, no graph is faster, and none is built."""
SAMPLE_ROWS, MAX_SAMPLE_SHARE = 2048, 0.25
"""Rows, and their largest share, held out as queries to measure an index over the others, which takes three or four
seconds. With fewer, the larger margin of error would require a larger effort."""
SCANNED_COST = 1.5 / COPY_COST
"""The cost of comparing a row in a scan, as a number of gathered rows compared; with a margin."""
MAX_CACHED = 256
"""Cached search methods, by k, share, number of allowed rows and recall aim."""
ROW_STATE_BYTES = 5 * 8 + 3
"""Bytes of a row without its vector: key, slot, rank by key, sorted key, digest; and three bits, a byte each."""


class _SearchMethod(NamedTuple):
    """How a segment is searched.

    Attributes:
        scanned: exactly, or by the index and with which effort.
        reliable: number of results for which the recall aim holds.
        depth: number of results to return.
        oversampled_k: number of results to ask the index for, as some of them will not be allowed.
    """

    scanned: Scanned
    reliable: int
    depth: int
    oversampled_k: int


class Segment:
    """See the module. Not thread-safe, except that `build_index` may run concurrently with searches."""

    def __init__(
        self,
        space: Space,
        rows_RW: Vectors,
        keys_R: Keys,
        slots_R: Keys,
        served_R: Mask | None = None,
        digests_R: Keys | None = None,
    ) -> None:
        self.space = space
        self._order_R = np.argsort(keys_R, kind="stable")  # fast, because keys are usually ascending
        self._sorted_R = keys_R[self._order_R]
        self.rows_RW, self.keys_R, self.slots_R = rows_RW, keys_R, slots_R
        self.alive_R: Mask = np.ones(len(keys_R), np.bool_)
        self.served_R = np.ones(len(keys_R), np.bool_) if served_R is None else served_R.copy()
        self.tuned: TunedIndex | None = None
        self.config: IndexConfig | None = None
        self.folder: Path | None = None
        self.merge_rejected = False
        """Whether merging it was rejected, for its recall or its cost; it is not tried again."""
        self.provisional = False
        """Whether inverted lists were accepted without trying a graph, which may be faster."""
        self.stored_bytes = 0
        """Bytes of its files other than its rows."""
        self._digests_R = digests_R
        self._on_gpu: gpu.OnGpu | None = None
        self.refresh()

    def count(self) -> int:
        """Number of live rows."""
        return self._live

    def row_count(self) -> int:
        """Number of alive rows."""
        return len(self.keys_R) - self.dead

    def refresh(self) -> None:
        """Recompute all that depends on the bits; must be called after each change of them."""
        self.dead = len(self.alive_R) - int(np.count_nonzero(self.alive_R))
        self._live_R: Mask = self.alive_R & self.served_R
        self._live = int(np.count_nonzero(self._live_R))
        self._all_live = None if self._live == len(self.keys_R) else self._live_R
        self._methods: dict[tuple[int, float, int, float | None], _SearchMethod] = {}

    def serve(self, served_S: Mask) -> None:
        """Set which rows are served, by slot."""
        if self.row_count():  # dead rows do not matter, and their slots may no longer exist
            self.served_R = served_S.take(self.slots_R, mode="clip")
        self.refresh()

    def find(self, keys: Keys, *, dead: bool = False) -> Rows:
        """The alive row of each key, or with `dead` any row; MISSING if there is none."""
        if not len(self.keys_R):
            return np.full(len(keys), MISSING, np.int64)
        at = self._order_R[np.searchsorted(self._sorted_R, keys).clip(max=len(self.keys_R) - 1)]
        return np.where((self.keys_R[at] == keys) & (self.alive_R[at] | dead), at, MISSING)

    def find_by_digest(self, keys_N: Keys, digests_N: Keys) -> Rows:
        """The row of each key whose vector has this digest, dead or not; MISSING if there is none."""
        at_N = self.find(keys_N, dead=True)
        same_N = (at_N != MISSING) & (digests_N != UNKNOWN) & (self.digests()[at_N] == digests_N)
        return np.where(same_N, at_N, MISSING)

    def digests(self) -> Keys:
        """The digest of each row's vector (R,), computed on first use."""
        if self._digests_R is None:
            self._digests_R = digests(self.rows_RW[:, : self.dim])
        return self._digests_R

    def bytes(self) -> int:
        """Memory of rows, index and bits, mapped files included."""
        return self.stored_bytes + self.rows_RW.nbytes + len(self.keys_R) * ROW_STATE_BYTES

    def mark_dead(self, keys: Keys) -> None:
        """Mark the rows of these keys dead; unknown keys are ignored."""
        if not len(keys):
            return
        at = self.find(keys)
        at = at[at != MISSING]
        if len(at):
            self.alive_R[at] = False
            self.refresh()

    def revive_matching(self, keys_N: Keys, rows_NW: Vectors, slots_N: Keys, served_N: Mask) -> Mask:
        """Mark rows of these keys alive if their vector is the given one, else dead; returns which matched (N,)."""
        at_N = self.find(keys_N, dead=True)
        (held_N,) = np.nonzero(at_N != MISSING)
        same_N = held_N[(self.rows_RW[at_N[held_N]] == rows_NW[held_N]).all(axis=1)]
        self.alive_R[at_N[held_N]] = False
        self.alive_R[at_N[same_N]] = True
        self.slots_R[at_N[same_N]], self.served_R[at_N[same_N]] = slots_N[same_N], served_N[same_N]
        if len(held_N):
            self.refresh()
        taken_N = np.zeros(len(keys_N), np.bool_)
        taken_N[same_N] = True
        return taken_N

    def mark_all_dead(self) -> None:
        """Mark all rows dead."""
        self.alive_R[:] = False
        self.refresh()

    def share_row_state(self, other: Segment) -> None:
        """Use the bits and slots of `other`, which has the same rows."""
        self.alive_R, self.slots_R, self.served_R = other.alive_R, other.slots_R, other.served_R
        self.refresh()

    def search(
        self,
        queries_QD: Vectors,
        k: int,
        allowed_S: Mask | None,
        *,
        exact: bool = False,
        recall: float | None = None,
        share: float = 1.0,
    ) -> Hits:
        """As `Shard.search`."""
        allowed_R, allowed = self._allowed(allowed_S)
        scanned, reliable, depth, oversampled_k = Scanned(allowed), k, k, k
        if allowed and not exact:
            scanned, reliable, depth, oversampled_k = self._method(k, share, allowed, recall)
        if (device := gpu.used()) and (found := self._by_gpu(device, queries_QD, depth, scanned.effort, allowed_R)):
            scores_QC, at_QC = found
        elif scanned.effort and self.tuned:
            found = sort_ties(
                *search_index(self.tuned.index, self.space, self.rows_RW, queries_QD, oversampled_k, scanned.effort)
            )
            scores_QC, at_QC = found if allowed_R is None else filter_allowed(allowed_R, found, depth)
        else:
            scores_QC, at_QC = nearest_rows(self.space, queries_QD, self.rows_RW, allowed_R, depth)
        if is_full(at_QC):
            return Hits(scores_QC, self.slots_R.take(at_QC), True, scanned, reliable)
        # Also the last of `depth` results, which shows whether there are more than the reliable ones.
        least = min(depth, allowed)
        if least and len(few := np.flatnonzero(at_QC[:, least - 1] == MISSING)):  # too few results by the index
            found = nearest_rows(self.space, queries_QD[few], self.rows_RW, allowed_R, depth)
            scores_QC[few], at_QC[few] = found
            scanned = replace(scanned, exact=allowed)
        none_QC = at_QC == MISSING
        slots_QC = self.slots_R.take(at_QC) if allowed else at_QC
        scores_QC, slots_QC = np.where(none_QC, np.float32(0), scores_QC), np.where(none_QC, MISSING, slots_QC)
        return Hits(scores_QC, slots_QC, is_full(at_QC), scanned, reliable)

    def build_index(
        self,
        config: IndexConfig,
        queries_QD: Vectors | None,
        stopped: Callable[[], bool],
        *,
        missed: str,
        accept_first: bool = False,
    ) -> bool:
        """Build an index by this configuration and measure the effort that reaches its recall aim. Slow.

        If no effort reaches the aim, a warning is logged and the segment stays without an index.

        Args:
            config: the configuration.
            queries_QD: recent queries; None: the last rows, which are random (`merge_segments`).
            stopped: polled.
            missed: the consequence if the aim is missed, for the log.
            accept_first: take the first index that reaches the aim.

        Returns:
            False if it was stopped.
        """
        self.config = config
        if config.kind is IndexKind.EXACT or (config.kind is IndexKind.AUTO and len(self.keys_R) < MIN_APPROXIMATE):
            return True
        # Hold out rows as queries: rows in the index, and vectors between them, are found too easily.
        rows_RW, held_out = self.rows_RW, _sampled(len(self.rows_RW))
        indexed_RW = rows_RW[: len(rows_RW) - held_out]
        if queries_QD is None:
            queries_QD = np.ascontiguousarray(rows_RW[-max(held_out, 1) :, : self.dim])
        enough = math.inf if accept_first else FEW_LISTS
        found = self._cheapest(config, indexed_RW, queries_QD, stopped, enough)
        if found is None:
            return False
        best, reached = found
        if best is None:
            fields = _event_fields(config, reached, missed)
            logger.warning(Event("recall_not_reached", index=config.kind.value, items=len(rows_RW), **fields))
            return True
        best.index.add(rows_RW[len(indexed_RW) :])
        self.tuned = best
        lists = best.efforts[0] if best.index.kind is IndexKind.IVF else 0
        self.provisional = config.kind is IndexKind.AUTO and FEW_LISTS < lists <= enough
        self._methods.clear()
        self._on_gpu = None
        return True

    def _cheapest(
        self, config: IndexConfig, rows_RW: Vectors, queries_QD: Vectors, stopped: Callable[[], bool], enough: float
    ) -> tuple[TunedIndex | None, float] | None:
        """The cheapest index that reaches the recall aim (None if none does), and the best recall of any.

        If at most `enough` lists reach the aim, no graph is tried. Returns None if it was stopped.
        """
        best, reached = None, 0.0
        for kind in KINDS_OF_AUTO if config.kind is IndexKind.AUTO else (config.kind,):
            index = build(kind, config.storage, rows_RW, inner_product=self.space.inner_product, stopped=stopped)
            if index is None:
                return None
            efforts, recall, aims, long = tune(index, self.space, rows_RW, queries_QD, config.recall)
            reached = max(reached, recall)
            if efforts is not None and (best is None or index.cost(efforts[0]) < best.cost()):
                best = TunedIndex(index, efforts, recall, aims, long)
            if kind is IndexKind.IVF and best is not None and best.efforts[0] <= enough:
                break
        return best, reached

    def reorder(self) -> None:
        """Reorder rows for the fastest searches by the index; before the segment is searched."""
        if self.tuned is None:
            return
        index = self.tuned.index
        if (kept_RW := index.rows()) is not None:
            self.rows_RW = kept_RW  # do not keep a second copy
        if (order_R := index.reorder()) is None:
            return
        arranged_RW = index.rows()
        self.rows_RW = self.rows_RW[order_R] if arranged_RW is None else arranged_RW
        self._order_R = np.argsort(order_R)[self._order_R]
        self.keys_R, self.slots_R = self.keys_R[order_R], self.slots_R[order_R]
        self.alive_R, self.served_R = self.alive_R[order_R], self.served_R[order_R]
        self.refresh()

    def cost(self, whole: Segment | None = None) -> float:
        """The cost of a search in rows compared; with `whole`, for its share of a list over all rows of that."""
        if self.tuned is None:
            return float(len(self.keys_R))
        return self.tuned.cost(1.0 if whole is None else min(1.0, len(self.keys_R) / len(whole.keys_R)))

    def _allowed(self, allowed_S: Mask | None) -> tuple[Mask | None, int]:
        """Whether each row (R,) is live and allowed (None: all are), and the number of such rows."""
        if allowed_S is None:
            return self._all_live, self._live
        allowed_R: Mask = allowed_S[self.slots_R]
        if self._live < len(self.keys_R):
            allowed_R &= self._live_R
        return allowed_R, int(np.count_nonzero(allowed_R))

    def _method(self, k: int, share: float, allowed: int, recall: float | None) -> _SearchMethod:
        """The best method to search `allowed` of the rows; cached until rows change."""
        if (found := self._methods.get((k, share, allowed, recall))) is None:
            if len(self._methods) >= MAX_CACHED:
                self._methods.clear()
            oversampled_k = oversampled(k, allowed / len(self.keys_R))
            effort = self._effort(oversampled_k, share, allowed, recall)
            scanned = Scanned(0, allowed, effort) if effort else Scanned(allowed)
            is_part = 0 < effort < (self._effort(oversampled_k, 1.0, allowed, recall) or math.inf)
            asked = share if is_part else 1.0
            found = _SearchMethod(
                scanned, max_expected(k, asked), search_depth(k, asked), search_depth(oversampled_k, asked)
            )
            self._methods[k, share, allowed, recall] = found
        return found

    def _effort(self, k: int, share: float, allowed: int, recall: float | None) -> int:
        """The effort of an approximate search for the k best; 0 if comparing the `allowed` rows costs less."""
        if self.tuned is None or k > len(self.keys_R):
            return 0
        needed = self.tuned.effort_for(share, k, recall)
        scanned = min(allowed, SCANNED_COST * len(self.keys_R))
        return math.ceil(needed) if self.tuned.cost_for(self.space, needed, k) < scanned else 0

    def _by_gpu(
        self, device: gpu.Gpu, queries_QD: Vectors, k: int, effort: int, allowed_R: Mask | None
    ) -> tuple[Vectors, Rows] | None:
        """Search on the GPU; None: the CPU must search."""
        if self._on_gpu is None:
            index = None if self.tuned is None else self.tuned.index
            self._on_gpu = gpu.OnGpu(device, self.space, self.rows_RW, index)
        return self._on_gpu.search(queries_QD, k, effort, allowed_R)

    @property
    def dim(self) -> int:
        """Dimension of the vectors."""
        return int(self.rows_RW.shape[1]) - (self.space.width(1) - 1)


def merge_segments(segments: Sequence[Segment], chosen: Sequence[Mask]) -> Segment:
    """A new segment of the chosen rows (R,) of several segments, at most one per key, in random order.

    Graphs need a random order, and `build_index` takes the last rows as sample queries.
    """
    taken = [np.flatnonzero(chosen_R) for chosen_R in chosen]
    places = np.random.default_rng(0).permutation(sum(map(len, taken)))
    split = np.split(places, np.cumsum([len(at) for at in taken])[:-1])

    def together(columns: Sequence[NDArray[T]]) -> NDArray[T]:
        shuffled = np.empty((len(places), *columns[0].shape[1:]), columns[0].dtype)
        for column, at, to in zip(columns, taken, split, strict=True):
            shuffled[to] = column[at]
        return shuffled

    return Segment(
        segments[0].space,
        together([one.rows_RW for one in segments]),
        together([one.keys_R for one in segments]),
        together([one.slots_R for one in segments]),
        together([one.served_R for one in segments]),
    )


def _event_fields(config: IndexConfig, recall: float, missed: str) -> dict[str, object]:
    advice = "a lower recall aim, another index or float32 storage, see `regraft gallery index`"
    return {"aim": config.recall, "reached": round(recall, 4), "then": missed, "instead": advice}


def _sampled(rows: int) -> int:
    return min(SAMPLE_ROWS, int(rows * MAX_SAMPLE_SHARE))
