"""A constant load while a gallery is upgraded, rolled back and cleaned up: every query is answered, whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from staging.processes.load import Load
from staging.states.working import SteppedWorker

ITEMS = 20
CLIENTS = 3


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures, about=lambda n: {"digit": n % 5})


def test_no_query_fails_during_a_whole_upgrade(served: Any, filled: str, pictures: list[bytes]) -> None:
    url = f"{served.http.base_url}{filled.lstrip('/')}/query"
    load = Load(url, pictures, ITEMS, clients=CLIENTS)
    worker = SteppedWorker(served.runtime.settings)

    def do(route: str, **body: Any) -> dict[str, Any]:
        done = served.http.post(f"{filled}/{route}", json=body)
        assert done.status_code < 300, done.text
        load.wait()
        return dict(done.json())

    with load.running():
        load.wait()
        gate = do("gates", version="v2", label="digit")["id"]
        number = do("deployments", version="v2", gate=gate, override="a test", until="shadow")["id"]
        do(f"deployments/{number}/advance", to="canary", canary={"share": 0.5})
        do("rollback")
        number = do("deployments", version="v2", gate=gate, override="a test", until="canary", canary={"share": 0.5})[
            "id"
        ]
        do(f"deployments/{number}/advance", to="current")
        do("rollback")
        do("deployments", version="v2", gate=gate, override="a test")
        do("backfills", chunk_size=3)
        assert worker.step()
        load.wait()
        do("rollback")
        do("deployments", version="v2", gate=gate, override="a test")
        do("backfills", chunk_size=3)
        while worker.step():
            load.wait(1)
        assert do("retire", version="v1")["embeddings"] == ITEMS
        load.wait(20)
    worker.close()

    assert load.wrong == []
    assert load.versions["v1"] > 0 < load.versions["v2"]
    assert served.http.get(filled).json()["mix"] == {"v2": ITEMS}


def test_a_shadow_does_not_make_queries_wait(
    served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new version hangs: queries are answered all the same, and what piles up is dropped."""
    hanging, original = threading.Event(), served.runtime.registry.named("v2").images

    def hang() -> Callable[..., Any]:
        hanging.wait(60)
        return original()

    monkeypatch.setattr(served.runtime.registry.named("v2"), "images", hang)
    number = served.http.post(f"{filled}/deployments", json={"version": "v2", "until": "shadow"}).json()["id"]
    try:
        for turn in range(70):
            answer = served.query(filled, pictures[turn % 20], k=3)
            assert (answer.status_code, answer.json()["version"]) == (200, "v1")
    finally:
        hanging.set()
    deadline = time.monotonic() + 60
    while (trial := served.http.get(f"{filled}/deployments/{number}").json()["trial"].get("shadow", {})).get(
        "compared", 0
    ) + trial.get("dropped", 0) < 70:
        assert time.monotonic() < deadline, trial
        time.sleep(0.02)
    assert trial["dropped"] >= 5
