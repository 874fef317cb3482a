"""The lives of `test_states.py`, of galleries that lie in an engine whose server is killed and frozen as well.

Writes go on meanwhile. A query is answered whole, with 503 `engine_unavailable`, or without the shards that `degraded`
tells of, and then with all that the others have; once the engine is back every answer is whole again.

    pytest tests/faults/test_engine_states.py -s -m slow --model-minutes 60
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from service.settings import Settings
from staging.external.doomed_engine import DoomedEngine
from staging.processes.site import LEASE_SECONDS
from staging.random_operations.engine_life import EngineLife
from staging.random_operations.life import LONG, live, staged
from staging.random_operations.world import World

STEPS = 30


@pytest.mark.slow
def test_any_life_of_a_gallery_in_an_engine_is_as_the_model_says(
    engine_server: tuple[str, Any, dict[str, str]], tmp_path: Path, world: World, request: pytest.FixtureRequest
) -> None:
    kind, running, setting = engine_server
    EngineLife.kind, EngineLife.engine = kind, DoomedEngine(running)
    minutes, first = request.config.getoption("--model-minutes"), request.config.getoption("--model-seed")
    end, lives = time.monotonic() + 60 * minutes, 0
    with staged(Settings(data=tmp_path / "data", lease_seconds=LEASE_SECONDS, **setting), world) as stage:
        while not lives or time.monotonic() < end:
            live(stage, world, first + lives, LONG if minutes else STEPS, EngineLife)
            lives += 1
        print(f"\n{lives} lives:", *(f"  {count} {what}" for what, count in sorted(stage.counts.items())), sep="\n")
        assert stage.counts["items moved by workers"] > 0
        assert stage.counts["load answered"] > 0
