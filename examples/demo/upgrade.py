"""The upgrade of one gallery over HTTP: v1, the new version over old items, a backfill under traffic, a rollback."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from examples.demo.measure import Answer, ask, measure, same_answers, stored_ids
from examples.demo.pictures import Pictures
from examples.demo.processes import Processes
from examples.demo.traffic import MOST_VISITORS, Counts, Traffic
from index.evaluation.metrics import Retrieval
from regraft import Client
from regraft.client import Json
from regraft.models import GateReport
from regraft.routes.backfills import CurveOptions

OLD = "v1"
STEP = 0.05
INGEST_BATCH = 100
TOP = 5
KILL_AT = 0.5
COMPARED = 100
"""Number of queries whose whole rankings are compared after a rollback; all would take much longer."""
POLL_SECONDS = 0.03


@dataclass(frozen=True)
class Way:
    """A compatible method: the version trained by it, and the edge from it to v1's items."""

    name: str
    version: str
    edge: str


@dataclass(frozen=True)
class Stage:
    """The parts that every step needs."""

    processes: Processes
    client: Client
    pictures: Pictures
    examples: Path
    console: Console
    index: Json = field(default_factory=dict)
    """The index configuration of galleries."""

    def ask(self, gallery: str, queries: int | None = None) -> Answer:
        """The whole ranking for all query images, or the first `queries`: one consistent answer."""
        return ask(self.client, gallery, self.pictures.queries[:queries], self.client.gallery(gallery).items)

    def measure(self, answer: Answer) -> Retrieval:
        """The answer's metrics."""
        return measure(answer, self.pictures)


@dataclass(frozen=True)
class Point:
    """CMC@1 and CMC@5 over the permanent items after a share of them was moved; and CMC@1 over all items."""

    moved: float
    cmc1: float
    cmc5: float
    cmc1_of_all: float


@dataclass
class Upgrade:
    """The results of one gallery's upgrade."""

    way: Way
    old_old: Retrieval
    new_old: Retrieval
    new_new: Retrieval
    at_deploy: Retrieval
    gate: Json
    curve: list[Point]
    live: Json
    routes: dict[str, list[str]]
    rollback: Json
    kill: Json | None
    counts: Counts = field(default_factory=Counts)
    lost: set[str] = field(default_factory=set)
    resurrected: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    found: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """Stage -> the first items of each query."""


def upgrade(stage: Stage, way: Way, *, kill: bool) -> Upgrade:
    """Measure old/old, new/old and new/new in a new gallery; `kill`: kill service and worker half-way."""
    seconds: dict[str, float] = {}
    with timed(seconds, "ingest"):
        fill(stage, way.name)
    old_old = stage.ask(way.name)
    with timed(seconds, "gate"):
        gate = stage.client.gate(way.name, way.version, "digit", sample=len(stage.pictures.items))
    with timed(seconds, "deploy"):
        stage.client.deploy(way.name, way.version, gate=gate.id)
    at_deploy = stage.ask(way.name)

    # With a forward edge items move twice: transformed from stored embeddings, then encoded again from images.
    acts = [Act(stage, way, kind) for kind in (["transform"] if way.edge == "forward" else []) + ["reencode"]]
    curve, killed, transformed = acts[0].run_watched(seconds, at_deploy, kill=kill)
    new_old, new_new = (transformed, acts[1].run(seconds)) if len(acts) > 1 else (at_deploy, transformed)

    counts = Counts()
    for act in acts:
        counts.add(act.traffic.counts)
    return Upgrade(
        way=way,
        old_old=stage.measure(old_old),
        new_old=stage.measure(new_old),
        new_new=stage.measure(new_new),
        at_deploy=stage.measure(at_deploy),
        gate=gate.model_dump(),
        curve=curve,
        live=acts[0].live,
        routes={
            "at_deploy": sorted(at_deploy.routes),
            "new_old": sorted(new_old.routes),
            "new_new": sorted(new_new.routes),
        },
        rollback=back_and_forth(stage, way, gate, old_old, new_new, seconds),
        kill=killed,
        counts=counts,
        lost=set().union(*(act.lost for act in acts)),
        resurrected=set().union(*(act.resurrected for act in acts)),
        seconds=seconds,
        found={
            stage: [ids[:TOP] for ids in answer.ids]
            for stage, answer in (("before", old_old), ("at_deploy", at_deploy), ("after", new_new))
        },
    )


