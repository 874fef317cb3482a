"""A hypothesis state machine over real processes: one server, one to four workers, and kill -9 of any of them.

Each life is a gallery. Whatever is done to it is done to a plain model too, and after each step and each restart,
the database and every kind of query must be as the model says (docs/design.md, 6; invariant 9 has no part here: the
server listens on loopback). A request that a kill cut off was done or was not: the model learns which by looking.

    pytest tests/faults/test_states.py -s --model-minutes 120

draws new lives until the time is over; `--model-seed` begins with another one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.settings import Settings
from staging.life import LONG, live, staged
from staging.processes import LEASE_SECONDS
from staging.stage import Stage
from staging.world import World

LIVES, STEPS = 1, 25


@pytest.fixture
def stage(tmp_path: Path, world: World) -> Iterator[Stage]:
    with staged(Settings(data=tmp_path / "data", lease_seconds=LEASE_SECONDS), world) as stage:
        yield stage


def test_any_life_of_a_gallery_is_as_the_model_says(stage: Stage, world: World, request: pytest.FixtureRequest) -> None:
    minutes, first = request.config.getoption("--model-minutes"), request.config.getoption("--model-seed")
    end, lives = time.monotonic() + 60 * minutes, 0
    while lives < LIVES or time.monotonic() < end:
        live(stage, world, first + lives, LONG if minutes else STEPS)
        lives += 1
    print(f"\n{lives} lives:", *(f"  {count} {what}" for what, count in sorted(stage.counts.items())), sep="\n")

    assert stage.counts["items moved by workers"] > LIVES
    assert stage.counts["load answered"] > LIVES
