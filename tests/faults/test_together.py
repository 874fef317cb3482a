"""Several server processes on one port: what one acknowledged all show, and one that is killed loses nothing."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from index.engines.memory.segments import SEAL_ROWS
from regraft.connection import certificates
from staging.processes.site import Site
from staging.waiting import until

PROCESSES = 3


def servers(parent: int) -> set[int]:
    """All children, for there are no workers."""
    return {
        int(task) for listed in Path(f"/proc/{parent}/task").glob("*/children") for task in listed.read_text().split()
    }


def runs(pid: int) -> bool:
    """Whether a process does; one that ended may wait for whoever is its parent now."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def ingested(http: httpx.Client, name: str) -> int:
    item = {"id": name, "embedding": [1, 2, 3, 4, 5, 6]}
    stored = http.post("/galleries/g/items", json={"version": "v2", "items": [item]})
    assert stored.status_code == 200, stored.text
    return int(stored.json()["seq"])


def found(http: httpx.Client, **more: Any) -> dict[str, Any]:
    ask = {"version": "v2", "embeddings": [[1, 2, 3, 4, 5, 6]], "k": 1000, **more}
    answer = http.post("/galleries/g/query", json=ask)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def together(site: Site) -> Any:
    """A service of three processes; its site, its process."""
    return site, site.server("--processes", str(PROCESSES))


def test_what_one_process_acknowledged_every_other_shows(together: Any) -> None:
    site, service = together
    until(lambda: len(servers(service.pid)) == PROCESSES, service)
    # A connection each.
    clients = [httpx.Client(base_url=site.http.base_url, timeout=20, verify=certificates()) for _ in range(12)]

    for number in range(24):
        seq = ingested(clients[number % len(clients)], f"new{number}")
        for client in clients:
            answer = found(client)
            assert answer["seq"] >= seq
            assert f"new{number}" in {match["id"] for match in answer["results"][0]["matches"]}
    for client in clients:
        client.close()


def test_one_that_is_killed_loses_nothing_and_is_started_again(together: Any) -> None:
    site, service = together
    until(lambda: len(servers(service.pid)) == PROCESSES, service)
    before, stored, stop = servers(service.pid), [], threading.Event()

    def write(writer: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                with httpx.Client(base_url=site.http.base_url, timeout=20, verify=certificates()) as http:
                    ingested(http, f"w{writer}-{number}")
            except httpx.TransportError:
                continue
            stored.append(f"w{writer}-{number}")

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for writer in writers:
        writer.start()
    until(lambda: len(stored) > 10, service)
    os.kill(min(before), signal.SIGKILL)
    acknowledged = len(stored)
    until(lambda: len(stored) > acknowledged + 10, service)
    until(lambda: len(servers(service.pid)) == PROCESSES and servers(service.pid) != before, service)
    stop.set()
    for writer in writers:
        writer.join()

    assert set(stored) <= {match["id"] for match in found(site.http)["results"][0]["matches"]}
    service.send_signal(signal.SIGTERM)
    assert service.wait(30) == 0
    assert not any(map(runs, before))


def test_they_end_with_the_one_that_started_them(together: Any) -> None:
    _, service = together
    until(lambda: len(servers(service.pid)) == PROCESSES, service)
    started = servers(service.pid)

    service.kill()
    service.wait()

    until(lambda: not any(map(runs, started)))


def ingest_many(http: httpx.Client, first: int, count: int) -> None:
    np.save(array := io.BytesIO(), np.random.default_rng(first).normal(size=(count, 6)).astype(np.float32))
    fields = {"version": "v2", "items": json.dumps([{"id": f"many{first + n}"} for n in range(count)])}
    stored = http.post("/galleries/g/items", data=fields, files={"embeddings": ("e.npy", array.getvalue())})
    assert stored.status_code == 200, stored.text


def builder(pids: set[int], folder: Path) -> int | None:
    """The process that has had a gallery's folder open for a while, and so its lock."""

    def holding() -> set[int]:
        links = ((pid, link) for pid in pids for link in Path(f"/proc/{pid}/fd").glob("*"))
        return {pid for pid, link in links if os.path.realpath(link) == str(folder)}

    before = holding()
    time.sleep(0.05)
    return next(iter(before & holding()), None)


def test_another_one_builds_the_index_when_its_builder_is_killed_and_all_search_by_it(together: Any) -> None:
    site, service = together
    folder, building = site.settings.indexes / "1", set[int]()
    there = sum(found(site.http)["mix"].values())

    def answers(**more: Any) -> list[dict[str, Any]]:
        """Of connections of their own, so that each process is asked."""
        clients = [httpx.Client(base_url=site.http.base_url, timeout=20, verify=certificates()) for _ in range(8)]
        told = [found(client, **{"k": 10, **more}) for client in clients]
        for client in clients:
            client.close()
        return told

    def seen() -> bool:
        building.update(filter(None, [builder(servers(service.pid), folder)]))
        assert not built(), "it was built before anyone looked"
        return bool(building)

    def built() -> list[Path]:
        return list(folder.glob("v2/supplied/*/manifest.json"))

    def indexed() -> bool:
        """Whether whoever answers does so by the index, and tells what comparing every item does."""
        told = answers(explain=True)
        assert {sum(answer["mix"].values()) for answer in told} == {SEAL_ROWS + there}
        best = [answer["results"][0]["matches"][0]["id"] for answer in (*told, found(site.http, k=10, exact=True))]
        assert len(set(best)) == 1
        scanned = [sum(shard["scanned"]["approximate"] for shard in answer["explain"]["shards"]) for answer in told]
        return min(scanned) >= SEAL_ROWS

    answers()  # who is not asked loads nothing
    site.http.patch("/galleries/g", json={"index": {"kind": "hnsw"}}).raise_for_status()
    for first in range(0, SEAL_ROWS, 8192):
        ingest_many(site.http, first, 8192)
    until(seen, service)
    for killed in building:
        os.kill(killed, signal.SIGKILL)
    until(lambda: len(servers(service.pid) - building) == PROCESSES, service)

    until(indexed, service)
    assert len(built()) == 1, "the others took over what one had built"