def fill(stage: Stage, gallery: str) -> None:
    """Create a gallery, deploy v1 and ingest every image file."""
    stage.client.create_gallery(gallery, index=stage.index)
    stage.client.deploy(gallery, OLD)
    items = stage.pictures.items
    with bar(stage.console) as progress:
        task = progress.add_task(f"{gallery}: ingest", total=len(items))
        for start in range(0, len(items), INGEST_BATCH):
            batch = items[start : start + INGEST_BATCH]
            stage.client.ingest(gallery, batch, atomic=True)
            progress.advance(task, len(batch))


class Act:
    """One backfill under the traffic of two clients, whose records are then compared with the service."""

    def __init__(self, stage: Stage, way: Way, kind: str) -> None:
        self.stage, self.way, self.kind = stage, way, kind
        self.traffic = Traffic(stage.processes.client, way.name, stage.pictures)
        self.lost: set[str] = set()
        self.resurrected: set[str] = set()
        self.live: Json = {}
        """The curve that the service measured."""

    def run(self, seconds: dict[str, float]) -> Answer:
        """Backfill at full speed; returns the answer afterwards."""
        with self.traffic, timed(seconds, self.kind):
            for _ in self._backfill(None):
                pass
        self._audit()
        return self.stage.ask(self.way.name)

    def run_watched(
        self, seconds: dict[str, float], before: Answer, *, kill: bool
    ) -> tuple[list[Point], Json | None, Answer]:
        """Backfill so slowly that the metric can be measured at every step.

        Args:
            seconds: the duration is added here.
            before: the answer before the backfill.
            kill: kill service and worker (SIGKILL) half-way.

        Returns:
            The curve, the effect of the kill, and the answer afterwards.
        """
        curve, killed, mark = [self._point(0.0, before)], None, STEP
        with self.traffic, timed(seconds, self.kind):
            for backfill, moved in self._backfill(self._rate(), self._evaluation()):
                if kill and killed is None and moved >= KILL_AT:
                    killed = self._kill(backfill, moved)
                if mark <= moved < 1:
                    answer = self._ask_top()
                    curve.append(self._point(self._moved(answer.mix), answer))
                    mark = STEP * (math.floor(curve[-1].moved / STEP) + 1)
            for _ in self.stage.client.watch_curve(backfill):
                pass  # wait for its last point, after the end of the backfill
            shown = self.stage.client.backfill(backfill).curve
            self.live = {} if shown is None else shown.model_dump()
        self._audit()
        after = self.stage.ask(self.way.name)
        return [*curve, self._point(1.0, after)], killed, after

    def _evaluation(self) -> int:
        """Add the query images as an evaluation set, so that the service measures with the same queries."""
        entries = [{"label": int(digit)} for digit in self.stage.pictures.query_digits]
        queries = self.stage.pictures.queries
        return int(self.stage.client.add_evaluation(self.way.name, entries, images=queries).id or 0)

    def _backfill(self, rate: float | None, evaluation: int | None = None) -> Iterator[tuple[int, float]]:
        """Start a backfill; yields its number and the share of items moved repeatedly until it ends.

        With an evaluation set the service measures the curve, too.
        """
        client, name = self.stage.client, self.way.name
        chunk_size = max(1, round(len(self.stage.pictures.items) * STEP / 4))
        curve: CurveOptions | None = None
        if evaluation is not None:
            curve = {"evaluation": evaluation, "label": "digit", "metric": "cmc@1", "marks": round(1 / STEP)}
        backfill = client.start_backfill(name, kind=self.kind, chunk_size=chunk_size, rate=rate, curve=curve).id
        with bar(self.stage.console) as progress:
            task = progress.add_task(f"{name}: {self.kind} to {self.way.version}", total=1.0)
            while client.backfill(backfill).state == "running":
                self.stage.processes.check()
                moved = self._moved(client.gallery(name).mix)
                progress.update(task, completed=moved)
                yield backfill, moved
                time.sleep(POLL_SECONDS)
            progress.update(task, completed=1.0)

    def _rate(self) -> float:
        """Items per second at which this machine has time for one measurement per step."""
        begun = time.perf_counter()
        self._ask_top()
        seconds = 2.2 * (time.perf_counter() - begun) + 0.15
        # An external engine stores the moved items meanwhile, which slows its answers down.
        return len(self.stage.pictures.items) * STEP / (2 * seconds if self.stage.index else seconds)

    def _kill(self, backfill: int, moved: float) -> Json:
        """Kill both with SIGKILL, restart them, and check that the backfill lost no progress."""
        before = self.stage.client.backfill(backfill)
        begun = time.perf_counter()
        with self.traffic.outage.held():
            self.stage.processes.kill()
            self.stage.processes.start()
        down = time.perf_counter() - begun
        after = self.stage.client.backfill(backfill)
        self.stage.console.print(f"  kill -9 of service and worker at {moved:.0%}; back after {down:.1f} s, going on")
        return {"moved": moved, "done_before": before.done, "done_after": after.done, "seconds_down": down}

    def _ask_top(self) -> Answer:
        k = TOP + MOST_VISITORS  # so that 5 permanent items are among them
        return ask(self.stage.client, self.way.name, self.stage.pictures.queries, k)

    def _point(self, moved: float, answer: Answer) -> Point:
        measured = self.stage.measure(answer)
        of_all = float(np.mean(np.asarray(answer.firsts) == self.stage.pictures.query_digits))
        return Point(moved, measured.cmc(1), measured.cmc(TOP), of_all)

    def _moved(self, mix: Mapping[str, int]) -> float:
        """Share of the permanent items in the new version; items ingested now are all in it."""
        stay = len(self.stage.pictures.items)
        return max(0, mix.get(self.way.version, 0) - (sum(mix.values()) - stay)) / stay

    def _audit(self) -> None:
        """Compare the acknowledged writes with the stored items, then delete the temporary ones."""
        client, gallery, ledger = self.stage.client, self.way.name, self.traffic.ledger
        stay = {item.id for item in self.stage.pictures.items}
        expected, listed = stay | set(ledger.present()), stored_ids(client, gallery)
        found = self._searchable()
        self.lost |= (expected - listed) | (expected - found) | self.traffic.counts.missed_on_deletion
        self.resurrected |= (listed - expected) | (found - expected) | self.traffic.counts.deleted_seen
        if visitors := ledger.present():
            client.delete_items(gallery, visitors)
        self.resurrected |= stored_ids(client, gallery) - stay

    def _searchable(self) -> set[str]:
        client, gallery = self.stage.client, self.way.name
        answer = ask(client, gallery, self.stage.pictures.queries[:1], client.gallery(gallery).items)
        return set(answer.ids[0])


