"""Random operations in one process, step by step, against the model of what docs/design.md promises (section 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.backfills import attempts
from staging.run import IDS, OPERATIONS, Run
from staging.world import World

STEPS = 90


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again at once: no clock decides what happens."""
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def lives(world: World, tmp_path: Path) -> Iterator[Callable[[int], Run]]:
    """Begins a life: every version registered, v1 current, nothing stored."""
    with ExitStack() as stack:

        def begin(seed: int) -> Run:
            run = Run(world, tmp_path / "data", seed, stack)
            stack.callback(run.end)
            world.register(run.http)
            run.post(None, "/galleries", name="g")
            run._begin("v1")
            for name in IDS:
                run.store(name)
            return run

        yield begin


def live(run: Run, steps: int) -> None:
    for step in range(steps):
        try:
            run.choose(OPERATIONS)()
            run.check()
        except AssertionError as error:
            error.add_note(f"at step {step}: {', '.join(run.done[-3:])}")
            raise
    run.finish()


@pytest.mark.parametrize("seed", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_any_life_of_a_gallery_is_as_the_model_says(lives: Callable[[int], Run], seed: int) -> None:
    run = lives(seed)

    live(run, STEPS)

    # A life in which little happens would show little.
    assert len(set(run.done)) > len(OPERATIONS) - 3
    assert run.model.moves > 10
    assert run.choices > 40
    assert sum(flaky.failures for flaky in run.flaky) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_long_lives_of_a_gallery_are_as_the_model_says(lives: Callable[[int], Run], seed: int) -> None:
    live(lives(seed), 400)
