"""Monitor a trial: choose the version that answers a query, compare both versions, and end a canary over a limit.

The query path only chooses and counts. Everything else (the new version's answers of a shadow, adding counts in the
database, rolling back a canary over a limit) is done after the response, on one thread with a bounded queue; queries
that do not fit are dropped and counted. Start at `TrialMonitor.answer`.
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
from index.query.query_plan import Encode, GalleryQuery
from index.query.search_result import SearchResult
from index.retry import GalleryChanged, attempts
from service.background import Background
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.registry.trial_counters import Counters, exceeded_limit
from service.registry.trial_records import CANARY, SHADOW, Trial, add_counters
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.database.connections import Database
from service.store.galleries.gallery import take_seq
from service.store.outages import RecurringFaults
from service.upgrades.deployments.history import DeploymentState, on_its_way
from service.upgrades.deployments.lifecycle import roll_back
from service.upgrades.deployments.transition import TransitionRequest

logger = logging.getLogger(__name__)

MAX_WAITING = 64
MAX_WAITING_BYTES = 64 << 20
"""Bytes of queries that may wait for their shadow."""
FLUSH_SECONDS = 0.25
"""How often counts are written to the database, if no comparison delays the thread."""

WHO = "canary"
"""The actor in the record of a rollback over a limit."""


class Content(Protocol):
    """The queries of a request, when several versions can embed them."""

    @property
    def encoders(self) -> frozenset[str]:
        """Names of these versions."""

    def digest(self) -> bytes:
        """A hash of them."""

    def size(self) -> int:
        """Bytes that `keep` needs."""

    def keep(self) -> Encode:
        """An encoder that outlives the request."""


class TrialQuery(NamedTuple):
    """Queries of a request, as a trial needs them.

    Attributes:
        version: the version that the request names, if any; then the queries take no part in a trial.
        ask: the query of the gallery.
        content: the images or texts; None: the request has embeddings, which no other version can compute.
        key: decides the version during a canary, so that a client stays on one; None: the hash of the content decides.
        k: how many matches are compared.
    """

    version: str | None
    ask: GalleryQuery
    content: Content | None
    key: str | None
    k: int


@dataclass(frozen=True)
class _ShadowJob:
    """Queries of a shadow that the new version has yet to answer."""

    loaded: LoadedGallery
    trial: Trial
    old: SearchResult
    ask: GalleryQuery
    size: int
    k: int


class TrialMonitor(Background):
    """The trials of one process."""

    def __init__(self, database: Database, registry: Registry, replica: Replica) -> None:
        super().__init__("watch")
        self._database = database
        self._registry = registry
        self._replica = replica
        self._jobs: queue.Queue[_ShadowJob] = queue.Queue(MAX_WAITING)
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._counters: dict[tuple[int, int, str], Counters] = defaultdict(Counters)
        self._errors = RecurringFaults(logger)

    def stop(self) -> None:
        """Write the counts; queries that wait for their shadow are dropped."""
        super().stop()
        self._flush()

    def answer(self, loaded: LoadedGallery, requests: Sequence[TrialQuery]) -> list[SearchResult]:
        """Answer queries by the versions that the gallery's trial chooses.

        If the new version of a canary fails, the old one answers; an error of both is raised.

        Raises:
            NoCurrentVersion: no version is deployed, and a query names none.
            GalleryChanged and others: as `Gallery.answer`.
        """
        if any(request.version is None for request in requests):
            loaded.check_current()
        if (trial := loaded.trial) is None:
            return loaded.gallery.answer([(request.version, request.ask) for request in requests])
        drawn = [_is_drawn(trial, loaded.current, request) for request in requests]
        by_new = [trial.version.name if trial.phase == CANARY and chosen else None for chosen in drawn]
        error, started = None, time.perf_counter()
        try:
            answers = loaded.gallery.answer(
                [(new or a.version, a.ask) for new, a in zip(by_new, requests, strict=True)]
            )
        except GalleryChanged:
            raise
        except Exception as raised:
            if not any(by_new):
                raise
            error = raised
            answers = loaded.gallery.answer([(request.version, request.ask) for request in requests])
        seconds = time.perf_counter() - started
        for request, chosen, new, answer in zip(requests, drawn, by_new, answers, strict=True):
            if chosen is not None:
                self._count(loaded, trial, len(answer.keys_QK), seconds, by_new=new is not None, error=error)
            if chosen and trial.phase == SHADOW:
                self._shadow(loaded, trial, answer, request)
        return answers

    def _count(
        self,
        loaded: LoadedGallery,
        trial: Trial,
        queries: int,
        seconds: float,
        *,
        by_new: bool,
        error: Exception | None,
    ) -> None:
        """Count queries that take part in a trial; `error`: of the new version, if the old one answered instead."""
        side = "new" if by_new else "old"
        with self._counters_of(loaded, trial) as counters:
            counters.add(**{side: queries})
            if by_new and error:
                counters.add_error(error, queries)
            else:
                counters.add_latency(side, seconds, queries)

    def _shadow(self, loaded: LoadedGallery, trial: Trial, old: SearchResult, request: TrialQuery) -> None:
        assert request.content is not None
        size = request.content.size()
        fits = self._waiting_bytes + size <= MAX_WAITING_BYTES and not self._jobs.full()
        try:
            if fits:
                ask = request.ask._replace(encode=request.content.keep())
                self._jobs.put_nowait(_ShadowJob(loaded, trial, old, ask, size, request.k))
                self._add_waiting(size)
        except queue.Full:
            fits = False
        if not fits:
            with self._counters_of(loaded, trial) as counters:
                counters.add(dropped=len(old.keys_QK))

    def _add_waiting(self, size: int) -> None:
        with self._lock:
            self._waiting_bytes += size

    @contextmanager
    def _counters_of(self, loaded: LoadedGallery, trial: Trial) -> Iterator[Counters]:
        with self._lock:
            yield self._counters[loaded.id, trial.deployment, trial.phase]

    def _run(self) -> None:
        due = time.monotonic() + FLUSH_SECONDS
        while not self._stop.is_set():
            try:
                job = self._jobs.get(timeout=FLUSH_SECONDS)
            except queue.Empty:
                pass
            else:
                self._add_waiting(-job.size)
                self._compare(job)
                del job  # so that waiting for the next one keeps no gallery in memory
            if time.monotonic() >= due:
                self._flush()
                due = time.monotonic() + FLUSH_SECONDS

    def _compare(self, job: _ShadowJob) -> None:
        """Answer queries by the new version too, and count how far it agrees with the old one."""
        now = job.loaded.trial  # read once: the trial may end meanwhile
        if now is None or now.deployment != job.trial.deployment:
            return
        started = time.perf_counter()
        asks, old = [(version, job.ask) for version in (job.trial.version.name, job.old.version)], job.old
        queries = len(old.keys_QK)
        try:
            for attempt in attempts():
                with attempt:
                    (new,) = job.loaded.gallery.answer(asks[:1])
                    seconds = time.perf_counter() - started
                    if new.seq != old.seq:  # items were written since: search both again, from one view
                        new, old = job.loaded.gallery.answer(asks)
        except Exception as error:
            with self._counters_of(job.loaded, job.trial) as counters:
                counters.add(new=queries)
                counters.add_error(error, queries)
            return
        pair = (old.keys_QK[:, : job.k], new.keys_QK[:, : job.k])
        shares, rhos = overlap(*pair), rank_correlation(*pair)
        with self._counters_of(job.loaded, job.trial) as counters:
            # Queries without matches, for example because of a filter, neither agree nor disagree.
            counters.add(new=queries, compared=int(np.isfinite(shares).sum()), overlap=float(np.nansum(shares)))
            counters.add(correlated=int(np.isfinite(rhos).sum()), rank_correlation=float(np.nansum(rhos)))
            counters.add(flips=first_match_flips(*pair))
            counters.add_latency("new", seconds, queries)

    def _flush(self) -> None:
        """Add the counts to those in the database; those that cannot be written are retried by the next flush."""
        with self._lock:
            waiting, self._counters = self._counters, defaultdict(Counters)
        for (gallery_id, number, phase), counters in waiting.items():
            unstored = counters
            try:
                with self._database.write() as connection:
                    added = add_counters(connection, number, phase, counters)
                # These counts are stored. If the canary cannot be ended now, empty counts make the next flush retry.
                unstored = Counters()
                if added is not None and phase == CANARY and (why := exceeded_limit(*added)):
                    self._roll_back_canary(gallery_id, number, why)
            except Exception:
                self._errors.log(Event("trial_not_stored", deployment=number))
                with self._lock:
                    self._counters[gallery_id, number, phase] += unstored

    def _roll_back_canary(self, gallery_id: int, number: int, why: str) -> None:
        """Roll a canary back, unless it was advanced or ended meanwhile."""
        with self._database.write() as connection:
            take_seq(connection, gallery_id, 0)
            row = on_its_way(connection, gallery_id)
            if row is None or (row.id, row.state) != (number, DeploymentState.CANARY):
                return
            roll_back(connection, self._registry, gallery_id, TransitionRequest(WHO, self._replica, why))
        logger.warning(Event("canary_rolled_back", deployment=number, why=why))
        self._replica.refresh(gallery_id)


def _is_drawn(trial: Trial, current: LoadedVersion | None, request: TrialQuery) -> bool | None:
    """Whether the queries belong to the share of the new version; None: they take no part in the trial.

    Only those take part that both versions can embed.
    """
    content = request.content
    if content is None or request.version is not None or current is None:
        return None
    if not {trial.version.name, current.name} <= content.encoders:
        return None
    return share_of(trial, request.key.encode() if request.key else content.digest()) < trial.share


def share_of(trial: Trial, key: bytes) -> float:
    """The position of a key in [0, 1): the same in every process, another for each deployment."""
    digest = hashlib.sha256(f"{trial.deployment}:".encode() + key).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64
