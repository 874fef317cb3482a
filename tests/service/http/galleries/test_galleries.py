from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from service.settings import Settings
from service.store.galleries import item_counts
from service.store.galleries.deletion import delete_gallery, forget_gallery, free_items
from service.store.galleries.gallery import take_seq
from service.store.galleries.held_versions import live_items_by_version
from service.store.galleries.items import NewItem, store_items
from service.store.tables import gallery, item, metadata
from service.upgrades import gallery_removal
from service.upgrades.deployments import reaper
from staging.api.served import problem, serving
from staging.waiting import until


def test_a_new_gallery_is_empty_and_has_no_current_version(served: Any) -> None:
    created = served.http.post("/galleries", json={"name": "New.gallery-1"})

    assert created.status_code == 201
    shown = created.json()
    assert shown.pop("created") > 1_700_000_000
    index = {"kind": "auto", "storage": "float32", "recall": 0.99}
    assert shown == {
        "name": "New.gallery-1", "current": None, "items": 0, "mix": {}, "seq": 0, "index": index, "indexed": 0,
        "loaded": True, "bytes": 0, "loading": None, "collections": [],
    }  # fmt: skip
    assert served.http.get("/galleries/New.gallery-1").json() == created.json()
    assert created.json() in served.http.get("/galleries").json()["galleries"]


def test_a_name_is_taken_once(served: Any) -> None:
    path = served.gallery(None)

    taken = served.http.post("/galleries", json={"name": path.rpartition("/")[2]})

    problem(taken, 409, "gallery_exists", "/name")


def test_an_unknown_gallery_is_a_problem_on_every_route(served: Any, pictures: list[bytes]) -> None:
    path = "/galleries/nobody"
    one = {"items": [{"id": "a", "embedding": [1, 2, 3, 4]}]}
    asked = {"version": "v1", "embeddings": [[1, 2, 3, 4]], "k": 1}
    for response in (
        served.http.get(path),
        served.remove(path),
        served.http.get(f"{path}/items"),
        served.http.get(f"{path}/items/a"),
        served.http.get(f"{path}/items/a/image"),
        served.http.delete(f"{path}/items/a"),
        served.http.post(f"{path}/items:delete", json={"ids": ["a"]}),
        served.http.post(f"{path}/items", json=one),
        served.ingest(path, {"a": pictures[0]}),
        served.http.post(f"{path}/query", json=asked),
        served.query(path, pictures[0]),
    ):
        problem(response, 404, "unknown_gallery")


def test_a_deleted_gallery_leaves_no_row_and_no_image(served: Any, pictures: list[bytes]) -> None:
    kept, path = served.gallery(), served.gallery()
    for each in (kept, path):
        assert served.ingest(each, {"a": pictures[0], "b": pictures[1]}).status_code == 200
    with served.runtime.database.lookup() as connection:
        before = {
            t.name: connection.execute(select(func.count()).select_from(t)).scalar() for t in metadata.sorted_tables
        }
    folder = Path(served.runtime.settings.data) / "blobs"
    images = len([p for p in folder.rglob("*") if p.is_file()])

    assert served.remove(path).status_code == 204

    problem(served.http.get(path), 404, "unknown_gallery")
    with served.runtime.database.lookup() as connection:
        after = {
            t.name: connection.execute(select(func.count()).select_from(t)).scalar() for t in metadata.sorted_tables
        }
    gone = {name: before[name] - after[name] for name in before if before[name] != after[name]}
    assert gone.pop("audit") == -1  # that it was deleted
    assert gone == {"gallery": 1, "item": 2, "embedding": 2, "deployment": 1, "deployment_transition": 3}
    assert len([p for p in folder.rglob("*") if p.is_file()]) == images - 2
    assert served.http.get(kept).json()["items"] == 2


