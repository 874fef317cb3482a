"""The end of a server under load: nobody who reached it goes away without an answer."""

from __future__ import annotations

import io
import json
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from index.version import Version
from regraft.connection import certificates
from staging.inputs.builders import zip_version
from staging.processes.site import Site
from staging.waiting import until

CLIENTS = 8


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "data").mkdir()
    with closing(Site(tmp_path / "data")) as made:
        yield made


class Clients:
    """Some keep their connection, some open one for each request; an answer or a refused connection is all they get."""

    def __init__(self, site: Site) -> None:
        self.told: Counter[str] = Counter()
        self._site, self._over = site, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        connection = HTTPConnection("127.0.0.1", self._site.port, timeout=20)
        headers = {"connection": "keep-alive" if number % 2 else "close"}
        while not self._over.is_set():
            try:
                connection.request("GET", "/v1/health", headers=headers)
                answer = connection.getresponse()
                answer.read()
                told = str(answer.status)
            except ConnectionRefusedError:
                told = "refused"
                connection.close()
                time.sleep(0.01)
            except (OSError, HTTPException) as error:
                told = repr(error)
                connection.close()
            self.told[told] += 1
        connection.close()


@pytest.mark.parametrize("stops", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_under_load_sigterm_cuts_no_request_off(site: Site, stops: int) -> None:
    for _ in range(stops):
        process = site.server()
        with Clients(site) as clients:
            until(lambda: clients.told["200"] > 300, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, site.log(process)

        assert set(clients.told) <= {"200", "refused"}, clients.told
        site.http.close()
        site.http = httpx.Client(base_url=site.http.base_url, timeout=20, verify=certificates())


def test_a_long_request_that_runs_is_answered_as_a_whole(
    site: Site, versions: dict[str, Version], pictures: list[bytes]
) -> None:
    process = site.server()
    archive = zip_version(versions["v1"].folder)
    assert site.http.post("/versions", files={"archive": ("v1.zip", archive)}).status_code == 201
    assert site.http.post("/galleries", json={"name": "g"}).status_code == 201
    assert site.http.post("/galleries/g/deployments", json={"version": "v1"}).status_code == 201
    items = [{"id": f"i{n}", "image": "0"} for n in range(400)]
    answers: list[Any] = []
    sending = threading.Event()

    class Picture(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            sending.set()
            return super().read(size)

    def ingest() -> None:
        with httpx.Client(base_url=site.http.base_url, timeout=30, verify=certificates()) as http:
            files = [("images", ("0", Picture(pictures[0])))]
            answers.append(http.post("/galleries/g/items", data={"items": json.dumps(items)}, files=files).json())

    writer = threading.Thread(target=ingest, daemon=True)
    writer.start()
    assert sending.wait(30)
    time.sleep(0.2)  # the request is on its way; now it is being answered
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    writer.join()

    assert answers[0]["stored"] == 400
    assert "Traceback" not in site.log(process)


def test_a_server_that_drains_says_so(site: Site) -> None:
    process = site.server()
    with socket.create_connection(("127.0.0.1", site.port)) as idle:
        process.send_signal(signal.SIGTERM)
        seen = set()
        with suppress(ConnectionRefusedError):
            while process.poll() is None:
                with closing(HTTPConnection("127.0.0.1", site.port, timeout=10)) as connection:
                    connection.request("GET", "/v1/health/ready")
                    ready = connection.getresponse()
                    if ready.status == 503:
                        seen.add((json.loads(ready.read())["code"], ready.headers["connection"]))
        # It never asked anything; it does not keep the server from ending.
        assert process.wait(10) == 0
        assert idle.recv(1) == b""

    assert ("draining", "close") in seen
    # Readiness knows first; the answers begin to close their connections a moment later.
    assert {code for code, _ in seen} == {"draining"}
