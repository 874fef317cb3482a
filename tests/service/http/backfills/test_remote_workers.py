"""Remote workers: the same chunks over HTTP, with another key, and nothing is taken unchecked."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from index.version import Version
from regraft.client import Client, Problem
from regraft.connection import Unreachable
from regraft.remote import RemoteWorker, WorkerKeyRefused
from service.backfills import planning as drained
from service.backfills.states import BackfillState
from service.http.backfills import remote_workers
from service.settings import Settings
from service.store.database.connections import Database
from service.store.tables import backfill_chunk
from staging.api.served import serving
from staging.inputs.builders import make_version
from staging.states.working import SteppedWorker, sent_back
from staging.waiting import until

pytestmark = pytest.mark.usefixtures("keyed_alone")

KEY, WORKER_KEY = "the key of the api", "the key of workers"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version]) -> Iterator[Any]:
    """A server with both keys; `fct` has an item edge from `sided`, which keeps side-information."""
    root = tmp_path_factory.mktemp("remote")
    sided = make_version(root / "sided", "sided", 3, side_dim=4)
    fct = make_version(root / "fct", "fct", 5, edges=[(sided, "forward")])
    settings = Settings(data=root / "data", api_key=KEY, worker_key=WORKER_KEY)
    with serving(settings, authorization=f"Bearer {KEY}") as running:
        for version in (versions["v1"], versions["v2"], sided, fct):
            assert running.register(version).status_code == 201
        yield running


@pytest.fixture
def filled(keyed: Any, pictures: list[bytes]) -> Callable[..., tuple[str, int]]:
    def fill(old: str = "v1", new: str = "v2", **fields: Any) -> tuple[str, int]:
        path = keyed.filled(pictures, old, new)
        return path, keyed.backfill(path, **{"chunk_size": 6, **fields})

    return fill


@pytest.fixture
def remote(keyed: Any) -> Iterator[Client]:
    with Client(keyed.url, WORKER_KEY) as client:
        yield client


def claim(keyed: Any, **body: Any) -> Any:
    return keyed.http.post("/work:claim", json={"worker": "w", **body})


def claim_with(running: Any, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return int(running.http.post("/work:claim", json={"worker": "w"}, headers=headers).status_code)


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


class TestKeys:
    def test_the_worker_key_opens_work_and_nothing_else(self, keyed: Any) -> None:
        headers = {"authorization": f"Bearer {WORKER_KEY}"}

        for method, path in (
            ("GET", "/galleries"),
            ("GET", "/versions"),
            ("POST", "/workers"),
            ("GET", "/backfills/1"),
        ):
            assert keyed.http.request(method, path, headers=headers).status_code == 401
        assert [claim_with(keyed, key) for key in (WORKER_KEY, "x")] == [204, 401]

    def test_without_a_worker_key_only_the_api_key_opens_work(self, tmp_path: Path) -> None:
        with serving(Settings(data=tmp_path, api_key=KEY)) as running:
            assert [claim_with(running, key) for key in (WORKER_KEY, KEY)] == [401, 204]


class TestWorking:
    def test_images_that_are_slow_to_come_hold_no_snapshot(
        self, keyed: Any, filled: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        filled()
        chunk = claim(keyed).json()
        holding: set[int] = set()
        read, snapshot = keyed.runtime.blobs.read, Database.read

        @contextmanager
        def counted(database: Database) -> Iterator[Connection]:
            with snapshot(database) as connection:
                holding.add(threading.get_ident())
                yield connection
            holding.discard(threading.get_ident())

        def alone(key: str) -> bytes:
            assert threading.get_ident() not in holding
            return bytes(read(key))

        monkeypatch.setattr(Database, "read", counted)
        monkeypatch.setattr(keyed.runtime.blobs, "read", alone)
        given = keyed.http.get(f"/work/{chunk['chunk']}", params={"lease": chunk["lease"]})

        assert given.status_code == 200
        assert all(one["image"] for one in given.json()["items"])

    @pytest.mark.parametrize(
        ("old", "new", "kind", "device"),
        [("v1", "v2", "reencode", False), ("sided", "fct", "transform", False), ("sided", "fct", "transform", True)],
    )
    def test_a_remote_worker_ends_in_the_state_of_a_local_one(
        self, keyed: Any, filled: Any, work: Any, old: str, new: str, kind: str, device: bool
    ) -> None:
        path, number = filled(old, new, kind=kind)
        shown = work(number, originals=(lambda name: b"") if device else None)
        local, _ = filled(old, new, kind=kind)
        keyed.work()

        assert (shown["done"], shown["skipped"], shown["failed"]) == (20, 0, 0)
        assert keyed.stored(path, new) == keyed.stored(local, new)

    def test_a_claim_that_finds_nothing_looks_after_drained_backfills_as_a_local_worker_does(
        self, keyed: Any, filled: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        numbers = [filled(chunk_size=20)[1] for _ in range(2)]
        worker = SteppedWorker(keyed.runtime.settings)
        assert worker.step()
        assert worker.step()
        worker.close()
        asked: list[Any] = []
        plan = drained.plan
        monkeypatch.setattr(drained, "plan", lambda *given: asked.append(given) or plan(*given))

        assert claim(keyed).status_code == 204

        assert [keyed.http.get(f"/backfills/{number}").json()["state"] for number in numbers] == ["done", "done"]
        # One mover: what it has opened it keeps.
        assert [(given[2], given[3].id) for given in asked] == [(keyed.runtime.embedder, number) for number in numbers]
        runtime = keyed.runtime
        assert drained.finish_or_replan(runtime.database, runtime.registry, runtime.embedder, threading.Event()) == {}

    def test_a_process_that_ends_leaves_drained_backfills_to_others(self, keyed: Any, filled: Any) -> None:
        numbers = [filled(chunk_size=20)[1] for _ in range(2)]
        worker = SteppedWorker(keyed.runtime.settings)
        assert worker.step()
        assert worker.step()
        worker.close()
        runtime, stop = keyed.runtime, threading.Event()
        stop.set()
        assert drained.finish_or_replan(runtime.database, runtime.registry, runtime.embedder, stop) == {}

        found = drained.finish_or_replan(runtime.database, runtime.registry, runtime.embedder, threading.Event())

        assert found == dict.fromkeys(numbers, BackfillState.DONE)

    def test_a_device_that_holds_the_originals_gets_no_images(
        self, keyed: Any, filled: Any, work: Any, pictures: list[bytes]
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

    def test_a_worker_holds_a_few_chunks_and_all_of_them_together_no_more_than_some(
        self, keyed: Any, filled: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote_workers, "MOST_HELD", 2)
        monkeypatch.setattr(remote_workers, "MOST_REMOTE", 3)
        filled(chunk_size=2)
        held = [claim(keyed, worker="w:a_b").json() for _ in range(2)]

        refused = [claim(keyed, worker="w:a_b")]
        assert claim(keyed, worker="w:aXb").status_code == 200
        refused.append(claim(keyed, worker="w"))

        assert [(r.status_code, r.json()["code"]) for r in refused] == [(409, "too_many_chunks")] * 2
        for each, failed in zip(held, (True, False), strict=True):
            given = {"lease": each["lease"], "failed": failed}
            assert keyed.http.post(f"/work/{each['chunk']}/release", params=given).status_code == 204
        again = [claim(keyed, worker="w:a_b").json()["chunk"] for _ in range(2)]
        assert again[0] == held[1]["chunk"]
        assert again[1] > again[0]  # the one that failed rests, and counts no more

    @pytest.mark.parametrize(
        ("status", "code", "state"),
        [(409, "edge_replaced", "todo"), (409, "chunk_lost", "todo"), (422, "invalid_vector", "leased")],
    )
    def test_a_worker_gives_back_what_it_lost_and_keeps_what_was_refused_until_its_lease_is_over(
        self,
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
        self, keyed: Any, filled: Any, work: Any, remote: Client, monkeypatch: pytest.MonkeyPatch
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

    def test_a_worker_whose_key_is_refused_ends(self, keyed: Any, tmp_path: Path) -> None:
        client = Client(keyed.url, "wrong")
        with client, pytest.raises(WorkerKeyRefused, match="REGRAFT_WORKER_KEY"):
            RemoteWorker(client, tmp_path, threading.Event()).work()

    def test_a_service_that_is_away_is_logged_once_and_once_when_it_is_back(
        self, remote: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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

    def test_inputs_are_sent_only_when_they_are_asked_for(self, keyed: Any, filled: Any, pictures: list[bytes]) -> None:
        filled()
        task = claim(keyed).json()

        for inputs, sent in (("true", True), ("false", False)):
            params = {"lease": task["lease"], "inputs": inputs}
            items = keyed.http.get(f"/work/{task['chunk']}", params=params).json()["items"]
            assert len(items) == 6
            for each in items:
                expected = base64.b64encode(pictures[int(each["id"][1:])]).decode() if sent else None
                assert each["image"] == expected

    def test_large_inputs_come_page_by_page(
        self, filled: Any, work: Any, remote: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote_workers, "MOST_SENT", 1)
        _, number = filled(chunk_size=20)
        pages, read = [], remote.work
        monkeypatch.setattr(remote, "work", lambda *given, **named: pages.append(read(*given, **named)) or pages[-1])

        assert work(number)["done"] == 20

        assert [len(page.items) for page in pages] == [remote_workers.READ_AT_ONCE] * 5

    def test_a_worker_of_an_earlier_release_that_knows_no_pages_gets_all(
        self, keyed: Any, filled: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote_workers, "MOST_SENT", 1)
        filled(chunk_size=20)
        task = claim(keyed).json()

        sent = keyed.http.get(f"/work/{task['chunk']}", params={"lease": task["lease"]}).json()

        assert (len(sent["items"]), sent["next"]) == (20, None)

    def test_only_the_kinds_that_are_asked_for_are_given(self, keyed: Any, filled: Any) -> None:
        filled()

        assert claim(keyed, kinds=["transform"]).status_code == 204
        assert claim(keyed, kinds=["reencode"]).json()["kind"] == "reencode"


class TestLease:
    @pytest.fixture
    def task(self, keyed: Any, filled: Any) -> dict[str, Any]:
        filled(chunk_size=20)
        found: dict[str, Any] = claim(keyed).json()
        return found

    def items(self, keyed: Any, task: dict[str, Any]) -> list[dict[str, Any]]:
        params = {"lease": task["lease"]}
        found: list[dict[str, Any]] = keyed.http.get(f"/work/{task['chunk']}", params=params).json()["items"]
        return found

    def test_a_chunk_is_taken_once(self, keyed: Any, task: dict[str, Any]) -> None:
        body, params = sent_back(self.items(keyed, task)), {"lease": task["lease"]}

        first = keyed.http.post(f"/work/{task['chunk']}", params=params, json=body)
        again = keyed.http.post(f"/work/{task['chunk']}", params=params, json=body)

        assert first.json() == {"done": 20, "failed": 0, "retried": 0, "skipped": 0}
        assert (again.status_code, again.json()["code"]) == (409, "chunk_lost")

    def test_a_foreign_lease_is_none(self, keyed: Any, task: dict[str, Any]) -> None:
        for method, place in (("GET", ""), ("POST", ""), ("POST", "/extend"), ("POST", "/release")):
            body = {"json": sent_back([])} if (method, place) == ("POST", "") else {}
            answer = keyed.http.request(method, f"/work/{task['chunk']}{place}", params={"lease": "remote:w:1"}, **body)
            assert (answer.status_code, answer.json()["code"]) == (409, "chunk_lost")

    def test_a_chunk_given_back_is_free_at_once(self, keyed: Any, task: dict[str, Any]) -> None:
        assert claim(keyed).status_code == 204
        params = {"lease": task["lease"]}
        assert keyed.http.post(f"/work/{task['chunk']}/release", params=params).status_code == 204

        assert claim(keyed).json()["chunk"] == task["chunk"]

    def test_a_chunk_of_a_version_that_is_set_aside_stays_free(
        self, keyed: Any, filled: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        filled(chunk_size=20)
        with monkeypatch.context() as patch:
            patch.setattr(keyed.runtime.registry.named("v2"), "problem", "encoder.onnx changed")
            for _ in range(2):
                refused = claim(keyed)
                assert (refused.status_code, refused.json()["code"]) == (503, "version_broken")

        assert (claim(keyed).status_code, claim(keyed).status_code) == (200, 204)

    def test_a_sign_of_life_moves_the_end_of_the_lease(self, keyed: Any, task: dict[str, Any]) -> None:
        mine = backfill_chunk.c.id == task["chunk"]
        with keyed.runtime.database.write() as connection:
            connection.execute(update(backfill_chunk).where(mine).values(lease_until=0.0))
        assert keyed.http.post(f"/work/{task['chunk']}/extend", params={"lease": task["lease"]}).status_code == 200

        assert claim(keyed).status_code == 204

    def test_what_is_paused_meanwhile_is_not_taken(self, keyed: Any, task: dict[str, Any]) -> None:
        items = self.items(keyed, task)
        keyed.http.post(f"/backfills/{task['backfill']}/pause")

        answer = keyed.http.post(f"/work/{task['chunk']}", params={"lease": task["lease"]}, json=sent_back(items))

        assert (answer.status_code, answer.json()["code"]) == (409, "chunk_lost")
