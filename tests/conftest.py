"""Options, repeatable examples, and the builders of `staging.builders` as fixtures for who takes them so."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("staging")

from staging import builders  # noqa: E402

# Every run draws the same examples, so that a failure belongs to a change; HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# The service syncs all it writes, and a fifth of its tests' time is waiting for a disk: in memory, where there is room.
MEMORY, ROOM = Path("/dev/shm"), 2 << 30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


# Python's collector of circles looks at a million imported objects again and again, a tenth of all the time: not while
# they are imported, not at those then, and at the rest less often.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries of C++ complain that their objects are left at the end


WAITING = {"acceptance", "engines", "faults"}
"""Folders whose tests mostly wait, for processes and servers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that mostly wait come among those that compute, and not first: processes side by side do both at once.

    They are spread over all but the last fifth, so that nothing long begins in the end.
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
    """What a test changes of the whole process changes all that follow in it, and fails one of them, somewhere else.

    Once it gives way to others nothing can take that back; settings that stay are those of every service after it.
    """
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
