"""MEASURING A BACKFILL: its curve, taken from the live gallery by the service itself, mark after mark.

The point before the first item moves is measured in the request that starts the backfill. Every other one is
measured by a thread of whichever service process claims the mark: see what is due, read the queries that are left,
follow the feed, ask, store. What fails is noted and never disturbs a query or the backfill.
"""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from index.decoding import Decoder
from index.errors import InvalidArgument, RegraftError
from index.events import Event
from service.background import Background
from service.errors import UnknownGallery
from service.logs import RecurringErrors
from service.registry.registry import LoadedVersion, Registry
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.store.blobs import Blobs
from service.store.database import Database
from service.store.leases import Leases
from service.store.repository import take_seq
from service.upgrades.curves import points, probes
from service.upgrades.curves.points import CurveJob, CurveState, abandoned, due, last, standing
from service.upgrades.curves.probes import Chosen, CurveIn, Probes
from service.upgrades.curves.scoring import NOTHING_RIGHT, ItemLabels, Judging, RelevantItems, Worth, worth
from service.upgrades.gates.samples import UnknownEvaluation

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""How often a process looks whether a mark is due."""
ATTEMPTS = 3
"""A curve whose points fail so many times in a row is given up."""
PAUSE_SECONDS = 2.0
"""How long a mark rests after it failed; twice as long after the next failure."""


@dataclass(frozen=True)
class CurveSession:
    """What a process keeps between two marks: the queries, embedded once they are needed, and what is right."""

    asked: CurveIn
    chosen: Chosen
    judging: Judging | None
    probes: Probes | None = None


@dataclass(frozen=True)
class Begun:
    """A curve to a `version` whose first point is measured, with the gallery's feed followed to `seq`."""

    version: str
    held: CurveSession
    worth: Worth
    seq: int


@dataclass
class Trouble:
    """How often in a row a curve's points failed, and until when it rests (monotonic seconds)."""

    failures: int = 0
    rests_until: float = 0.0


