"""index.lock: many readers or one writer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from index.lock import ReadWriteLock


def test_readers_share_the_lock_and_writers_have_it_alone(
    background: Callable[[Callable[[], None]], None],
) -> None:
    lock, readers, both = ReadWriteLock(), threading.Barrier(2), threading.Event()
    state = {"writers": 0, "readers": 0}

    def read_together() -> None:
        if not both.is_set():
            with lock.read():
                readers.wait(10)  # passes only when both threads are inside
            both.set()
        with lock.read():
            assert state["writers"] == 0

    def write() -> None:
        both.wait(10)
        with lock.write():
            state["writers"] += 1
            assert state["writers"] == 1
            state["writers"] -= 1

    background(read_together)
    background(read_together)
    background(write)
    background(write)
    assert both.wait(10)
    for _ in range(200):
        with lock.write():
            assert state["writers"] == 0


def test_a_waiting_writer_goes_before_new_readers() -> None:
    lock, order = ReadWriteLock(), []

    def write() -> None:
        with lock.write():
            order.append("writer")

    def read() -> None:
        with lock.read():
            order.append("reader")

    # Daemons: a lock that never lets them in fails this test and does not keep the run from ending.
    writer, reader = (threading.Thread(target=work, daemon=True) for work in (write, read))
    with lock.read():
        writer.start()
        deadline = time.monotonic() + 10
        while not lock._writers_waiting and time.monotonic() < deadline:
            time.sleep(0.001)
        reader.start()
        reader.join(0.05)
        assert order == []
    writer.join(10)
    reader.join(10)
    assert order == ["writer", "reader"]


def test_a_failing_writer_or_reader_releases_the_lock() -> None:
    lock = ReadWriteLock()
    for enter in (lock.write, lock.read):
        with pytest.raises(RuntimeError), enter():
            raise RuntimeError
    with lock.write(), pytest.raises(RuntimeError):
        raise RuntimeError
    with lock.read():
        pass
