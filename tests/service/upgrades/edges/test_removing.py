"""Edges removed, and seen by other processes."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event, select

from index.errors import NoRoute
from index.version import Version
from service.registry.edge_records import delete_edge
from service.replica.loaded import LoadedGallery
from service.replica.replica import Replica
from service.runtime import running
from service.store.rows import GalleryRow
from service.store.tables import calibration
from service.upgrades.edges import dependents
from staging.api.edges import EYE, bare_edge, edge_archive, edges, moved_to, remove, routes, send
from staging.api.served import problem
from staging.states.working import SteppedWorker
from staging.waiting import until


def routes_with_maps(served: Any) -> list[list[list[str]]]:
    """The routes for which gates have fitted score maps."""
    with served.runtime.database.lookup() as connection:
        return list(connection.execute(select(calibration.c.route).order_by(calibration.c.id)).scalars())


class TestRemove:
    @pytest.fixture
    def needing(self, served: Any) -> str:
        """A gallery whose items are reached along one added edge only."""
        send(served, bare_edge(EYE), new="bare2", old="bare")
        path = served.gallery("bare")
        items = [{"id": str(n), "embedding": row} for n, row in enumerate(EYE.tolist())]
        served.http.post(f"{path}/items", json={"items": items})
        served.deploy(path, "bare2")
        return str(path)

    def test_one_that_items_need_is_kept_unless_forced_with_a_reason_and_then_answers_are_degraded(
        self, served: Any, needing: str
    ) -> None:
        body = {"version": "bare2", "embeddings": [[0, 1, 0]], "k": 1}
        gallery = needing.rpartition("/")[2]
        refused = problem(remove(served, "bare2", "bare", "matrix"), 409, "edge_needed", "/force")
        assert f"'{gallery}' (3 items)" in refused["detail"]
        problem(remove(served, "bare2", "bare", "matrix", force=True), 422, "invalid_argument", "/reason")
        served.http.post(f"{needing}/items", json={"items": [{"id": "new", "embedding": [1, 1, 1]}]})
        assert served.http.post(f"{needing}/query", json=body).json()["degraded"] == []

        removed = remove(served, "bare2", "bare", "matrix", force=True, reason="measured on the wrong data")

        assert removed.json()["removed"] is True
        (dependent,) = (d for d in removed.json()["dependents"] if d["gallery"] == gallery)
        assert dependent["lost"] == 3
        answer = served.http.post(f"{needing}/query", json=body).json()
        assert [m["id"] for m in answer["results"][0]["matches"]] == ["new"]
        assert [(d["version"], d["items"]) for d in answer["degraded"]] == [("bare", 3)]
        problem(served.http.post(f"{needing}/query", json={**body, "strict": True}), 409, "no_route")
        assert not list((served.runtime.settings.edges / "bare2" / "bare" / "matrix").iterdir())

    def test_a_dry_run_says_what_would_happen_and_changes_nothing(self, served: Any, needing: str) -> None:
        before = edges(served)

        told = remove(served, "bare2", "bare", "matrix", dry_run=True).json()

        assert told["removed"] is False
        assert told["blocked_by"] == []
        assert told["dependents"][-1] == {
            "gallery": needing.rpartition("/")[2],
            "version": "bare2",
            "routes": [{"version": "bare", "items": 3, "before": ["matrix"], "after": None}],
            "moved": 0,
            "lost": 3,
        }
        assert before == edges(served)

    def test_one_that_only_queries_of_a_version_on_trial_need_is_kept_unless_forced(self, served: Any) -> None:
        for name in ("watched", "seeing"):
            served.add(name, 4, edges=[("bare", "truncate")])
        path, edge = served.gallery("bare"), ("seeing", "bare", "truncate")
        items = [{"id": str(n), "embedding": row} for n, row in enumerate(EYE.tolist())]
        served.http.post(f"{path}/items", json={"items": items})
        served.deploy(path, "watched")
        number = served.deploy(path, "seeing", until="shadow")["id"]

        told = remove(served, *edge, dry_run=True).json()["dependents"]
        problem(remove(served, *edge), 409, "edge_needed", "/force")
        advanced = {"to": "canary", "canary": {"share": 1.0}}
        assert served.http.post(f"{path}/deployments/{number}/advance", json=advanced).status_code == 200
        problem(remove(served, *edge), 409, "edge_needed", "/force")

        routes = [{"version": "bare", "items": 3, "before": ["truncate"], "after": None}]
        lost = {"gallery": path.rpartition("/")[2], "version": "seeing", "routes": routes, "moved": 0, "lost": 3}
        assert told == [lost]
        asked = {"version": "seeing", "embeddings": [[1, 0, 0, 0]]}
        assert served.http.post(f"{path}/query", json=asked).json()["degraded"] == []
        served.http.post(f"{path}/rollback", json={})
        assert remove(served, *edge, dry_run=True).json()["dependents"] == []

    @pytest.mark.parametrize("writes", [0, 1, 3])
    def test_a_gallery_is_loaded_before_the_transaction_whoever_writes_meanwhile(
        self, served: Any, needing: str, monkeypatch: pytest.MonkeyPatch, writes: int
    ) -> None:
        replica, writing = served.runtime.replica, served.runtime.database._write_lock
        opened, left = [], list(range(writes))
        number = replica.find(needing.rpartition("/")[2]).id
        replica.cache.drop(number)
        count, load_one = dependents.Counts._count_dependents, Replica._load

        def noting(self: Replica, gallery_id: int) -> LoadedGallery:
            opened.append(writing.locked())
            return load_one(self, gallery_id)

        def counted(self: Any, gallery: GalleryRow, loaded: LoadedGallery) -> Any:
            found = count(self, gallery, loaded)
            if gallery.id == number and left and not writing.locked():
                item = {"id": f"late{left.pop()}", "embedding": [0, 0, 1]}
                assert served.http.post(f"{needing}/items", json={"version": "bare", "items": [item]}).is_success
            return found

        monkeypatch.setattr(Replica, "_load", noting)
        monkeypatch.setattr(dependents.Counts, "_count_dependents", counted)
        told = remove(served, "bare2", "bare", "matrix", dry_run=True).json()["dependents"][-1]

        assert True not in opened
        assert opened
        assert told["lost"] == 3 + writes - len(left)
        assert told["routes"][0]["items"] == told["lost"]

    def test_galleries_that_do_not_use_it_cost_no_statement_each(self, served: Any) -> None:
        statements: list[str] = []

        def note(_c: Any, _u: Any, statement: str, *_: Any) -> None:
            statements.append(statement)

        def counted() -> int:
            statements.clear()
            assert remove(served, "third", "v2", "matrix", dry_run=True).is_success
            return len(statements)

        event.listen(served.runtime.database._writer, "before_cursor_execute", note)
        before = counted()
        for _ in range(5):
            served.gallery("bare")
        after = counted()
        event.remove(served.runtime.database._writer, "before_cursor_execute", note)

        assert after == before

    def test_items_move_to_another_embedding_they_hold_and_back_when_the_edge_returns(
        self, served: Any, worker: SteppedWorker, more: dict[str, Version], many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, {"a": many["0"], "b": many["1"]})
        moved_to(served, worker, path, "v2")
        served.http.post(f"{path}/deployments", json={"version": "third"})
        assert served.http.get(path).json()["mix"] == {"v2": 2}

        written = served.http.get(f"{path}/items").json()["items"]

        told = remove(served, "third", "v2", "matrix", dry_run=True).json()
        assert served.http.get(path).json()["mix"] == {"v2": 2}
        removed = remove(served, "third", "v2", "matrix")

        assert removed.status_code == 200, removed.text
        assert told["dependents"] == removed.json()["dependents"]
        (dependent,) = (d for d in removed.json()["dependents"] if d["gallery"] == path.rpartition("/")[2])
        assert (dependent["moved"], dependent["lost"]) == (2, 0)
        assert dependent["routes"] == [{"version": "v2", "items": 2, "before": ["matrix"], "after": ["dual"]}]
        assert served.http.get(path).json()["mix"] == {"v1": 2}
        assert routes(served, path, many["0"], k=2) == {("matrix",)}

        back = send(served, edge_archive(more["third"], "v2"), new="third", old="v2")

        assert back.status_code == 201, back.text
        assert served.http.get(path).json()["mix"] == {"v2": 2}
        assert served.http.get(f"{path}/items").json()["items"] == written

    @pytest.mark.parametrize("state", ["running", "paused"])
    def test_a_transform_that_is_not_over_keeps_its_item_edge_from_being_replaced(
        self, served: Any, more: dict[str, Version], many: dict[str, bytes], state: str
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, {"a": many["0"]})
        served.http.post(f"{path}/deployments", json={"version": "fct"})
        number = served.http.post(f"{path}/backfills", json={"kind": "transform"}).json()["id"]
        if state == "paused":
            served.http.post(f"/backfills/{number}/pause")
        again = edge_archive(more["fct"], "v1")
        before = edges(served)

        refused = problem(send(served, again, new="fct", old="v1", replace="true"), 409, "edge_in_use")

        assert f"backfill {number}" in refused["detail"]
        assert edges(served) == before
        assert served.http.post(f"/backfills/{number}/cancel").status_code == 200
        assert send(served, again, new="fct", old="v1", replace="true").status_code == 201

    def test_a_running_transform_keeps_its_item_edge_even_from_force(
        self, served: Any, more: dict[str, Version], many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, {"a": many["0"]})
        served.http.post(f"{path}/deployments", json={"version": "fct"})
        number = served.http.post(f"{path}/backfills", json={"kind": "transform"}).json()["id"]

        assert remove(served, "fct", "v1", "forward", dry_run=True).json()["blocked_by"] == [number]
        problem(remove(served, "fct", "v1", "forward", force=True, reason="now"), 409, "edge_in_use")

        assert served.http.post(f"/backfills/{number}/cancel").status_code == 200
        assert remove(served, "fct", "v1", "forward").status_code == 200
        problem(served.http.post(f"{path}/backfills", json={"kind": "transform"}), 409, "no_route")
        assert send(served, edge_archive(more["fct"], "v1"), new="fct", old="v1").status_code == 201

    def test_maps_fitted_for_routes_along_it_go_with_it(
        self, served: Any, more: dict[str, Version], versions: dict[str, Version], many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        for label in range(5):
            some = {name: image for name, image in many.items() if int(name) % 5 == label}
            served.ingest(path, some, label=label)
        gate = served.http.post(f"{path}/gates", json={"version": "v2", "label": "label"})
        assert gate.status_code == 201, gate.text
        fitted = routes_with_maps(served)
        assert [["v2", "v1", "truncate"]] in fitted

        assert remove(served, "v2", "v1", "truncate").status_code == 200

        left = routes_with_maps(served)
        assert [route for route in fitted if ["v2", "v1", "truncate"] not in route] == left
        assert send(served, edge_archive(versions["v2"], "v1"), new="v2", old="v1").status_code == 201

    def test_what_is_not_there_cannot_be_removed(self, served: Any) -> None:
        problem(remove(served, "v2", "v1", "magic"), 404, "unknown_edge")
        problem(remove(served, "v2", "nobody", "truncate"), 404, "unknown_edge")


class TestOtherProcesses:
    def test_they_follow_edges_that_come_change_and_go_without_a_restart(
        self, served: Any, many: dict[str, bytes], more: dict[str, Version]
    ) -> None:
        path = served.gallery("bare")
        items = [{"id": str(n), "embedding": row} for n, row in enumerate(EYE.tolist())]
        served.http.post(f"{path}/items", json={"items": items})
        with running(served.runtime.settings) as other:
            gallery = other.replica.find(path.rpartition("/")[2]).gallery

            def first() -> int | None:
                """Which item is nearest to the first axis; None: no route leads there."""
                try:
                    found = gallery.search("bare2", lambda _: np.eye(3, dtype=np.float32)[:1], 3).keys_QK[0]
                except NoRoute:
                    return None
                return sorted(found).index(found[0])

            assert first() is None
            send(served, bare_edge(EYE[[1, 2, 0]]), new="bare2", old="bare")
            until(lambda: first() == 1)
            send(served, bare_edge(EYE), new="bare2", old="bare", replace="true")
            until(lambda: first() == 0)
            gone = remove(served, "bare2", "bare", "matrix", force=True, reason="galleries of other tests need it")
            assert gone.status_code == 200
            until(lambda: first() is None)

    def test_an_edge_whose_file_was_changed_is_listed_and_not_used(self, served: Any, more: dict[str, Version]) -> None:
        send(served, bare_edge(EYE), new="bare2", old="bare")
        (file,) = (served.runtime.settings.edges / "bare2" / "bare" / "matrix").glob("*/edge.npz")
        file.write_bytes(file.read_bytes()[:-1] + b"x")

        with running(served.runtime.settings) as other:
            declared = other.registry.edge(("bare2", "bare", "matrix"))
            assert declared is not None
            assert declared.problem == "edge.npz changed after it was accepted"
            assert other.registry.route("bare2", "bare") is None

    def test_one_that_another_process_removes_while_it_is_opened_is_no_damage(
        self, served: Any, more: dict[str, Version], caplog: pytest.LogCaptureFixture
    ) -> None:
        send(served, bare_edge(EYE), new="bare2", old="bare")
        registry, gallery = served.runtime.registry, served.runtime.replica.find(served.gallery("bare2")[11:])
        (record,) = (known for known in registry.edges() if known.edge.key == ("bare2", "bare", "matrix"))
        with served.runtime.database.write() as connection:
            delete_edge(connection, record.id)
        assert record.edge.folder is not None
        shutil.rmtree(record.edge.folder)

        gallery._add_edge(record)

        assert caplog.records == []
        assert registry.edge(record.edge.key) is None
        assert registry.named("bare2").problem == ""
