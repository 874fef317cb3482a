"""index.engines.remote.circuit_breaker: an engine that has just failed is not asked, but for one call at a time."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest

from index.engines.remote.base import EngineUnavailable
from index.engines.remote.circuit_breaker import CircuitBreaker


def test_nobody_waits_for_an_engine_that_has_just_failed_and_one_sees_when_it_is_back(monkeypatch: Any) -> None:
    now, made = [100.0], [0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    breaker = CircuitBreaker(rest_seconds=5.0)

    def call(works: bool) -> None:
        with breaker.call():
            made[0] += 1
            if not works:
                raise EngineUnavailable("it hangs")

    for seconds, works, calls in (
        (0, False, 1),
        (1, True, 1),
        (6, False, 2),
        (7, True, 2),
        (12, True, 3),
        (12, True, 4),
    ):
        now[0] = 100.0 + seconds
        fails = not works or calls == made[0]
        with pytest.raises(EngineUnavailable, match="it hangs") if fails else nullcontext():
            call(works)
        assert made[0] == calls