def back_and_forth(
    stage: Stage, way: Way, gate: GateReport, old_old: Answer, new_new: Answer, seconds: dict[str, float]
) -> Json:
    """Roll back in one call and deploy again; both must give the same items and scores as before."""
    with timed(seconds, "rollback"):
        back = stage.client.rollback(way.name, "demo")
    old_again = stage.ask(way.name, COMPARED)
    with timed(seconds, "forward"):
        forth = stage.client.deploy(way.name, way.version, gate=gate.id)
    new_again = stage.ask(way.name, COMPARED)
    return {
        "answers_equal_old_old": same_answers(old_again, old_old.first(COMPARED)),
        "forward_answers_equal_new_new": same_answers(new_again, new_new.first(COMPARED)),
        "whole_rankings_compared": len(old_again.ids),
        "items_back": back.activated,
        "items_forward": forth.activated,
    }


def undisturbed(stage: Stage, way: Way, gallery: str) -> None:
    """The same upgrade without traffic and kill, for the state that the killed one must reach."""
    fill(stage, gallery)
    stage.client.deploy(gallery, way.version)
    started = stage.client.start_backfill(gallery)
    while stage.client.backfill(started.id).state == "running":
        stage.processes.check()
        time.sleep(POLL_SECONDS)


def bar(console: Console) -> Progress:
    """A progress bar; without a terminal only its final state is printed."""
    return Progress(TextColumn("  {task.description}"), BarColumn(), TaskProgressColumn(), console=console)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Record the seconds of the block."""
    begun = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begun
