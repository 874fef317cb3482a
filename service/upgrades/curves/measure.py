"""Measure the curve of a backfill on the loaded gallery, mark after mark; start at `Curves`.

The point before the first item moves is measured in the request that starts the backfill. Every other point is measured
by a thread of the service process that claims the mark: find the due mark, read the queries that still exist, follow
the feed, search, store. A failure is recorded and never disturbs queries or the backfill.
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from index.encoders.decoding import Decoder
from index.errors import InvalidArgument, RegraftError
from index.events import Event
from service.background import Background
from service.errors import UnknownGallery
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.database.connections import Database
from service.store.galleries.gallery import take_seq
from service.store.image_store.blobs import Blobs
from service.store.leases.heartbeats import Leases
from service.store.outages import RecurringFaults
from service.upgrades.curves import points, probes
from service.upgrades.curves.points import CurveJob, CurveState, abandoned, due_mark, is_last, measuring_jobs
from service.upgrades.curves.probes import ChosenQueries, CurveIn, Probes
from service.upgrades.curves.scoring import (
    NOTHING_RELEVANT,
    GroundTruth,
    ItemLabels,
    Measurement,
    RelevantItems,
    measure,
)
from service.upgrades.gates.samples import UnknownEvaluation

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
"""How often a process checks whether a mark is due."""
ATTEMPTS = 3
"""A curve is given up after this many failures in a row."""
PAUSE_SECONDS = 2.0
"""Pause before a retry after a failure; doubled by each further failure in a row."""


@dataclass(frozen=True)
class CurveSession:
    """A process's state between two marks: the queries, embedded on first use (`probes`), and the ground truth."""

    request: CurveIn
    chosen: ChosenQueries
    ground_truth: GroundTruth | None
    probes: Probes | None = None


@dataclass(frozen=True)
class StartedCurve:
    """A new curve of a backfill to `version`, with its first point, measured at number `seq` of the gallery's feed."""

    version: str
    session: CurveSession
    measure: Measurement
    seq: int


@dataclass
class Backoff:
    """Failures in a row of a curve's points, and the time of the next attempt (monotonic seconds)."""

    failures: int = 0
    until: float = 0.0


class Stopped(Exception):
    """The process stops while a mark is being measured."""


