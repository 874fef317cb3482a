"""Remote workers: real ones, in a thread, do the same chunks over HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from regraft.client import Client, Problem
from regraft.connection import Unreachable
from regraft.remote import RemoteWorker, WorkerKeyRefused
from service.http.backfills import remote_workers
from service.store.tables import backfill_chunk
from staging.api.work import WORKER_KEY
from staging.waiting import until

pytestmark = pytest.mark.usefixtures("keyed_alone")


@pytest.fixture
def remote(keyed: Any) -> Iterator[Client]:
    with Client(keyed.url, WORKER_KEY) as client:
        yield client


@pytest.fixture
def work(keyed: Any, remote: Client, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a remote worker until a backfill is done, and shows it."""

    def work(number: int, **options: Any) -> dict[str, Any]:
        stop = threading.Event()
        thread = threading.Thread(target=RemoteWorker(remote, tmp_path, stop, **options).work, daemon=True)
        thread.start()
        try:
            until(lambda: keyed.http.get(f"/backfills/{number}").json()["state"] == "done")
        finally:
            stop.set()
            thread.join(20)
        assert not thread.is_alive()
        return dict(keyed.http.get(f"/backfills/{number}").json())

    return work


def test_a_remote_worker_loads_neither_a_database_nor_a_web_framework() -> None:
    said = "import regraft.remote, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", said], capture_output=True, check=True, text=True).stdout.split()

    assert "regraft" in loaded
    assert {"sqlalchemy", "alembic", "fastapi", "starlette", "pydantic_settings"}.isdisjoint(loaded)


@pytest.mark.parametrize(
    ("old", "new", "kind", "device"),
    [("v1", "v2", "reencode", False), ("sided", "fct", "transform", False), ("sided", "fct", "transform", True)],
)
def test_a_remote_worker_ends_in_the_state_of_a_local_one(
    keyed: Any, filled: Any, work: Any, old: str, new: str, kind: str, device: bool
) -> None:
    path, number = filled(old, new, kind=kind)
    shown = work(number, originals=(lambda name: b"") if device else None)
    local, _ = filled(old, new, kind=kind)
    keyed.work()

    assert (shown["done"], shown["skipped"], shown["failed"]) == (20, 0, 0)
    assert keyed.stored(path, new) == keyed.stored(local, new)


def test_a_device_that_holds_the_originals_gets_no_images(
    keyed: Any, filled: Any, work: Any, pictures: list[bytes]
) -> None:
    _, number = filled()
    own = {f"i{n}": picture for n, picture in enumerate(pictures) if n != 3}

    def originals(name: str) -> bytes:
        try:
            return own[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    assert work(number, originals=originals)["done"] == 19

    (failure,) = keyed.http.get(f"/backfills/{number}/failures").json()["failures"]
    assert (failure["item"], failure["code"], failure["version"]) == ("i3", "image_missing", "v1")


@pytest.mark.parametrize(
    ("status", "code", "state"),
    [(409, "edge_replaced", "todo"), (409, "chunk_lost", "todo"), (422, "invalid_vector", "leased")],
)
def test_a_worker_gives_back_what_it_lost_and_keeps_what_was_refused_until_its_lease_is_over(
    keyed: Any,
    filled: Any,
    remote: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    state: str,
) -> None:
    """What is refused would be refused again at once; what was made by a replaced edge goes well the next time."""
    _, number = filled(chunk_size=20)
    stop = threading.Event()

    def refuse(chunk: int, lease: str, made: Any) -> Any:
        stop.set()
        raise Problem(status, {"code": code})

    monkeypatch.setattr(remote, "return_work", refuse)
    RemoteWorker(remote, tmp_path, stop).work()

    with keyed.runtime.database.lookup() as connection:
        columns = (backfill_chunk.c.state, backfill_chunk.c.lease_owner)
        (left,) = connection.execute(select(*columns).where(backfill_chunk.c.backfill_id == number)).all()
    assert tuple(left) == (state, None)


def test_a_result_that_is_too_large_for_the_service_is_a_failure_of_its_items(
    keyed: Any, filled: Any, work: Any, remote: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, number = filled(chunk_size=6)
    accept = remote.return_work

    def limited(chunk: int, lease: str, made: Any) -> Any:
        if len(made["moved"]) > 4:  # 3 chunks of 6 items, and one of 2
            raise Problem(413, {"title": "Request Entity Too Large"})
        return accept(chunk, lease, made)

    monkeypatch.setattr(remote, "return_work", limited)

    done = work(number)

    failures = keyed.http.get(f"/backfills/{number}/failures").json()["failures"]
    assert (done["done"], done["failed"], len(failures)) == (2, 18, 18)
    assert {one["code"] for one in failures} == {"refused"}
    assert "too large for the service or a proxy before it" in failures[0]["reason"]
    assert keyed.http.get(path).json()["mix"] == {"v1": 18, "v2": 2}


def test_a_worker_whose_key_is_refused_ends(keyed: Any, tmp_path: Path) -> None:
    client = Client(keyed.url, "wrong")
    with client, pytest.raises(WorkerKeyRefused, match="REGRAFT_WORKER_KEY"):
        RemoteWorker(client, tmp_path, threading.Event()).work()


def test_a_service_that_is_away_is_logged_once_and_once_when_it_is_back(
    remote: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    answers = iter([Unreachable("away"), Unreachable("away"), None, Unreachable("away"), None, None])

    def answer(_: str) -> None:
        match next(answers, stop):
            case Unreachable() as error:
                raise error
            case threading.Event():
                stop.set()

    monkeypatch.setattr(remote, "claim_work", answer)
    monkeypatch.setattr("regraft.remote.MAX_IDLE_SECONDS", 0.01)
    with caplog.at_level("INFO", logger="regraft.remote"):
        RemoteWorker(remote, tmp_path, stop).work()

    logged = [record.msg.name for record in caplog.records]
    assert logged[1:-1] == ["service_away", "service_back"] * 2


def test_large_inputs_come_page_by_page(
    filled: Any, work: Any, remote: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_workers, "MOST_SENT", 1)
    _, number = filled(chunk_size=20)
    pages, read = [], remote.work
    monkeypatch.setattr(remote, "work", lambda *given, **named: pages.append(read(*given, **named)) or pages[-1])

    assert work(number)["done"] == 20

    assert [len(page.items) for page in pages] == [remote_workers.READ_AT_ONCE] * 5
