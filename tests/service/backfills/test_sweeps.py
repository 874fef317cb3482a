"""Planning in short transactions: whatever happens between two of them, nothing is lost or planned twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from service.backfills import attempts, sweeps
from service.backfills.scores import NO_SCORES
from service.backfills.states import ACTIVE, BackfillState, change_state
from service.backfills.sweeps import begin_next_sweep, continue_sweep
from service.store.galleries import ranges
from service.store.galleries.gallery import take_seq
from service.store.galleries.items import delete_items
from service.store.rows import BackfillRow
from service.store.tables import backfill_chunk
from staging.states.plans import ORDER, V2, Planning, flat

ITEMS, CHUNK = 11, 2
RUNNING, PAUSED = BackfillState.RUNNING, BackfillState.PAUSED
OPERATIONS = ("nothing", "add", "rewrite", "strip", "delete", "kill", "pause", "overtake", "cancel")
"""What happens between two transactions of a planner; `strip`: written anew, without an image."""


class Killed(BaseException):
    """The planner's process ends here."""


class Life:
    """A backfill that is planned while things happen, and what its gallery holds, known without SQL."""

    def __init__(self, stage: Planning, order: str, happening: list[tuple[str, int]]) -> None:
        self.stage, self.happening = stage, iter(happening)
        self.busy = True
        self.gallery = stage.gallery(ITEMS)
        self.names = [f"i{n}" for n in range(ITEMS)]
        self.waiting = dict.fromkeys(self.names, 0)
        """Items that are to be moved, and the number of the feed when they were written."""
        self.added: dict[str, int] = {}
        self.cancelled: list[str] | None = None
        """What was planned when the backfill was cancelled."""
        self.sweep = 0
        self.lives: int | None = None
        """Transactions that an overtaking process has before it is killed."""
        self.job = stage.start(self.gallery, item_order=order, chunk_size=CHUNK, planned=False)

    # What happens

    @contextmanager
    def door(self, real: Callable[..., Any], **given: Any) -> Iterator[Any]:
        """A transaction of the planner, and what happens behind it; a kill may come before its commit."""
        what, which = ("nothing", 0) if self.busy else next(self.happening, ("nothing", 0))
        if self.lives is not None:
            self.lives -= 1
            if self.lives < 0:
                raise Killed
        with real(**given) as connection:
            yield connection
            if what == "kill" and which % 2:
                raise Killed
        if not self.busy and what != "nothing":
            self.busy = True
            try:
                getattr(self, what)(which)
            finally:
                self.busy = False

    def kill(self, _: int) -> None:
        raise Killed

    def add(self, _: int) -> None:
        self.names.append(f"i{len(self.names)}")
        self.store(self.names[-1], "b")
        self.added[self.names[-1]] = self.feed() - 1

    def rewrite(self, which: int) -> None:
        self.store(self.names[which % len(self.names)], "b")

    def strip(self, which: int) -> None:
        self.store(self.names[which % len(self.names)], None)

    def store(self, name: str, blob: str | None) -> None:
        self.stage.store(self.gallery, [name], blob=blob)
        self.waiting.pop(name, None)
        if blob:
            self.waiting[name] = self.feed() - 1

    def delete(self, which: int) -> None:
        name = self.names[which % len(self.names)]
        with self.stage.database.write() as connection:
            if not self.stage.items(self.gallery)[name].deleted:
                delete_items(connection, self.gallery, [name])
        self.waiting.pop(name, None)

    def pause(self, _: int) -> None:
        with self.stage.database.write() as connection:
            change_state(connection, self.job, (RUNNING,), PAUSED)

    def cancel(self, which: int) -> None:
        if which % 3 == 0 and self.cancelled is None:
            with self.stage.database.write() as connection:
                change_state(connection, self.job, ACTIVE, BackfillState.CANCELLED)
            self.cancelled = self.open()

    def overtake(self, which: int) -> None:
        """Another process goes on with the sweep for a while; the planner was frozen, and wakes up later."""
        row = self.row()
        if row.sweep_seq is not None and row.state == RUNNING:
            self.lives = which
            with suppress(Killed):
                continue_sweep(self.stage.database, row, ORDER, lambda: NO_SCORES)
            self.lives = None

    # The planner, and the worker

    def plan(self) -> None:
        """Until the sweep is through, or the backfill cancelled."""
        while (row := self.row()).sweep_seq is not None and row.state in ACTIVE:
            self.sweep = row.sweep_seq
            with self.stage.database.write() as connection:
                change_state(connection, self.job, (PAUSED,), RUNNING)
            self.busy = False
            with suppress(Killed):
                continue_sweep(self.stage.database, row, ORDER, lambda: NO_SCORES)
            self.busy = True
            self.check_planned()

    def work(self) -> None:
        with self.stage.database.write() as connection:
            change_state(connection, self.job, (PAUSED,), RUNNING)
        while chunk := self.stage.claim():
            seen = self.stage.read(chunk)
            self.stage.commit(chunk, seen)
            names = {row.id: name for name, row in self.stage.items(self.gallery).items()}
            for key, _ in seen:
                del self.waiting[names[key]]

    def row(self) -> BackfillRow:
        return BackfillRow(*self.stage.row(self.job))

    def feed(self) -> int:
        with self.stage.database.write() as connection:
            return take_seq(connection, self.gallery, 0)

    def open(self) -> list[str]:
        names = {row.id: name for name, row in self.stage.items(self.gallery).items()}
        with self.stage.database.lookup() as connection:
            left = (backfill_chunk.c.backfill_id == self.job, backfill_chunk.c.state == "todo")
            cut = connection.execute(select(backfill_chunk.c.item_ids).where(*left)).scalars()
            return [names[key] for keys in cut for key in keys]

    def check_planned(self) -> None:
        planned, row = self.open(), self.row()
        assert len(planned) == len(set(planned)), "planned twice"
        assert row.total == row.settled + len(planned)
        if row.sweep_seq is None and row.state in ACTIVE:
            lost = {name for name, seq in self.waiting.items() if seq < self.sweep} - set(planned)
            assert not lost, "a sweep lost items that waited when it began"
            assert not {name for name, seq in self.added.items() if seq >= self.sweep} & set(planned)
        if row.state == BackfillState.DONE:
            assert not self.waiting


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges and blocks of a few items."""
    for module in (ranges, sweeps):
        monkeypatch.setattr(module, "KEYS_PER_RANGE", 2 * CHUNK)
    monkeypatch.setattr(attempts, "BLOCK", 2)


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_backfill_is_planned_whatever_happens_between_its_transactions(
    stage: Planning, short: None, examples: int
) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(
        order=st.sampled_from(["oldest", "newest", "random", "traffic"]),
        happening=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 20)), min_size=10, max_size=25),
    )
    def lived(order: str, happening: list[tuple[str, int]]) -> None:
        live(stage, order, happening)

    lived()


def live(stage: Planning, order: str, happening: list[tuple[str, int]]) -> None:
    life = Life(stage, order, happening)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "write"):
            real = getattr(stage.database, name)
            patch.setattr(stage.database, name, partial(life.door, real))
        while life.row().state in ACTIVE:
            life.plan()
            life.work()
            with stage.database.write() as connection:
                begin_next_sweep(connection, life.job)

    row = life.row()
    if life.cancelled is not None:
        assert life.open() == life.cancelled
        return
    assert row.state == BackfillState.DONE
    assert life.waiting == {}
    assert row.total == row.settled
    moved = set(stage.origins(life.gallery, V2))
    assert moved == {name for name, i in stage.items(life.gallery).items() if i.blob and not i.deleted}


@pytest.mark.parametrize(
    ("order", "what"), [("oldest", "kill"), ("newest", "kill"), ("random", "kill"), ("oldest", "pause")]
)
def test_a_sweep_that_ends_after_any_transaction_and_goes_on_plans_what_an_undisturbed_one_does(
    stage: Planning, short: None, monkeypatch: pytest.MonkeyPatch, order: str, what: str
) -> None:
    def planned(lives: int) -> tuple[list[str], BackfillRow]:
        """By the second sweep, in which items are new, and one that was given up is written anew."""
        gallery = stage.gallery(1)
        number = stage.start(gallery, item_order=order, chunk_size=CHUNK)
        only = stage.claim()
        stage.commit(only, [], stage.read(only))
        stage.store(gallery, ["i0", "new0", "new1", "new2", "new3"])
        with stage.database.write() as connection:
            job = begin_next_sweep(connection, number)
        real, ahead = stage.database.write, iter(["nothing"] * lives + [what])

        @contextmanager
        def write() -> Iterator[Any]:
            with real() as connection:
                yield connection
            match next(ahead, "nothing"):
                case "kill":
                    raise Killed
                case "pause":
                    stage.set_state(number, PAUSED)

        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            patch.setattr(stage.database, "write", write)
            continue_sweep(stage.database, job, ORDER, lambda: NO_SCORES)
        stage.set_state(number, RUNNING)
        if (row := BackfillRow(*stage.row(number))).sweep_seq is not None:
            continue_sweep(stage.database, row, ORDER, lambda: NO_SCORES)
        planned = flat(stage.planned(number))[1:]
        return sorted(planned) if order == "random" else planned, BackfillRow(*stage.row(number))

    monkeypatch.setattr(sweeps, "CHUNKS", 1)
    undisturbed, _ = planned(lives=100)
    assert sorted(undisturbed) == ["i0", "new0", "new1", "new2", "new3"]
    for lives in range(5):
        again, row = planned(lives)
        assert again == undisturbed
        assert (row.total, row.failed) == (5, 0)


@pytest.mark.parametrize(
    ("written", "fields", "left"),
    [
        ({}, {}, True),
        ({"blob": None}, {}, False),
        ({}, {"item_limit": 2}, False),
        ({}, {"filter": {"field": "a", "eq": 1}}, False),
        ({"metadata": {"a": 1}}, {"filter": {"field": "a", "eq": 1}}, True),
    ],
)
def test_what_is_written_while_a_sweep_finds_nothing_is_left_to_another_one(
    stage: Planning, written: dict[str, Any], fields: dict[str, Any], left: bool
) -> None:
    gallery = stage.gallery(2, metadata={"a": 1})
    number = stage.start(gallery, **fields)
    first = stage.claim()
    stage.commit(first, stage.read(first))
    with stage.database.write() as connection:
        job = begin_next_sweep(connection, number)
    stage.store(gallery, ["new"], **written)

    ended = continue_sweep(stage.database, job, ORDER, lambda: NO_SCORES)

    assert ended is (None if left else BackfillState.DONE)
    with stage.database.lookup() as connection:
        waiting = sweeps.abandoned_sweeps(connection)
    assert [row.id for row in waiting] == [number] * left
    for row in waiting:
        assert continue_sweep(stage.database, row, ORDER, lambda: NO_SCORES) is RUNNING
        assert stage.planned(number)[-1] == ["new"]


def test_a_backfill_that_was_paused_while_it_is_planned_goes_on_at_once(stage: Planning) -> None:
    number = stage.start(stage.gallery(ITEMS), planned=False)
    with stage.database.write() as connection:
        assert change_state(connection, number, (RUNNING,), PAUSED)
        assert change_state(connection, number, (PAUSED,), RUNNING)

        assert [row.id for row in sweeps.abandoned_sweeps(connection) if row.id == number] == [number]


def test_resumed_while_it_is_planned_it_counts_from_the_end_of_planning(stage: Planning) -> None:
    number = stage.start(stage.gallery(ITEMS), planned=False)
    with stage.database.write() as connection:
        assert change_state(connection, number, (RUNNING,), PAUSED)
        assert change_state(connection, number, (PAUSED,), RUNNING)
    assert stage.row(number).resumed is None

    continue_sweep(stage.database, BackfillRow(*stage.row(number)), ORDER, lambda: NO_SCORES)

    assert stage.row(number).resumed is not None


def test_watchers_are_told_when_planning_begins_and_ends(stage: Planning, monkeypatch: pytest.MonkeyPatch) -> None:
    number = stage.start(stage.gallery(ITEMS), planned=False)
    real, seen = stage.database.write, set()

    @contextmanager
    def watched() -> Iterator[Any]:
        with real() as connection:
            yield connection
        row = stage.row(number)
        seen.add((row.revision, row.sweep_seq is not None))

    monkeypatch.setattr(stage.database, "write", watched)
    continue_sweep(stage.database, BackfillRow(*stage.row(number)), ORDER, lambda: NO_SCORES)
    while chunk := stage.claim():
        stage.commit(chunk, stage.read(chunk))
    assert stage.finish(number) is BackfillState.DONE

    assert len({revision for revision, _ in seen}) == len(seen)
