"""`Parallel`: requests to a store over the network, several at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self


class Parallel:
    """Runs at most `at_once` calls at a time; the first error ends the rest and is raised."""

    def __init__(self, at_once: int) -> None:
        self._pool = ThreadPoolExecutor(at_once, "blobs") if at_once > 1 else None
        self._at_once = at_once
        self._under_way: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def add(self, work: Callable[..., None], *args: object) -> None:
        """Start a call once fewer than `at_once` run, so that lazily produced arguments are not all in memory."""
        if self._pool is None:
            work(*args)
            return
        if len(self._under_way) >= self._at_once:
            self._under_way.pop(0).result()
        self._under_way.append(self._pool.submit(work, *args))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until all calls have ended, so that nothing is written after the caller cleans up."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            for one in self._under_way if kind is None else ():
                one.result()
