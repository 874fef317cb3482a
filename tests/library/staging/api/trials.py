"""Waiting for the counts of a shadow or a canary."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def begin(served: Any, path: str, version: str, until: str, **body: Any) -> int:
    made = served.http.post(f"{path}/deployments", json={"version": version, "until": until, **body})
    assert made.status_code == 201, made.text
    return int(made.json()["id"])


def ask(served: Any, path: str, picture: bytes, key: str = "", **fields: Any) -> dict[str, Any]:
    data = {"k": 5, **fields}
    headers = {"X-Query-Key": key} if key else {}
    answer = served.http.post(f"{path}/query", data=data, files=[("images", ("q", picture))], headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def shown(served: Any, path: str, number: int) -> dict[str, Any]:
    return dict(served.http.get(f"{path}/deployments/{number}").json())


def wait_for(served: Any, path: str, number: int, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until a deployment fulfils a condition, because queries are counted after the response; returns it."""
    deadline = time.monotonic() + 60
    while not holds(found := shown(served, path, number)):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def counted(phase: str, side: str, most: int) -> Callable[[dict[str, Any]], bool]:
    return lambda found: found["trial"].get(phase, {}).get("queries", {}).get(side, 0) >= most


def broken() -> Any:
    raise RuntimeError("the encoder is out of order")
