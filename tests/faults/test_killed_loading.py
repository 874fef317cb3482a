"""kill -9 while a gallery is written down, loaded or unloaded: nothing is lost, and the next start answers right."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import httpx
import pytest

from service.store.galleries.snapshots import snapshots_of
from staging.waiting import until

G = 1
QUERY = {"version": "v1", "embeddings": [[1.0, 0, 0, 0], [0.5, 0.5, -0.5, 0.5]], "k": 60}


def launched(site: Any, point: str, number: int = 1) -> Any:
    """A server that seals a few items and writes them down, and dies at a point."""
    process = site.launch("tests/faults/doomed_server.py", str(site.port), point, str(number))
    until(lambda: process.poll() is not None or site.answers())  # a slow machine may come to the point before
    return process


def answer(site: Any, name: str) -> Any:
    found = site.http.post(f"/galleries/{name}/query", json=QUERY).json()
    return [[(one["id"], one["score"], one["metadata"]) for one in each["matches"]] for each in found["results"]]


def named(site: Any) -> list[str]:
    with site.database.lookup() as connection:
        return snapshots_of(connection, G)


def check(site: Any) -> None:
    """A plain server answers for g as for h, whose items are the same, and which nobody sealed."""
    site.server()
    assert answer(site, "g") == answer(site, "h")
    assert site.http.get("/galleries/g").json()["items"] == 48
    assert site.http.delete("/galleries/g/items/i5").status_code == 204
    assert len(answer(site, "g")[0]) == 47


SLOW = pytest.mark.slow
WRITING = [
    pytest.param("writing", 1, marks=SLOW),
    pytest.param("writing", 2, marks=SLOW),
    pytest.param("written", 1, marks=SLOW),
    ("noted", 1),
    pytest.param("sweeping", 1, marks=SLOW),
]


@pytest.mark.parametrize(("point", "number"), WRITING)
def test_killed_while_a_gallery_is_written_down(site: Any, point: str, number: int) -> None:
    process = launched(site, point, number)
    with suppress(httpx.TransportError):
        answer(site, "g")
    process.wait(timeout=30)
    assert len(named(site)) == (point == "sweeping")  # the row comes last
    check(site)


@pytest.mark.parametrize(("point", "number"), [("loading", 1), ("unloading", 2)])
def test_killed_while_a_gallery_is_loaded_or_unloaded(site: Any, point: str, number: int) -> None:
    process = launched(site, "none")
    answer(site, "g")
    until(lambda: named(site), process)
    process.kill()
    process.wait(timeout=30)
    process = launched(site, point, number)
    with suppress(httpx.TransportError):
        answer(site, "g")
        answer(site, "h")
    process.wait(timeout=30)
    check(site)
