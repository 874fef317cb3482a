"""Carries out the runs of a comparison: one training after the other in this process, or several side by side.

A small network leaves most of a GPU, or all but a few cores of a CPU, idle; side by side, each training has a process
of its own. A training starts as soon as the versions that it is trained with are there; if the old version that it is
measured against is not, its measurement follows in another process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from index.errors import RegraftError
from training.comparison.runs import DataCache, Run
from training.divergence import Diverged
from training.processes import require_one
from training.recipe_checks import warn_of_slow_precision

Log = Callable[[str], None]
SeedPart = tuple[int, str]
"""A seed, and a part of a family."""


def compare_methods(
    runs: Sequence[Run],
    parts: Sequence[str],
    after_each: Callable[[], None],
    log: Log = print,
    *,
    overwrite: bool = False,
    jobs: int = 1,
) -> None:
    """Train and measure what the folders of the runs lack, all parts with one seed before the next.

    Stopped at any time, it continues where it was.

    Args:
        runs: one for each seed.
        parts: of the family, references first.
        after_each: called after each part that is measured.
        log: called with a line about each training and its results.
        overwrite: replace versions that were trained with other settings.
        jobs: number of trainings side by side.

    Raises:
        InvalidArgument: there are several processes, or see `Run.is_trained` and `Run.check`; then nothing was trained.
        RegraftError: a part cannot be trained; the others that were running are stopped.
    """
    require_one("a comparison of methods")
    tasks = [Task(run, part, overwrite) for run in runs for part in parts]
    # What a setting breaks in the last part should be known before days go into the others; seeds change none of it.
    untrained = {task.part: task for task in tasks if not task.is_trained()}
    for task in untrained.values():
        task.run.check(task.part)
        warn_of_slow_precision(task.run.recipe(task.part))
    failed: set[SeedPart] = set()
    carried_out = _side_by_side(tasks, failed, jobs, log) if jobs > 1 else _one_after_another(tasks, failed, log)
    with closing(carried_out):
        for task, why in carried_out:
            if not why:
                after_each()
                continue
            failed.add(task.key)
            # They would be those of versions with other settings.
            task.run.results_file(task.part).unlink(missing_ok=True)
            log(f"seed {task.run.seed}: {task.name} has no row: {why}")


@dataclass(frozen=True)
class Task:
    """One part of one run, to train and measure."""

    run: Run
    part: str
    overwrite: bool

    @property
    def key(self) -> SeedPart:
        return self.run.seed, self.part

    @property
    def name(self) -> str:
        """Of the version."""
        return self.run.version_folder(self.part).name

    def is_ready(self, unfinished: Collection[SeedPart]) -> bool:
        """Whether its next step, to train or to measure, waits for none of these."""
        return (
            self.can_be_measured(unfinished) if self.is_trained() else not self._among(unfinished, self.run.references)
        )

    def is_trained(self) -> bool:
        """Raises as `Run.is_trained`."""
        return self.run.is_trained(self.part, self.overwrite)

    def is_done(self) -> bool:
        """Whether the version is trained and measured."""
        return self.is_trained() and self.run.is_measured(self.part)

    def why_not(self, failed: Collection[SeedPart]) -> str:
        """Why it cannot be trained, "" if it can."""
        lost = self._among(failed, self.run.needs)
        return f"{', '.join(lost)}, which it requires, could not be trained" if lost else ""

    def can_be_measured(self, unfinished: Collection[SeedPart]) -> bool:
        """Whether it can be measured as soon as it is trained."""
        return not self._among(unfinished, self.run.needs)

    def carry_out(self, cache: DataCache, log: Log, *, measure: bool = True) -> str:
        """Train, and measure if wanted; returns why it has no result, "" if it has."""
        try:
            self.run.train(self.part, cache, log, overwrite=self.overwrite)
        except Diverged as error:
            return str(error)
        if measure:
            self.run.measure(self.part, cache, log)
        return ""

    def _among(self, parts: Collection[SeedPart], needs: Callable[[str], list[str]]) -> list[str]:
        return [part for part in needs(self.part) if (self.run.seed, part) in parts]


def _one_after_another(tasks: Sequence[Task], failed: Collection[SeedPart], log: Log) -> Generator[tuple[Task, str]]:
    """Each task, and why it has no result; the caller keeps `failed`, those that have none."""
    cache = DataCache()
    for task in tasks:
        yield task, task.why_not(failed) or task.carry_out(cache, log)


def _side_by_side(
    tasks: Sequence[Task], failed: Collection[SeedPart], jobs: int, log: Log
) -> Generator[tuple[Task, str]]:
    """As `_one_after_another`, in the order in which they end. Its trainings are stopped when it is closed."""
    waiting = list(tasks)
    running: dict[Connection, _Training] = {}
    images = DataCache()  # The processes would each give its warnings.
    try:
        while waiting or running:
            unfinished = {task.key for task in (*waiting, *(training.task for training in running.values()))}
            for task in [task for task in waiting if task.is_ready(unfinished)]:
                if len(running) == jobs:
                    break
                waiting.remove(task)
                if (why := task.why_not(failed)) or task.is_done():
                    yield task, why
                else:
                    images.of(task.run.recipe(task.part))
                    training = _Training.start(task, jobs, measure=task.can_be_measured(unfinished))
                    running[training.connection] = training
            for connection in wait(list(running)) if running else ():
                assert isinstance(connection, Connection)
                if (ended := running[connection].hear(log)) is not None:
                    task = running.pop(connection).task
                    if ended or task.is_done():
                        yield task, ended
                    else:
                        waiting.insert(0, task)
    finally:
        for training in running.values():
            training.process.terminate()
        for training in running.values():
            training.process.join()


@dataclass(frozen=True)
class _Training:
    """A process that carries out a task, and the connection on which it reports."""

    task: Task
    process: BaseProcess
    connection: Connection

    @staticmethod
    def start(task: Task, jobs: int, *, measure: bool) -> _Training:
        ours, its = multiprocessing.Pipe(duplex=False)
        # CUDA does not work in a process that was forked.
        process = multiprocessing.get_context("spawn").Process(target=_carry_out, args=(task, jobs, measure, its))
        process.start()
        its.close()
        return _Training(task, process, ours)

    def hear(self, log: Log) -> str | None:
        """Take one report; returns why the task has no result once it has ended, "" if it has one.

        Raises:
            RegraftError: the part cannot be trained, or the process died.
        """
        try:
            report = self.connection.recv()
        except EOFError:
            self.process.join()
            raise RegraftError(
                f"the process that trained {self.task.name} ended with exit code {self.process.exitcode}; -9 mostly "
                "means that memory ran out: fewer --jobs take less"
            ) from None
        if isinstance(report, _Line):
            log(report.text)
            return None
        self.process.join()
        if isinstance(report, _Refused):
            raise RegraftError(report.message, pointer=report.pointer)
        assert isinstance(report, str)
        return report


@dataclass(frozen=True)
class _Line:
    """What a training says while it runs."""

    text: str


@dataclass(frozen=True)
class _Refused:
    """The error that ended it."""

    message: str
    pointer: str


def _carry_out(task: Task, jobs: int, measure: bool, connection: Connection) -> None:
    """In a process of its own: one of `jobs`, which share the cores."""
    # Ctrl-C reaches all processes of a terminal; the first one decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    try:
        connection.send(
            task.carry_out(DataCache(warn=False), lambda text: connection.send(_Line(text)), measure=measure)
        )
    except RegraftError as error:
        connection.send(_Refused(error.message, error.pointer))
    except KeyboardInterrupt:  # SIGTERM
        pass


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, however it ended; the training can be resumed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
