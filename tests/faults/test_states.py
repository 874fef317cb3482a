"""A hypothesis state machine over real processes: one server, one to four workers, and kill -9 of any of them.

Each life is a gallery. Whatever is done to it is done to a plain model too, and after each step and each restart,
the database and every kind of query must be as the model says (docs/design.md, 6; invariant 9 has no part here: the
server listens on loopback). A request that a kill cut off was done or was not: the model learns which by looking.
The server seals, merges, writes down and unloads the gallery all the time, by one engine after the other.

    pytest tests/faults/test_states.py -s --model-minutes 120

draws new lives until the time is over; `--model-seed` begins with another one. With `-m slow` it does the same while
vectors are moved into files (`REGRAFT_VECTORS=objects`) and home again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.settings import Settings
from staging.processes.site import LEASE_SECONDS
from staging.processes.stage import Stage
from staging.random_operations.file_life import FileLife, FileSite
from staging.random_operations.life import LONG, Life, live, staged
from staging.random_operations.sealed_life import SealedLife, SealedSite
from staging.random_operations.world import World

LIVES, STEPS = 1, 25


def lives_of(stage: Stage, world: World, request: pytest.FixtureRequest, kind: type[Life] = SealedLife) -> None:
    """One life, or as many as there is time for; prints what happened in them."""
    minutes, first = request.config.getoption("--model-minutes"), request.config.getoption("--model-seed")
    end, lives = time.monotonic() + 60 * minutes, 0
    while lives < LIVES or time.monotonic() < end:
        live(stage, world, first + lives, LONG if minutes else STEPS, kind)
        lives += 1
    print(f"\n{lives} lives:", *(f"  {count} {what}" for what, count in sorted(stage.counts.items())), sep="\n")
    assert stage.counts["items moved by workers"] > LIVES
    assert stage.counts["load answered"] > LIVES


@pytest.fixture
def stage(tmp_path: Path, world: World) -> Iterator[Stage]:
    with staged(Settings(data=tmp_path / "data", lease_seconds=LEASE_SECONDS), world, SealedSite) as stage:
        yield stage


def test_any_life_of_a_gallery_is_as_the_model_says(stage: Stage, world: World, request: pytest.FixtureRequest) -> None:
    lives_of(stage, world, request)
    assert stage.counts["items indexed"] > 0


@pytest.mark.slow
def test_any_life_is_as_the_model_says_while_vectors_are_moved_into_files_and_home_by_who_is_killed_at_it(
    tmp_path: Path, world: World, request: pytest.FixtureRequest
) -> None:
    settings = Settings(data=tmp_path / "data", lease_seconds=LEASE_SECONDS, vectors="objects")
    with staged(settings, world, FileSite) as stage:
        lives_of(stage, world, request, FileLife)
        assert stage.counts["files"] > LIVES
