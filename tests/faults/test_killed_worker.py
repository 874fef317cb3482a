"""kill -9 of real workers at every point of a chunk: it ends in the same state as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from regraft.commands.processes import NICENESS
from service.backfills import sweeps
from staging.waiting import until

V1, V2 = 1, 2


IMAGES, TEXTS = ("g", "h"), ("s", "t")


@pytest.mark.parametrize(
    ("point", "names"),
    [(point, IMAGES) for point in ("claimed", "computed", "written", "committed")] + [("computed", TEXTS)],
)
def test_a_worker_killed_at_any_point_of_a_chunk_changes_nothing_of_the_end(
    site: Any, point: str, names: tuple[str, str]
) -> None:
    killed, undisturbed = (site.start_backfill(name) for name in names)

    doomed = site.doomed_worker(point)
    assert doomed.wait(30) == -signal.SIGKILL
    between = sum(site.mix(name).get(V2, 0) for name in names)
    site.work()

    # Chunks are committed one by one behind the one that is computed: two may be missing when the third is claimed.
    assert between in {"claimed": (0, 6, 12), "committed": (18,)}.get(point, (12,))
    assert site.state(names[0]) == site.state(names[1])
    assert site.mix(names[0]) == {V2: 48}
    for number in (killed, undisturbed):
        row = site.backfill(number)
        assert (row.state, row.total, row.done, row.skipped, row.failed) == ("done", 48, 48, 0, 0)


def test_a_worker_killed_while_it_ends_a_backfill_leaves_the_end_to_the_next(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "LEASE_SECONDS", 0.2)  # the worker is a fork of this process
    number = site.start_backfill("g")

    assert site.doomed_worker("ending", 1).wait(30) == -signal.SIGKILL
    assert site.backfill(number).state == "running"
    site.work()

    assert site.backfill(number).state == "done"
    assert site.backfill(number).done == 48


@pytest.mark.parametrize("write", [1, 2])
def test_a_worker_killed_while_it_plans_a_backfill_leaves_that_to_the_next(
    site: Any, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    monkeypatch.setattr(sweeps, "LEASE_SECONDS", 0.2)  # the worker is a fork of this process
    number = site.start_backfill("g", planned=False, order="newest")

    assert site.doomed_worker("planning", write).wait(30) == -signal.SIGKILL
    assert (site.backfill(number).done, site.backfill(number).sweep_seq is None) == (0, False)
    site.work()

    row = site.backfill(number)
    assert (row.state, row.total, row.done, row.skipped) == ("done", 48, 48, 0)


def test_a_frozen_worker_that_lost_its_lease_commits_nothing_when_it_wakes(site: Any) -> None:
    number = site.start_backfill("g")
    frozen = site.doomed_worker("frozen", 2)
    until(lambda: _stopped(frozen.pid), frozen)
    site.work()
    before = site.state("g")
    feed = site.backfill(number)

    frozen.send_signal(signal.SIGCONT)
    frozen.send_signal(signal.SIGTERM)

    assert frozen.wait(30) == 0
    assert "action=chunk_lost" in site.log(frozen)
    assert site.state("g") == before
    assert site.backfill(number) == feed
    assert (feed.state, feed.done, feed.skipped) == ("done", 48, 0)


def test_a_worker_gives_way_to_the_service_beside_it_and_finishes_its_chunk_when_it_is_asked_to_end(site: Any) -> None:
    number = site.start_backfill("g", rate=12)
    asked = site.worker()
    until(lambda: site.backfill(number).done, asked)
    niceness = os.getpriority(os.PRIO_PROCESS, asked.pid)

    asked.send_signal(signal.SIGTERM)

    assert asked.wait(30) == 0
    assert niceness == min(os.nice(0) + NICENESS, 19)
    done = site.backfill(number).done
    assert 0 < done < 48
    assert done % 6 == 0
    assert site.mix("g")[V2] == done


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
