"""The routes of remote workers over HTTP: keys, claims and leases."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, update

from service.backfills import planning as drained
from service.backfills.states import BackfillState
from service.http.backfills import remote_workers
from service.settings import Settings
from service.store.database.connections import Database
from service.store.tables import backfill_chunk
from staging.api.served import serving
from staging.api.work import KEY, WORKER_KEY, claim, claim_with
from staging.states.working import SteppedWorker, sent_back

pytestmark = pytest.mark.usefixtures("keyed_alone")


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


class TestClaim:
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
