"""Random operations in one process, step by step, against the model of what docs/design.md promises (section 6).

The gallery is sealed, indexed by one engine after the other, merged, unloaded, and read from files that may be damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.backfills import attempts
from staging.random_operations.filtered_run import FILTERING, FilteredRun
from staging.random_operations.run import IDS, OPERATIONS
from staging.random_operations.sealed_run import KINDS, OTHER, SEALING, SealedRun
from staging.random_operations.world import World
from staging.states.small_segments import make_small

STEPS, FILTERED_STEPS = 80, 60
NEVER = 3600.0


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again at once, and segments are built when the life says so: no clock decides anything."""
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 0.0)
    make_small(monkeypatch.setattr, pause=NEVER)


@pytest.fixture
def lives(world: World, tmp_path: Path) -> Iterator[Callable[..., SealedRun]]:
    """Begins a life of a kind: every version registered, v1 current, and some items."""
    with ExitStack() as stack:

        def begin(seed: int, kind: type[SealedRun] = SealedRun) -> SealedRun:
            run = kind(world, tmp_path / "data", seed, stack)
            stack.callback(run.end)
            world.register(run.http)
            run.post(None, "/galleries", name="g")
            run.post(None, "/galleries", name=OTHER)
            run._begin("v1")
            for name in IDS:
                run.store(name)
            return run

        yield begin


def live(run: SealedRun, steps: int, operations: dict[str, int] = OPERATIONS) -> None:
    for step in range(steps):
        try:
            run.choose(SEALING)()
            run.catch_up()
            run.choose(operations)()
            run.check()
        except AssertionError as error:
            error.add_note(f"at step {step}: {', '.join(run.done[-6:])}")
            raise
    run.finish()
    run.seal()
    run.check()


def test_any_life_of_a_gallery_is_as_the_model_says(lives: Callable[..., SealedRun]) -> None:
    run = lives(21)

    live(run, STEPS)

    # A life in which little happens would show little.
    assert len(set(run.done)) > len(OPERATIONS) + len(SEALING) - 4
    assert run.model.moves > 5
    assert run.choices > 40
    assert sum(flaky.failures for flaky in run.flaky) > 0
    assert all(run.counts[kind] for kind in KINDS)
    assert run.counts["most indexed"] >= len(IDS) / 2
    assert run.counts["best found"] >= 0.9 * run.counts["best asked for"] > 0
    assert run._rows("select purged_seq from gallery where name = 'g'")[0][0] > 0
    for what in ("snapshots", "unloaded", "files damaged", "segments merged: 2"):
        assert run.counts[what] > 0, what


def test_any_life_with_filters_is_as_the_model_says_while_edges_come_and_go(lives: Callable[..., SealedRun]) -> None:
    run = lives(53, FilteredRun)

    live(run, FILTERED_STEPS, FILTERING)

    assert set(FILTERING) <= set(run.done)
    assert run.model.moves > 5
    for what in ("deleted by a filter", "found by a filter", "edges changed", "items moved by edges", "unloaded"):
        assert run.counts[what] > 0, what


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_long_lives_of_a_gallery_are_as_the_model_says(lives: Callable[..., SealedRun], seed: int) -> None:
    live(lives(seed), 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 210))
def test_long_lives_with_filters_are_as_the_model_says(lives: Callable[..., SealedRun], seed: int) -> None:
    live(lives(seed, FilteredRun), 400, FILTERING)