def test_a_large_gallery_is_gone_at_once_and_freed_afterwards(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = served.filled(pictures)
    number, failures = served.runtime.replica.find(path.rpartition("/")[2]).id, iter(range(2))
    may_go_on = threading.Event()

    def slow(connection: Any, gallery_id: int, after: int, limit: int) -> int | None:
        if after:
            assert may_go_on.wait(30)
            if next(failures, None) is not None:
                raise OperationalError("DELETE", None, Exception("database is locked"))
        return free_items(connection, gallery_id, after, limit)

    def left() -> list[int]:
        counted = (item.c.id, item.c.gallery_id), (gallery.c.id, gallery.c.id)
        with served.runtime.database.lookup() as connection:
            statements = [select(func.count(column)).where(of == number) for column, of in counted]
            return [connection.execute(statement).scalar_one() for statement in statements]

    monkeypatch.setattr(gallery_removal, "BLOCK", 6)
    monkeypatch.setattr(gallery_removal, "free_items", slow)
    monkeypatch.setattr(reaper, "RETRY_SECONDS", 0.01)
    threading.Timer(0.5, may_go_on.set).start()

    assert served.remove(path).status_code == 204

    problem(served.http.get(path), 404, "unknown_gallery")
    again = served.http.post("/galleries", json={"name": path.rpartition("/")[2]})
    assert (again.status_code, again.json()["items"]) == (201, 0)
    deadline = time.monotonic() + 30
    while left() != [0, 0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (Path(served.runtime.settings.data) / "blobs" / str(number)).exists()
    assert served.http.get(path).json() == again.json()


def test_one_gallery_that_cannot_be_freed_holds_up_no_other(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = (served.filled(pictures[:2]) for _ in range(2))
    numbers = [served.runtime.replica.find(path.rpartition("/")[2]).id for path in (stuck, other)]
    may_go_on = threading.Event()

    def failing(connection: Any, gallery_id: int) -> None:
        if gallery_id == numbers[0] and not may_go_on.is_set():
            raise OperationalError("DELETE", None, Exception("disk I/O error"))
        forget_gallery(connection, gallery_id)

    def left() -> list[int]:
        with served.runtime.database.lookup() as connection:
            rows = connection.execute(select(gallery.c.id).where(gallery.c.id.in_(numbers)))
            return sorted(rows.scalars())

    monkeypatch.setattr(gallery_removal, "forget_gallery", failing)
    monkeypatch.setattr(reaper, "free_small_gallery", lambda *_: False)
    monkeypatch.setattr(reaper, "RETRY_SECONDS", 0.01)

    for path in (stuck, other):
        assert served.remove(path).status_code == 204

    until(lambda: left() == numbers[:1])
    may_go_on.set()
    until(lambda: left() == [])


@pytest.mark.parametrize("what", ["items", "evaluations"])
def test_images_whose_gallery_is_deleted_while_they_are_stored_are_told_so(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path, blobs, put = served.gallery(), served.runtime.blobs, type(served.runtime.blobs)._put

    def deleted(self: Any, key: str, content: bytes) -> None:
        if (number := int(key.partition("/")[0])) == gallery_id and served.remove(path).status_code == 204:
            blobs.remove_gallery(number)
        put(self, key, content)

    gallery_id = served.runtime.replica.find(path.rpartition("/")[2]).id
    monkeypatch.setattr(type(blobs), "_put", deleted)
    named = {"items": [{"id": "a", "image": "0"}], "evaluations": [{"image": "0", "label": 1}] * 2}[what]
    data = {{"items": "items", "evaluations": "entries"}[what]: json.dumps(named)}

    answer = served.http.post(f"{path}/{what}", data=data, files=[("images", ("0", pictures[0]))])

    problem(answer, 404, "unknown_gallery")
    assert served.http.get("/health/ready").json()["status"] == "ready"


def test_a_gallery_created_again_starts_anew(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, {"a": pictures[0]})
    served.remove(path)

    again = served.http.post("/galleries", json={"name": path.rpartition("/")[2]}).json()

    assert (again["items"], again["seq"], again["current"]) == (0, 0, None)
    assert served.http.get(f"{path}/items").json() == {"items": [], "next": None}


def test_a_gallery_that_another_process_deleted_is_not_the_next_one_of_its_name(
    tmp_path: Path, versions: dict[str, Any]
) -> None:
    asked = {"version": "plain", "embeddings": [[1, 0, 0]], "k": 1}
    with serving(Settings(data=tmp_path, poll_seconds=60)) as served:
        assert served.register(versions["plain"]).status_code == 201
        path = served.gallery("plain")
        assert served.http.post(f"{path}/items", json={"items": [{"id": "a", "embedding": [1, 0, 0]}]}).is_success
        name = path.rpartition("/")[2]
        with served.runtime.database.write() as connection:
            delete_gallery(connection, served.runtime.replica.find(name).id)

        problem(served.http.post(f"{path}/query", json=asked), 404, "unknown_gallery")
        problem(served.http.get(path), 404, "unknown_gallery")
        created = served.http.post("/galleries", json={"name": name})
        assert (created.status_code, created.json()["items"], created.json()["current"]) == (201, 0, None)
        assert served.http.get(path).json() == created.json()


def test_a_list_shows_what_another_process_acknowledged(tmp_path: Path, versions: dict[str, Any]) -> None:
    with serving(Settings(data=tmp_path, poll_seconds=60)) as served:
        assert served.register(versions["plain"]).status_code == 201
        path = served.gallery("plain")
        number = served.runtime.replica.find(path.rpartition("/")[2]).id
        one = NewItem("a", {}, "supplied", np.ones(3, np.float32))
        with served.runtime.database.write() as connection:
            version_id = served.runtime.registry.named("plain").id
            store_items(connection, number, version_id, [one], take_seq(connection, number, 1))

        (listed,) = served.http.get("/galleries").json()["galleries"]

        assert (listed["items"], listed["loaded"]) == (1, True)
        assert listed == served.http.get(path).json()


def test_items_of_a_gallery_that_is_not_loaded_are_counted_once_for_a_state(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, counted = served.filled(pictures), []
    name = path.rpartition("/")[2]
    number = served.runtime.replica.find(name).id

    def counting(connection: Any, gallery_id: int, order: Any) -> Any:
        counted.append(gallery_id)
        return live_items_by_version(connection, gallery_id, order)

    def shown() -> tuple[int, dict[str, int], bool]:
        served.runtime.replica.cache.drop(number)
        (one,) = [one for one in served.http.get("/galleries").json()["galleries"] if one["name"] == name]
        return one["items"], one["mix"], one["loaded"]

    monkeypatch.setattr(item_counts, "live_items_by_version", counting)

    assert shown() == shown() == (20, {"v1": 20}, False)
    assert counted.count(number) == 1
    served.http.post(f"{path}/items:delete", json={"ids": ["i0"]})
    assert shown() == (19, {"v1": 19}, False)
    served.http.post(f"{path}/deployments", json={"version": "v2"})
    served.http.post(f"{path}/items", json={"items": [{"id": "i1", "embedding": [1, 0, 0, 0, 0, 0]}], "version": "v2"})
    assert shown() == (19, {"v1": 18, "v2": 1}, False)
    served.http.post(f"{path}/rollback", json={"reason": "back"})
    assert shown() == (19, {"v1": 19}, False)