class Curves(Background):
    """The curves of one process."""

    def __init__(
        self, database: Database, registry: Registry, replica: Replica, blobs: Blobs, decoder: Decoder
    ) -> None:
        super().__init__("curves")
        self._database = database
        self._registry = registry
        self._replica = replica
        self._blobs = blobs
        self._decoder = decoder
        self._owner = uuid.uuid4().hex
        self._sessions: dict[int, CurveSession] = {}
        self._backoffs: dict[int, Backoff] = {}
        # Renewed on a thread, not only between two blocks of queries: embedding them takes longest.
        self._claims = Leases(self._renew, points.CLAIM_SECONDS)
        self._errors = RecurringFaults(logger)

    def stop(self) -> None:
        """End the thread; another process, or this one after a restart, measures the unfinished mark."""
        super().stop()
        self._claims.close()

    # A backfill that is being started

    def choose(self, connection: Connection, gallery_id: int, target: LoadedVersion, request: CurveIn) -> CurveSession:
        """Choose the queries and read the labels.

        Raises:
            UnknownEvaluation, InvalidArgument, NoEncoder: as `begin`, if detectable without embedding.
        """
        with probes.errors_within("/curve"):
            chosen = probes.choose(connection, gallery_id, target, request)
            ground_truth = _ground_truth(gallery_id, request)
            entries = probes.read(connection, gallery_id, request, chosen)
            uploaded = probes.uploaded(connection, self._registry, gallery_id, request, target)
            if uploaded is None and not target.card.text:
                target.encoder()
            if ground_truth is not None:
                ground_truth.follow(connection)
                relevance = ground_truth.relevance(Probes(entries, {}, request.evaluation is None))
                if not relevance.others(slice(None)).any():
                    raise InvalidArgument(NOTHING_RELEVANT, pointer="/label" if request.label else "/evaluation")
            return CurveSession(request, chosen, ground_truth)

    def begin(self, gallery_name: str, target: LoadedVersion, chosen: CurveSession) -> StartedCurve:
        """Embed the chosen queries and measure the first point, before any item moves.

        Raises:
            UnknownEvaluation, InvalidArgument, NoEncoder: from `probes` and `scoring`, with pointers below `/curve`.
        """
        loaded = self._replica.find(gallery_name)
        with probes.errors_within("/curve"):
            session = self._ready(loaded, target, chosen)
            seq, found = self._query(loaded, target, session)
        return StartedCurve(target.name, session, found, seq)

    def open(self, connection: Connection, backfill_id: int, started: StartedCurve) -> None:
        """Store the curve of a new backfill, in the transaction that plans it."""
        request, chosen = started.session.request, started.session.chosen
        points.open_curve(connection, backfill_id, self._owner, request, chosen, started.measure, started.seq)

    def keep(self, backfill_id: int, started: StartedCurve) -> None:
        """Keep the queries that `begin` embedded for the next marks, once the backfill is committed."""
        self._sessions[backfill_id] = started.session

    # The thread

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._errors.attempt(Event("curves_not_followed"), self._follow)

    def _follow(self) -> None:
        remembered = {*self._sessions, *self._backoffs}
        with self._database.lookup() as connection:
            jobs = measuring_jobs(connection)
        for ended in remembered - {job.id for job in jobs}:
            self._sessions.pop(ended, None)
            self._backoffs.pop(ended, None)
        for job in jobs:
            with suppress(UnknownGallery):  # deleted meanwhile, and the curve with it
                self._advance(job)

    def _advance(self, job: CurveJob) -> None:
        if abandoned(job):
            with self._database.write() as connection:
                points.set_state(connection, job, None, CurveState.STOPPED)
        elif (mark := due_mark(job)) is not None and self._may_retry(job.id) and not self._stop.is_set():
            self._measure(job, mark)

    def _measure(self, job: CurveJob, mark: int) -> None:
        """Measure one mark, unless another process has claimed it; a failure is recorded."""
        with self._database.write() as connection:
            take_seq(connection, job.gallery_id, 0)
            if not points.claim(connection, job.id, mark, self._owner):
                return
        claimed = (job.id, mark)
        self._claims.hold(claimed)
        try:
            if self._measure_mark(job, mark):
                self._backoffs.pop(job.id, None)
                return
        except UnknownGallery:
            raise
        except Stopped:
            pass
        except Exception as error:
            self._fail(job, mark, error)
        finally:
            self._claims.drop(claimed)
        with self._database.write() as connection:
            points.release(connection, job.id, mark, self._owner)

    def _measure_mark(self, job: CurveJob, mark: int) -> bool:
        """Search and store; False: the backfill moved past this mark, or another process took the mark over."""
        loaded, target = self._replica.get(job.gallery_id), self._registry.by_id(job.version_id)
        session = self._ready(loaded, target, self._sessions.get(job.id) or self._read(job))
        self._sessions[job.id] = session
        # Items that move from here until the point is stored count half.
        with self._database.lookup() as connection:
            before = next((found for found in measuring_jobs(connection) if found.id == job.id), job)
        if due_mark(before) is None or is_last(before, due_mark(before)) != is_last(before, mark):
            return False
        seq, found = self._query(loaded, target, session)
        with self._database.write() as connection:
            return points.store(connection, before, mark, self._owner, found, seq)

    def _read(self, job: CurveJob) -> CurveSession:
        """The session of a curve that another process, or this one before a restart, began."""
        request = CurveIn(**job.asked)
        with self._database.lookup() as connection:
            return CurveSession(request, points.chosen_of(connection, job.id), _ground_truth(job.gallery_id, request))

    def _ready(self, loaded: LoadedGallery, target: LoadedVersion, session: CurveSession) -> CurveSession:
        """The session with queries embedded by every version that is needed to reach the current items."""
        self._replica.refresh(loaded.id)
        loaded.declare()
        needed = probes.needed_versions(self._registry, target, loaded.gallery.items_by_version())
        if session.probes is not None and {version.name for version in needed} <= set(session.probes.vectors):
            return session
        with self._database.read() as connection:
            entries = probes.read(connection, loaded.id, session.request, session.chosen)
            embedded_probes = probes.uploaded(connection, self._registry, loaded.id, session.request, target)
        if embedded_probes is None:
            embedded_probes = probes.embed_queries(self._blobs, self._decoder, session.request, entries, needed)
        return replace(session, probes=embedded_probes)

    def _query(self, loaded: LoadedGallery, target: LoadedVersion, session: CurveSession) -> tuple[int, Measurement]:
        """The feed number of the measurement, and the metric over the queries that still exist."""
        assert session.probes is not None
        with self._database.read() as connection:
            entries = probes.read(connection, loaded.id, session.request, session.chosen)
            if session.ground_truth is not None:
                session.ground_truth.follow(connection)
        self._replica.refresh(loaded.id)
        seq, existing = loaded.seq, session.probes.restricted_to(entries)
        return seq, measure(
            loaded,
            target,
            existing,
            session.request,
            session.ground_truth,
            self._pause,
            lambda: self._catch_up(session),
        )

    def _catch_up(self, session: CurveSession) -> None:
        if session.ground_truth is not None:
            with self._database.read() as connection:
                session.ground_truth.catch_up(connection)

    def _renew(self, claimed: tuple[int, int]) -> None:
        with self._database.write() as connection:
            points.renew(connection, *claimed, self._owner)

    def _fail(self, job: CurveJob, mark: int, error: Exception) -> None:
        backoff = self._backoffs.setdefault(job.id, Backoff())
        backoff.failures += 1
        backoff.until = time.monotonic() + PAUSE_SECONDS * 2.0 ** (backoff.failures - 1)
        given_up = isinstance(error, UnknownEvaluation) or backoff.failures >= ATTEMPTS
        self._errors.log(Event("curve_failed", backfill=job.id, mark=mark, given_up=given_up))
        text = str(error) if isinstance(error, RegraftError) else f"{type(error).__name__}: {error}"
        with self._database.write() as connection:
            points.set_state(connection, job, text, CurveState.STOPPED if given_up else CurveState.MEASURING)

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped

    def _may_retry(self, backfill_id: int) -> bool:
        backoff = self._backoffs.get(backfill_id)
        return backoff is None or time.monotonic() >= backoff.until


def _ground_truth(gallery_id: int, request: CurveIn) -> GroundTruth | None:
    """By labels or by the items that an evaluation set names; None: the target's own ranking is the ground truth."""
    if not request.labelled:
        return None
    if request.label is not None:
        return ItemLabels(gallery_id, request.label)
    assert request.evaluation is not None
    return RelevantItems(gallery_id, request.evaluation)
