"""Requests to the routes of remote workers, and the keys of a server that has both kinds."""

from __future__ import annotations

from typing import Any

KEY, WORKER_KEY = "the key of the api", "the key of workers"


def claim(keyed: Any, **body: Any) -> Any:
    return keyed.http.post("/work:claim", json={"worker": "w", **body})


def claim_with(running: Any, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return int(running.http.post("/work:claim", json={"worker": "w"}, headers=headers).status_code)
