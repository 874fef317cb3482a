"""kill -9 while items are deleted by a filter: whole blocks are gone, and asked again it goes on with the rest."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import httpx
import pytest

from staging.waiting import until

FEW = {"filter": {"field": "label", "in": [0, 1, 2]}}
PASSING = [f"i{n}" for n in range(48) if n % 5 < 3]


@pytest.mark.parametrize(("point", "blocks"), [("removing", 1), ("removed", 2)])
def test_whole_blocks_are_gone_and_the_rest_goes_when_asked_again(site: Any, point: str, blocks: int) -> None:
    process = site.launch("tests/faults/doomed_server.py", str(site.port), point, "2")
    until(site.answers, process)
    with suppress(httpx.TransportError):
        site.http.post("/galleries/g/items:delete", json=FEW)
    process.wait(timeout=30)

    gone = set(PASSING[: 10 * blocks])
    assert set(site.state("g")) == {f"i{n}" for n in range(48)} - gone
    site.server()
    assert site.http.get("/galleries/g").json()["items"] == 48 - len(gone)
    assert site.http.post("/galleries/g/items:delete", json=FEW).json()["deleted"] == len(PASSING) - len(gone)
    assert set(site.state("g")) == {f"i{n}" for n in range(48)} - set(PASSING)
    assert len(site.state("h")) == 48
