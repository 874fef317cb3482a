"""Watching a trial: which version answers a query, what both would have answered, and when it is enough.

The query path only decides and counts. Everything else - answering once more by the new version for a shadow, adding
the counts up in the database, rolling back a canary that passed a limit - happens behind the response, on one thread
that drops what does not fit, and counts what it dropped.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from index.evaluation.ranking_overlap import first_match_flips, overlap, rank_correlation
from index.events import Event
from index.query_plan import Encode, GalleryQuery
from index.retry import GalleryChanged, attempts
from index.search_result import SearchResult
from service.background import Background
from service.logs import RecurringErrors
from service.registry.registry import Registry
from service.registry.rollout_records import CANARY, SHADOW, Counters, Rollout, add_counters, exceeded
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.database import Database
from service.store.repository import take_seq
from service.upgrades.deployments.history import DeploymentState, on_its_way
from service.upgrades.deployments.lifecycle import roll_back
from service.upgrades.deployments.transition import TransitionRequest

logger = logging.getLogger(__name__)

MAX_WAITING = 64
MAX_WAITING_BYTES = 64 << 20
"""How much a shadow may hold of what it has still to answer."""
FLUSH_SECONDS = 0.25
"""How long counts wait to be added up in the database, at most, while nothing holds up the thread."""

WHO = "canary"
"""Who rolls back when a limit is passed."""


class Content(Protocol):
    """The queries of a request, when several versions can embed them."""

    @property
    def encoders(self) -> frozenset[str]:
        """Names of these versions."""

    def digest(self) -> bytes:
        """What tells them from others."""

    def size(self) -> int:
        """Bytes it takes to keep them."""

    def kept(self) -> Encode:
        """An encoder that outlives the request."""


class Asking(NamedTuple):
    """Queries as a trial sees them.

    Attributes:
        version: what the request names; such queries take part in nothing.
        ask: what is asked.
        content: the queries, None when only their own version can embed them.
        key: what keeps the same client on the same version during a canary; None: the content itself.
        k: matches that are compared.
    """

    version: str | None
    ask: GalleryQuery
    content: Content | None
    key: str | None
    k: int


@dataclass(frozen=True)
class _Job:
    """Queries that the new version has still to answer."""

    live: LoadedGallery
    rollout: Rollout
    old: SearchResult
    ask: GalleryQuery
    size: int
    k: int


class RolloutMonitor(Background):
    """The trials of one process."""

    def __init__(self, database: Database, registry: Registry, replica: Replica) -> None:
        super().__init__("watch")
        self._database = database
        self._registry = registry
        self._replica = replica
        self._jobs: queue.Queue[_Job] = queue.Queue(MAX_WAITING)
        self._held = 0
        self._counting = threading.Lock()
        self._counters: dict[tuple[int, int, str], Counters] = defaultdict(Counters)
        self._errors = RecurringErrors(logger)

    def stop(self) -> None:
        """Add up what was counted; queries that wait for their shadow are dropped."""
        super().stop()
        self._flush()

    def answer(self, live: LoadedGallery, askings: Sequence[Asking]) -> list[SearchResult]:
        """Answer queries as the gallery's trial has it.

        What the new version of a canary cannot answer the old one does; what neither can is the request's own fault.

        Raises:
            NoCurrentVersion: none is deployed, and a query names none.
            GalleryChanged, and what else `Gallery.answer` raises.
        """
        if any(asking.version is None for asking in askings):
            live.check_current()
        if (rollout := live.rollout) is None:
            return live.gallery.answer([(asking.version, asking.ask) for asking in askings])
        drawn = [_drawn(rollout, asking) for asking in askings]
        by_new = [rollout.version.name if rollout.phase == CANARY and chosen else None for chosen in drawn]
        error, started = None, time.perf_counter()
        try:
            answers = live.gallery.answer([(new or a.version, a.ask) for new, a in zip(by_new, askings, strict=True)])
        except GalleryChanged:
            raise
        except Exception as raised:
            if not any(by_new):
                raise
            error = raised
            answers = live.gallery.answer([(asking.version, asking.ask) for asking in askings])
        seconds = time.perf_counter() - started
        for asking, chosen, new, answered in zip(askings, drawn, by_new, answers, strict=True):
            if chosen is None:
                continue
            queries = len(answered.keys_QK)
            with self._counters_of(live, rollout) as counters:
                counters.add(**{"new" if new else "old": queries})
                if new and error:
                    counters.fail(error, queries)
                else:
                    counters.took("new" if new else "old", seconds, queries)
            if chosen and rollout.phase == SHADOW:
                self._shadow(live, rollout, answered, asking)
        return answers

    def _shadow(self, live: LoadedGallery, rollout: Rollout, old: SearchResult, asking: Asking) -> None:
        assert asking.content is not None
        size = asking.content.size()
        fits = self._held + size <= MAX_WAITING_BYTES and not self._jobs.full()
        try:
            if fits:
                ask = asking.ask._replace(encode=asking.content.kept())
                self._jobs.put_nowait(_Job(live, rollout, old, ask, size, asking.k))
                self._hold(size)
        except queue.Full:
            fits = False
        if not fits:
            with self._counters_of(live, rollout) as counters:
                counters.add(dropped=len(old.keys_QK))

    def _hold(self, size: int) -> None:
        with self._counting:
            self._held += size

    @contextmanager
    def _counters_of(self, live: LoadedGallery, rollout: Rollout) -> Iterator[Counters]:
        with self._counting:
            yield self._counters[live.id, rollout.deployment, rollout.phase]

    def _run(self) -> None:
        due = time.monotonic() + FLUSH_SECONDS
        while not self._stop.is_set():
            try:
                job = self._jobs.get(timeout=FLUSH_SECONDS)
            except queue.Empty:
                pass
            else:
                self._hold(-job.size)
                self._compare(job)
                del job  # while it waits for another one, it keeps no gallery in memory
            if time.monotonic() >= due:
                self._flush()
                due = time.monotonic() + FLUSH_SECONDS

    def _compare(self, job: _Job) -> None:
        """Answer queries by the new version too, and count how far it agrees with the old one on the same items."""
        now = job.live.rollout  # once: it may end between two looks
        if now is None or now.deployment != job.rollout.deployment:
            return
        started = time.perf_counter()
        asks, old = [(version, job.ask) for version in (job.rollout.version.name, job.old.version)], job.old
        queries = len(old.keys_QK)
        try:
            for attempt in attempts():
                with attempt:
                    (new,) = job.live.gallery.answer(asks[:1])
                    seconds = time.perf_counter() - started
                    if new.seq != old.seq:  # items came, went or moved since: both once more, from one view
                        new, old = job.live.gallery.answer(asks)
        except Exception as error:
            with self._counters_of(job.live, job.rollout) as counters:
                counters.add(new=queries)
                counters.fail(error, queries)
            return
        pair = (old.keys_QK[:, : job.k], new.keys_QK[:, : job.k])
        shares, rhos = overlap(*pair), rank_correlation(*pair)
        with self._counters_of(job.live, job.rollout) as counters:
            # Queries that nothing matches, by a filter say, agree and disagree in nothing.
            counters.add(new=queries, compared=int(np.isfinite(shares).sum()), overlap=float(np.nansum(shares)))
            counters.add(correlated=int(np.isfinite(rhos).sum()), rank_correlation=float(np.nansum(rhos)))
            counters.add(flips=first_match_flips(*pair))
            counters.took("new", seconds, queries)

    def _flush(self) -> None:
        """Add counts up in the database; what cannot be written waits for the next time."""
        with self._counting:
            waiting, self._counters = self._counters, defaultdict(Counters)
        for (gallery_id, number, phase), counters in waiting.items():
            left = counters
            try:
                with self._database.write() as connection:
                    added = add_counters(connection, number, phase, counters)
                # These counts are stored. If the canary cannot be ended now, none at all make the next time look again.
                left = Counters()
                if added is not None and phase == CANARY and (why := exceeded(*added)):
                    self._end(gallery_id, number, why)
            except Exception:
                self._errors.log(Event("trial_not_stored", deployment=number))
                with self._counting:
                    self._counters[gallery_id, number, phase] += left

    def _end(self, gallery_id: int, number: int, why: str) -> None:
        """Roll a canary back, unless somebody decided about it meanwhile."""
        with self._database.write() as connection:
            take_seq(connection, gallery_id, 0)
            row = on_its_way(connection, gallery_id)
            if row is None or (row.id, row.state) != (number, DeploymentState.CANARY):
                return
            roll_back(connection, self._registry, gallery_id, TransitionRequest(WHO, self._replica, why))
        logger.warning(Event("canary_rolled_back", deployment=number, why=why))
        self._replica.refresh(gallery_id)


def _drawn(rollout: Rollout, asking: Asking) -> bool | None:
    """Whether the queries are of the share that the new version answers; None: they take no part."""
    content = asking.content
    if content is None or asking.version is not None or rollout.version.name not in content.encoders:
        return None
    return share_of(rollout, asking.key.encode() if asking.key else content.digest()) < rollout.share


def share_of(rollout: Rollout, key: bytes) -> float:
    """Where a key lies in [0, 1), the same in every process; another deployment shuffles anew."""
    digest = hashlib.sha256(f"{rollout.deployment}:".encode() + key).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64
