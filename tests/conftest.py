"""Options, repeatable Hypothesis examples, faster runs, and the builders of `staging.inputs.builders` as fixtures."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("staging")

from staging.inputs import builders  # noqa: E402

# Every run draws the same examples, so that a failure is caused by a change; HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Temporary files in memory, if there is room: the service calls fsync, and its tests wait a fifth of their time for it.
MEMORY, ROOM = Path("/dev/shm"), 2 << 30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


# The cyclic garbage collector scans a million imported objects repeatedly, a tenth of all time: it is off during
# imports, then ignores these objects and runs less often.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else C++ libraries report leaked objects
    if "PYTEST_XDIST_WORKER" in os.environ and "staging.processes.forked" in sys.modules:
        sys.modules["staging.processes.forked"].remove_folder()


WAITING = {"acceptance", "databases", "faults"}
"""Folders whose tests mostly wait for processes and servers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Distribute files that mostly wait among those that compute, so that parallel processes do both at a time.

    They are spread over all but the last fifth, so that no long file starts at the end.
    """
    place: dict[Path, float] = {}
    for waits, share in ((True, 0.8), (False, 1.0)):
        files = list(dict.fromkeys(item.path for item in items if (item.nodeid.split("/")[1] in WAITING) is waits))
        place |= {path: share * number / len(files) for number, path in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of tests/faults/test_states.py and tests/service/http/test_openapi.py."""
    parser.addoption("--model-minutes", type=float, default=0, help="draw lives of a gallery for so long")
    parser.addoption("--model-seed", type=int, default=3, help="the first life to draw")
    parser.addoption("--api-examples", type=int, default=1, help="how many requests to draw for each operation")


@pytest.fixture(scope="module", autouse=True)
def _left_as_found() -> Iterator[None]:
    """Check that no test changes the process (its priority, variables REGRAFT_*), which would break later tests."""
    before = os.nice(0), _settings()
    yield
    assert (os.nice(0), _settings()) == before


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("REGRAFT_")}


@pytest.fixture(scope="session")
def make_version() -> Callable[..., Any]:
    return builders.make_version


@pytest.fixture(scope="session")
def add_text() -> Callable[..., Any]:
    return builders.add_text


@pytest.fixture(scope="session")
def tell_variance() -> Callable[..., Any]:
    return builders.tell_variance


@pytest.fixture(scope="session")
def make_image() -> Callable[..., Any]:
    return builders.make_image


@pytest.fixture(scope="session")
def image_bytes() -> Callable[..., Any]:
    return builders.image_bytes