class Stopping(Exception):
    """The process ends in the middle of a mark."""


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
        self._held: dict[int, CurveSession] = {}
        self._troubles: dict[int, Trouble] = {}
        # Not between two blocks of queries alone: embedding them takes longest.
        self._claims = Leases(self._renew, points.CLAIM_SECONDS)
        self._errors = RecurringErrors(logger)

    def stop(self) -> None:
        """End the thread; another process, or the next one, measures what it was measuring."""
        super().stop()
        self._claims.close()

    # A backfill that is being started

    def choose(self, connection: Connection, gallery_id: int, target: LoadedVersion, asked: CurveIn) -> CurveSession:
        """Choose the queries and read the labels.

        Raises:
            UnknownEvaluation, InvalidArgument, NoEncoder: as `begin`, as far as it can be told without embedding.
        """
        with probes.inside("/curve"):
            chosen, judging = probes.choose(connection, gallery_id, target, asked), _judging(gallery_id, asked)
            entries = probes.read(connection, gallery_id, asked, chosen)
            brought = probes.brought(connection, self._registry, gallery_id, asked, target)
            if brought is None and not target.card.text:
                target.encoder()
            if judging is not None:
                judging.follow(connection)
                if not judging.judge(Probes(entries, {}, asked.evaluation is None)).others(slice(None)).any():
                    raise InvalidArgument(NOTHING_RIGHT, pointer="/label" if asked.label else "/evaluation")
            return CurveSession(asked, chosen, judging)

    def begin(self, gallery_name: str, target: LoadedVersion, chosen: CurveSession) -> Begun:
        """Embed what `choose` chose, and measure before anything moves.

        Raises:
            UnknownEvaluation, InvalidArgument, NoEncoder: as `probes` and `scoring` do, pointing into `/curve`.
        """
        live = self._replica.find(gallery_name)
        with probes.inside("/curve"):
            held = self._ready(live, target, chosen)
            seq, found = self._ask(live, target, held)
        return Begun(target.name, held, found, seq)

    def open(self, connection: Connection, backfill_id: int, begun: Begun) -> None:
        """Note the curve of a new backfill, in the transaction that plans it."""
        asked, chosen = begun.held.asked, begun.held.chosen
        points.open_curve(connection, backfill_id, self._owner, asked, chosen, begun.worth, begun.seq)

    def keep(self, backfill_id: int, begun: Begun) -> None:
        """Go on with the queries that `begin` embedded, once the backfill is committed."""
        self._held[backfill_id] = begun.held

    # The thread

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._errors.attempt(Event("curves_not_followed"), self._look)

    def _look(self) -> None:
        known = {*self._held, *self._troubles}
        with self._database.lookup() as connection:
            jobs = standing(connection)
        for gone in known - {job.id for job in jobs}:
            self._held.pop(gone, None)
            self._troubles.pop(gone, None)
        for job in jobs:
            with suppress(UnknownGallery):  # deleted meanwhile, and the curve with it
                self._attend(job)

    def _attend(self, job: CurveJob) -> None:
        if abandoned(job):
            with self._database.write() as connection:
                points.note(connection, job, None, CurveState.STOPPED)
        elif (mark := due(job)) is not None and self._rested(job.id) and not self._stop.is_set():
            self._measure(job, mark)

    def _measure(self, job: CurveJob, mark: int) -> None:
        """One mark, unless another process has it; a failure is noted."""
        with self._database.write() as connection:
            take_seq(connection, job.gallery_id, 0)
            if not points.claim(connection, job.id, mark, self._owner):
                return
        claimed = (job.id, mark)
        self._claims.hold(claimed)
        try:
            if self._take(job, mark):
                self._troubles.pop(job.id, None)
                return
        except UnknownGallery:
            raise
        except Stopping:
            pass
        except Exception as error:
            self._fail(job, mark, error)
        finally:
            self._claims.drop(claimed)
        with self._database.write() as connection:
            points.release(connection, job.id, mark, self._owner)

    def _take(self, job: CurveJob, mark: int) -> bool:
        """Ask and store; False: the backfill went on to where this mark makes no point, or is somebody else's."""
        live, target = self._replica.get(job.gallery_id), self._registry.by_id(job.version_id)
        held = self._ready(live, target, self._held.get(job.id) or self._read(job))
        self._held[job.id] = held
        # What moves from here until the point is stored counts half.
        with self._database.lookup() as connection:
            before = next((found for found in standing(connection) if found.id == job.id), job)
        if due(before) is None or last(before, due(before)) != last(before, mark):
            return False
        seq, found = self._ask(live, target, held)
        with self._database.write() as connection:
            return points.store(connection, before, mark, self._owner, found, seq)

    def _read(self, job: CurveJob) -> CurveSession:
        """What another process chose, or this one before it was started anew."""
        asked = CurveIn(**job.asked)
        with self._database.lookup() as connection:
            return CurveSession(asked, points.chosen_of(connection, job.id), _judging(job.gallery_id, asked))

    def _ready(self, live: LoadedGallery, target: LoadedVersion, held: CurveSession) -> CurveSession:
        """The queries embedded by every version that is needed to reach the items as they are now."""
        self._replica.refresh(live.id)
        live.declare()
        needed = probes.needed(self._registry, target, live.gallery.items_by_version())
        if held.probes is not None and {version.name for version in needed} <= set(held.probes.vectors):
            return held
        with self._database.read() as connection:
            entries = probes.read(connection, live.id, held.asked, held.chosen)
            made = probes.brought(connection, self._registry, live.id, held.asked, target)
        if made is None:
            made = probes.embedded(self._blobs, self._decoder, held.asked, entries, needed)
        return replace(held, probes=made)

    def _ask(self, live: LoadedGallery, target: LoadedVersion, held: CurveSession) -> tuple[int, Worth]:
        """How far the feed was followed, and the metric by the queries that are still there."""
        assert held.probes is not None
        with self._database.read() as connection:
            entries = probes.read(connection, live.id, held.asked, held.chosen)
            if held.judging is not None:
                held.judging.follow(connection)
        self._replica.refresh(live.id)
        seq, there = live.seq, held.probes.among(entries)
        return seq, worth(live, target, there, held.asked, held.judging, self._rest, lambda: self._catch_up(held))

    def _catch_up(self, held: CurveSession) -> None:
        if held.judging is not None:
            with self._database.read() as connection:
                held.judging.catch_up(connection)

    def _renew(self, claimed: tuple[int, int]) -> None:
        with self._database.write() as connection:
            points.renew(connection, *claimed, self._owner)

    def _fail(self, job: CurveJob, mark: int, error: Exception) -> None:
        trouble = self._troubles.setdefault(job.id, Trouble())
        trouble.failures += 1
        trouble.rests_until = time.monotonic() + PAUSE_SECONDS * 2.0 ** (trouble.failures - 1)
        given_up = isinstance(error, UnknownEvaluation) or trouble.failures >= ATTEMPTS
        logger.warning(Event("curve_failed", backfill=job.id, mark=mark, given_up=given_up), exc_info=error)
        text = str(error) if isinstance(error, RegraftError) else f"{type(error).__name__}: {error}"
        with self._database.write() as connection:
            points.note(connection, job, text, CurveState.STOPPED if given_up else CurveState.MEASURING)

    def _rest(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopping

    def _rested(self, backfill_id: int) -> bool:
        trouble = self._troubles.get(backfill_id)
        return trouble is None or time.monotonic() >= trouble.rests_until


def _judging(gallery_id: int, asked: CurveIn) -> Judging | None:
    """By labels, or by what the entries of an evaluation set name; None: by the target's own ranking."""
    if not asked.labelled:
        return None
    if asked.label is not None:
        return ItemLabels(gallery_id, asked.label)
    assert asked.evaluation is not None
    return RelevantItems(gallery_id, asked.evaluation)
