from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from index.version import Version
from service.runtime import running
from service.settings import Settings
from service.upgrades.deployments.reaper import Reaper
from staging.ports import free_port
from staging.served import problem, zip_version

SERVE = "from service.http.app import serve; from service.settings import Settings; serve(Settings())"


class Process:
    """The service as its own process."""

    def __init__(self, data: Path) -> None:
        port = free_port()
        environment = {**os.environ, "REGRAFT_DATA": str(data), "REGRAFT_PORT": str(port)}
        self.log = (data.parent / f"{port}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE], env=environment, stdout=self.log, stderr=self.log
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=30)
        deadline = time.monotonic() + 60
        while not self.ready():
            assert self.process.poll() is None, self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.02)

    def ready(self) -> bool:
        try:
            return self.http.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def told(self) -> str:
        return Path(self.log.name).read_text()

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.http.close()
        self.log.close()
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Process]]:
    """Start the service on one data folder; what still runs in the end is killed."""
    started: list[Process] = []

    def begin() -> Process:
        started.append(Process(tmp_path / "data"))
        return started[-1]

    yield begin
    for process in started:
        if process.process.poll() is None:
            process.end(signal.SIGKILL)


def fill(process: Process, archive: bytes) -> None:
    assert process.http.post("/versions", files={"archive": ("v1.zip", archive)}).status_code == 201
    assert process.http.post("/galleries", json={"name": "g"}).status_code == 201
    assert process.http.post("/galleries/g/deployments", json={"version": "v1"}).status_code == 201


def test_every_acknowledged_write_survives_kill_9(
    start: Callable[[], Process], versions: dict[str, Version], pictures: list[bytes]
) -> None:
    process = start()
    fill(process, zip_version(versions["v1"].folder))
    acknowledged: dict[str, int] = {}
    deleted: set[str] = set()
    wanted = threading.Event()

    def write() -> None:
        for number in range(10_000):
            name, picture = f"i{number}", number % 20
            items = f'[{{"id": "{name}", "metadata": {{}}, "image": "0"}}]'
            try:
                files = [("images", ("0", pictures[picture]))]
                if process.http.post("/galleries/g/items", data={"items": items}, files=files).status_code != 200:
                    return
                acknowledged[name] = picture
                if number % 3 == 0 and process.http.delete(f"/galleries/g/items/{name}").status_code == 204:
                    deleted.add(name)
            except httpx.TransportError:
                return
            if number == 25:
                wanted.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert wanted.wait(30)
    process.process.send_signal(signal.SIGKILL)
    process.process.wait()
    writer.join()

    again = start()
    for name, picture in acknowledged.items():
        image = again.http.get(f"/galleries/g/items/{name}/image")
        if name in deleted:
            assert image.status_code == 404
        elif int(name[1:]) % 3 or image.status_code == 200:  # a delete may have been done and not yet acknowledged
            assert image.content == pictures[picture]
    shown = again.http.get("/galleries/g").json()
    listed = again.http.get("/galleries/g/items", params={"limit": 1000}).json()["items"]
    assert shown["mix"] == {"v1": len(listed)}
    assert {i["id"] for i in listed}.isdisjoint(deleted)
    assert len(listed) >= len(acknowledged) - len(deleted) - 1
    process.http.close()
    process.log.close()


def test_sigterm_lets_a_running_request_end_and_then_ends_well(
    start: Callable[[], Process], versions: dict[str, Version], pictures: list[bytes]
) -> None:
    process = start()
    fill(process, zip_version(versions["v1"].folder))
    items = [{"id": f"i{n}", "image": "0"} for n in range(400)]
    answers: list[Any] = []
    sending = threading.Event()

    class Picture(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            sending.set()
            return super().read(size)

    def ingest() -> None:
        with httpx.Client(base_url=process.http.base_url, timeout=30) as http:
            files = [("images", ("0", Picture(pictures[0])))]
            answers.append(http.post("/galleries/g/items", data={"items": json.dumps(items)}, files=files).json())

    writer = threading.Thread(target=ingest, daemon=True)
    writer.start()
    assert sending.wait(30)
    time.sleep(0.2)  # the request is on its way; now it is being answered
    code = process.end(signal.SIGTERM)
    writer.join()

    assert code == 0
    assert answers[0]["stored"] == 400
    assert "Traceback" not in Path(process.log.name).read_text()


def test_it_says_when_it_cannot_follow_its_database(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.http.get("/health/ready").json() == {"status": "ready", "problems": []}

    def fail() -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(served.runtime.replica, "_look", fail)
    deadline = time.monotonic() + 5
    while served.http.get("/health/ready").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    problem(served.http.get("/health/ready"), 503, "not_ready")
    assert served.http.get("/health").status_code == 200

    monkeypatch.undo()
    while served.http.get("/health/ready").status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_service_loads_faiss_with_one_thread() -> None:
    code = "import service.http.app, faiss; print(faiss.omp_get_max_threads())"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    assert told.stdout.strip() == "1"


def test_a_start_that_fails_leaves_no_thread_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(Reaper, "start", fail)  # the last one
    before = set(threading.enumerate())

    with pytest.raises(RuntimeError, match="no more threads"), running(Settings(data=tmp_path)):
        pass

    assert set(threading.enumerate()) <= before
