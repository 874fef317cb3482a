"""A gallery of three versions, and what several threads do at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from index.gallery import Gallery
from index.version import Version

MakeVersion = Callable[..., Version]


@pytest.fixture
def chain(make_version: MakeVersion, tmp_path: Path) -> dict[str, Version]:
    """v1 (4) <- v2 (4, identity) <- v3 (6, truncate)."""
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 4, edges=[(v1, "identity")])
    v3 = make_version(tmp_path / "v3", "v3", 6, edges=[(v2, "truncate")])
    return {"v1": v1, "v2": v2, "v3": v3}


@pytest.fixture
def gallery(chain: dict[str, Version]) -> Gallery:
    gallery = Gallery()
    for version in chain.values():
        gallery.declare(version)
    return gallery


@pytest.fixture
def background() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Repeats functions in threads until the test ends; what they raise fails the test."""
    stop, threads, failures = threading.Event(), [], []

    def run(function: Callable[[], None]) -> None:
        def loop() -> None:
            try:
                while not stop.is_set():
                    function()
            except BaseException as error:
                failures.append(error)

        threads.append(threading.Thread(target=loop, daemon=True))
        threads[-1].start()

    yield run
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not failures
