"""service.store.leases.heartbeats: heartbeats for what is held, whatever happens to one of them."""

from __future__ import annotations

import threading

import pytest

from service.store.leases.heartbeats import Leases


def test_what_is_held_is_extended_until_it_is_dropped() -> None:
    extended: list[str] = []
    signs = threading.Semaphore(0)

    def extend(chunk: str) -> None:
        extended.append(chunk)
        if chunk == "b":
            signs.release()

    def rounds(count: int) -> None:
        for _ in range(count):
            assert signs.acquire(timeout=30)

    leases: Leases[str] = Leases(extend, 0.01)
    leases.hold("a")
    leases.hold("b")
    try:
        rounds(2)
        assert "a" in extended
        leases.drop("a")
        while signs.acquire(blocking=False):
            pass
        rounds(1)  # the round that was on its way when it was dropped may have extended it once more
        before = len(extended)
        rounds(2)
        assert set(extended[before:]) == {"b"}
    finally:
        leases.close()


def test_a_sign_that_fails_is_not_the_last_one_and_one_line_tells_of_all(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[str] = []
    enough = threading.Event()

    def extend(chunk: str) -> None:
        tried.append(chunk)
        if len(tried) >= 5:
            enough.set()
        raise ValueError("something nobody thought of")

    leases: Leases[str] = Leases(extend, 0.01)
    leases.hold("a")
    leases.hold("b")

    assert enough.wait(30)
    leases.close()
    assert {"a", "b"} <= set(tried)
    assert [str(record.msg) for record in caplog.records] == ["action=lease_not_extended"]
