"""Settings that other tests build by hand: each reaches, through a service or a command, what it is about."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

import regraft.remote
from index import isolated
from index.execution import Execution
from index.isolated import Limits
from index.version import Version
from regraft.commands.processes import _work_remotely
from service.settings import Settings
from staging.api.served import problem, serving
from staging.inputs.builders import make_version

Problem = Any
ARCHIVE = 200_000


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version]) -> Iterator[Any]:
    data = tmp_path_factory.mktemp("limited")
    settings = Settings(
        data=data / "data",
        blobs_url=f"file://{data / 'elsewhere'}",
        max_archive_bytes=ARCHIVE,
        max_metadata_bytes=20,
        max_results=3,
        min_free_bytes=1 << 60,
        threads=2,
        verify_seconds=77.0,
        verify_memory_bytes=1 << 33,
    )
    with serving(settings) as running:
        assert running.register(versions["v1"]).status_code == 201
        yield running


def test_the_largest_archive(limited: Any) -> None:
    sent = limited.http.post("/versions", files={"archive": ("v.zip", bytes(ARCHIVE))})
    problem(sent, 413, "body_too_large")


def test_the_largest_metadata(limited: Any, pictures: list[bytes]) -> None:
    path = limited.gallery("v1")
    assert limited.ingest(path, {"a": pictures[0]}, a="x" * 10).status_code == 200
    (refused,) = limited.ingest(path, {"a": pictures[0]}, a="x" * 20).json()["errors"]
    assert "metadata" in refused["pointer"]
    entries = json.dumps([{"image": "0", "metadata": {"a": "x" * 20}}, {"image": "0"}])
    made = limited.http.post(f"{path}/evaluations", data={"entries": entries}, files=[("images", ("0", pictures[0]))])
    assert (made.status_code, made.json()["errors"][0]["pointer"]) == (422, "/entries/0/metadata")


def test_the_most_results_and_the_place_of_the_images(limited: Any, pictures: list[bytes]) -> None:
    path = limited.gallery("v1")
    assert limited.ingest(path, {str(n): pictures[n] for n in range(4)}).status_code == 200
    assert limited.query(path, pictures[0], k=3).status_code == 200
    refused = problem(limited.query(path, pictures[0], k=4), 422, "invalid_argument", "/k")
    assert "at most 3 matches" in refused["detail"]
    stored = Path(limited.runtime.settings.data).parent / "elsewhere"
    assert pictures[0] in [place.read_bytes() for place in stored.rglob("*") if place.is_file()]


def test_the_least_free_space(limited: Any) -> None:
    assert any("less than" in told for told in limited.http.get("/health/ready").json()["problems"])


def test_the_number_of_threads(limited: Any) -> None:
    together, threads = threading.Barrier(3), limited.runtime.blocking_threads
    waiting = [threads.submit(together.wait, 0.2) for _ in range(3)]
    assert all(isinstance(each.exception(), threading.BrokenBarrierError) for each in wait(waiting).done)
    two = threading.Barrier(2)
    assert sorted(each.result() for each in [threads.submit(two.wait, 10) for _ in range(2)]) == [0, 1]


def test_what_verifying_may_take(limited: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, given = isolated._ask, list[Limits]()
    monkeypatch.setattr(isolated, "_ask", lambda asked, limits: given.append(limits) or ask(asked, limits))

    assert limited.register(make_version(tmp_path / "v", "other", 4)).status_code == 201

    assert given == [Limits(77.0, 1 << 33)]


@pytest.mark.parametrize("told", [True, False])
def test_a_remote_worker_is_given_its_settings(told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Recorded:
        def __init__(self, client: Any, folder: Path, stop: threading.Event, **options: Any) -> None:
            given.append((client.url, folder, options))

        def work(self) -> None:
            given.append("work")

    monkeypatch.setattr(regraft.remote, "RemoteWorker", Recorded)
    values = {"ENCODER_THREADS": 3, "MAX_IMAGE_PIXELS": 99, "VERIFY_SECONDS": 7, "VERIFY_MEMORY_BYTES": 1 << 30}
    for name, value in values.items():
        monkeypatch.setenv(f"REGRAFT_{name}", str(value))
    monkeypatch.setenv("REGRAFT_DATA", str(tmp_path / "set"))
    monkeypatch.setenv("REGRAFT_EMBEDDING_APIS", "http://x/")

    _work_remotely("http://far:1", "k" * 16, tmp_path / "told" if told else None, threading.Event())

    options = {"execution": Execution(3), "max_pixels": 99, "limits": Limits(7.0, 1 << 30), "apis": {"http://x"}}
    (url, folder, passed), worked = given
    assert (url.startswith("http://far:1"), worked) == (True, "work")
    assert (folder, passed) == (tmp_path / ("told" if told else "set") / "worker", options)
