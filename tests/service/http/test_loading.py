"""A gallery that takes long to load holds up those who ask for it, and nobody else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from service.replica.replica import Replica

ASKING = 45
"""More than there are threads of any pool."""


def test_who_waits_for_a_gallery_takes_no_thread(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, go, build = threading.Event(), threading.Event(), Replica._build

    def late(self: Replica, *args: Any) -> None:
        loading.set()
        assert go.wait(20)
        build(self, *args)

    for name in ("slow", "quick"):
        assert served.http.post("/galleries", json={"name": name}).status_code == 201
    served.runtime.replica.cache.drop(served.runtime.replica.find("slow").id)
    monkeypatch.setattr(Replica, "_build", late)

    def ask(number: int) -> int:
        with httpx.Client(base_url=served.http.base_url, timeout=30) as http:
            if number % 2:
                return http.get("/galleries/slow").status_code
            return http.post("/galleries/slow/deployments", json={"version": "none"}).status_code

    with ThreadPoolExecutor(ASKING) as clients:
        asked = [clients.submit(ask, number) for number in range(ASKING)]
        try:
            assert loading.wait(10)
            assert served.http.get("/galleries/quick").status_code == 200
            assert served.http.get("/versions").status_code == 200
            assert not any(one.done() for one in asked)
        finally:
            go.set()
        assert {one.result() for one in asked} == {200, 404}
