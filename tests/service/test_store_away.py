"""The image store out of reach, and single images that cannot be read: an outage costs no item an attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from index.version import Version
from service.backfills import attempts
from service.doctor.examination import Doctor
from service.settings import Settings
from service.store.image_store import recovery
from service.store.image_store.blobs import Blobs, StoreUnreachable
from service.store.tables import backfill_failure, item
from staging.api.served import problem, serving
from staging.states.working import SteppedWorker
from staging.waiting import until


@pytest.fixture
def some(pictures: list[bytes]) -> list[bytes]:
    return pictures[:6]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(data=tmp_path_factory.mktemp("away") / "data", lease_seconds=0.05)


@pytest.fixture(scope="module")
def server(settings: Settings, versions: dict[str, Version]) -> Iterator[Any]:
    with serving(settings) as running:
        for name in ("v1", "v2"):
            running.register(versions[name])
        yield running


@pytest.fixture
def served(server: Any, some: list[bytes]) -> Iterator[Any]:
    """Six items of v1, with v2 current."""
    server.path = server.gallery("v1")
    server.ingest(server.path, {f"i{n}": picture for n, picture in enumerate(some)})
    assert server.http.post(f"{server.path}/deployments", json={"version": "v2"}).status_code == 201
    yield server
    server.remove(server.path)


@pytest.fixture
def a_worker(settings: Settings) -> Iterator[SteppedWorker]:
    made = SteppedWorker(settings)
    yield made
    made.close()


@pytest.fixture(params=["gone", "not mounted"])
def away(settings: Settings, request: pytest.FixtureRequest) -> tuple[Callable[[], None], Callable[[], None]]:
    """Takes the store away, and brings it back."""
    there, elsewhere = settings.data / "blobs", settings.data / "elsewhere"

    def take() -> None:
        there.rename(elsewhere)
        if request.param == "not mounted":
            there.mkdir()

    def bring() -> None:
        if there.exists():
            there.rmdir()
        elsewhere.rename(there)

    return take, bring


def blob_of(connection: Connection, name: str) -> str:
    newest = select(item.c.blob).where(item.c.external_id == name, item.c.blob.is_not(None)).order_by(item.c.id.desc())
    return str(connection.execute(newest.limit(1)).scalar_one())


def start(served: Any, **fields: Any) -> int:
    started = served.http.post(f"{served.path}/backfills", json=fields)
    assert started.status_code == 202, started.text
    return int(started.json()["id"])


def shown(served: Any, number: int) -> tuple[str, int, int, int]:
    found = served.http.get(f"/backfills/{number}").json()
    return found["state"], found["done"], found["failed"], found["retrying"]


def drain(worker: SteppedWorker, served: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work to the end; pauses and leases are over at once."""
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 0.0)
    for _ in range(10_000):
        if not worker.step() and shown(served, number)[0] == "done":
            return
    pytest.fail("the backfill does not end")


@pytest.mark.parametrize("size", [1, 6])
def test_an_outage_uses_up_no_attempt_and_gives_no_item_up(
    served: Any, a_worker: SteppedWorker, away: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, bring = away
    number = start(served, chunk_size=size, attempts=1)
    take()
    for _ in range(8):
        assert not a_worker.step()
    assert shown(served, number) == ("running", 0, 0, 0)
    with served.runtime.database.lookup() as connection:
        assert connection.execute(select(func.count()).select_from(backfill_failure)).scalar() == 0

    bring()
    drain(a_worker, served, number, monkeypatch)

    assert shown(served, number) == ("done", 6, 0, 0)


def test_one_image_that_cannot_be_read_is_tried_again_and_given_up_alone(
    served: Any, a_worker: SteppedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable(served, "i3", monkeypatch)
    number = start(served, chunk_size=1, attempts=3)

    drain(a_worker, served, number, monkeypatch)

    assert shown(served, number) == ("done", 5, 1, 0)
    (failure,) = served.http.get(f"/backfills/{number}/failures").json()["failures"]
    assert (failure["item"], failure["code"], failure["attempts"]) == ("i3", "image_unreadable", 3)
    assert "Input/output" in failure["reason"]


def in_the_way(served: Any, *names: str) -> None:
    """Folders lie where images were: the system refuses to read them as it does for broken files and wrong rights."""
    with served.runtime.database.lookup() as connection:
        keys = [blob_of(connection, name) for name in names]
    for key in keys:
        path = served.runtime.settings.data / "blobs" / key
        path.unlink()
        path.mkdir()


def test_a_chunk_of_nothing_but_unreadable_images_is_given_up_and_holds_up_no_other(
    served: Any, a_worker: SteppedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way(served, "i2", "i3")
    number = start(served, chunk_size=2, attempts=2, order="oldest")

    drain(a_worker, served, number, monkeypatch)

    assert shown(served, number) == ("done", 4, 2, 0)
    failures = served.http.get(f"/backfills/{number}/failures").json()["failures"]
    assert {(f["item"], f["code"], f["attempts"]) for f in failures} == {
        ("i2", "image_unreadable", 2),
        ("i3", "image_unreadable", 2),
    }


def test_an_unreadable_image_is_one_clear_error_wherever_it_is_asked_for(served: Any) -> None:
    names = [f"i{n}" for n in range(6)]
    in_the_way(served, "i2")

    shown = problem(served.http.get(f"{served.path}/items/i2/image"), 503, "image_unreadable")
    assert "directory" in shown["detail"]
    problem(
        served.http.post(f"{served.path}/query", json={"items": names, "k": 1}), 503, "image_unreadable", "/items/2"
    )
    estimated = served.http.post(f"{served.path}/backfills", json={}, params={"dry_run": True})
    assert (estimated.status_code, estimated.json()["items"]) == (200, 6)
    back = served.http.post(f"{served.path}/rollback")
    assert back.status_code == 201
    measured = served.http.post(f"{served.path}/gates", json={"version": "v2"})
    assert (measured.status_code, measured.json()["unreadable"]) == (201, 1)

    in_the_way(served, "i0", "i1", "i3", "i4")
    refused = served.http.post(f"{served.path}/gates", json={"version": "v2"})
    problem(refused, 422, "invalid_argument")


def unreadable(served: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with served.runtime.database.lookup() as connection:
        key = blob_of(connection, name)
    read = Blobs.read

    def broken(self: Blobs, asked: str) -> bytes:
        if asked == key:
            raise OSError("Input/output error")
        return read(self, asked)

    monkeypatch.setattr(Blobs, "read", broken)


class TestRemote:
    def test_an_outage_is_told_and_no_image_is_said_to_be_missing(self, served: Any, away: Any) -> None:
        take, bring = away
        start(served, chunk_size=6)
        task = served.http.post("/work:claim", json={"worker": "w"}).json()
        place, params = f"/work/{task['chunk']}", {"lease": task["lease"]}

        take()
        refused = served.http.get(place, params=params)
        assert (refused.status_code, refused.json()["code"]) == (503, "store_unreachable")
        bring()

        assert all(i["image"] for i in served.http.get(place, params=params).json()["items"])

    def test_one_image_that_cannot_be_read_holds_up_no_other(
        self, served: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unreadable(served, "i3", monkeypatch)
        start(served, chunk_size=6)
        task = served.http.post("/work:claim", json={"worker": "w"}).json()

        items = served.http.get(f"/work/{task['chunk']}", params={"lease": task["lease"]}).json()["items"]

        told = {i["id"]: (i["image"] is None, i["problem"]) for i in items}
        assert told.pop("i3") == (True, "Input/output error")
        assert set(told.values()) == {(False, None)}


def test_what_needs_the_store_is_refused_as_a_whole_and_queries_go_on(
    served: Any, away: Any, pictures: list[bytes]
) -> None:
    take, _ = away
    data = served.runtime.settings.data
    count = served.http.get(served.path).json()["items"]
    take()
    # Nothing can be written either: a file lies where the folder of the images was.
    if (data / "blobs").exists():
        (data / "blobs").rmdir()
    (data / "blobs").write_bytes(b"")

    stored = served.ingest(served.path, {"new": pictures[0]})
    assert (stored.status_code, stored.json()["code"]) == (503, "store_unreachable")
    image = served.http.get(f"{served.path}/items/i0/image")
    assert (image.status_code, image.json()["code"]) == (503, "store_unreachable")
    for route, body in (
        ("query", {"items": ["i0"], "k": 1}),
        ("gates", {"version": "v1"}),
        ("backfills?dry_run=true", {}),
    ):
        asked = served.http.post(f"{served.path}/{route}", json=body)
        assert (asked.status_code, asked.json()["code"]) == (503, "store_unreachable"), route
    matches = served.query(served.path, pictures[2], k=1).json()["results"][0]["matches"]
    assert matches[0]["id"] == "i2"
    assert served.http.get(served.path).json()["items"] == count

    (data / "blobs").unlink()
    if (data / "elsewhere").exists():
        (data / "elsewhere").rename(data / "blobs")
    assert served.http.get(f"{served.path}/items/i0/image").content == pictures[0]
    assert served.ingest(served.path, {"new": pictures[0]}).status_code == 200


def test_readiness_tells_an_outage_no_longer_than_it_lasts(
    some: list[bytes], versions: dict[str, Version], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if nobody reads or stores an image: a process whose first look failed would be degraded until its end."""
    monkeypatch.setattr(recovery, "RETRY_SECONDS", 0.01)
    settings = Settings(data=tmp_path)
    with serving(settings) as served:
        served.register(versions["v1"])
        served.ingest(served.gallery("v1"), {"i0": some[0]})
    (tmp_path / "blobs").rename(tmp_path / "elsewhere")

    with serving(settings) as served:
        assert "unreachable" in served.http.get("/health/ready").json()["problems"][0]
        (tmp_path / "elsewhere").rename(tmp_path / "blobs")
        until(lambda: served.http.get("/health/ready").json()["problems"] == [])


def test_an_error_after_the_commit_leaves_the_images_of_what_is_stored(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreUnreachable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(served.runtime.replica, "apply_added", fail)
        problem(served.ingest(served.path, {"a": pictures[0]}), 503, "store_unreachable")
    assert served.http.get(f"{served.path}/items/a/image").content == pictures[0]


def test_an_image_that_is_gone_is_not_there_and_a_damaged_one_is_given_as_it_is(served: Any) -> None:
    with served.runtime.database.lookup() as connection:
        key, other = blob_of(connection, "i1"), blob_of(connection, "i2")
    served.runtime.blobs.remove([key])

    gone = served.http.get(f"{served.path}/items/i1/image")
    damaged = served.runtime.settings.data / "blobs" / other
    damaged.write_bytes(b"damaged")
    as_it_is = served.http.get(f"{served.path}/items/i2/image")

    assert (as_it_is.content, as_it_is.headers["content-type"]) == (b"damaged", "application/octet-stream")
    assert (gone.status_code, gone.json()["code"]) == (404, "no_image")


def test_a_new_database_leaves_the_images_of_another_one_alone(
    served: Any, settings: Settings, versions: dict[str, Version], some: list[bytes], tmp_path: Path
) -> None:
    beside = Settings(data=tmp_path / "data", blobs_url=settings.blobs_url)
    kept = dict(served.runtime.blobs.all()).keys()
    with serving(beside) as another:
        another.register(versions["v1"])
        number = served.runtime.replica.find(served.path.rpartition("/")[2]).id
        while another.runtime.replica.find((path := another.gallery("v1")).rpartition("/")[2]).id < number:
            pass  # until both have a gallery of this number
        refused = another.ingest(path, {"i0": some[0]})
        ready = another.http.get("/health/ready").json()
        another.remove(path)
        found = Doctor(beside, another.runtime.database).examine(fix=True)

    assert "another database" in problem(refused, 503, "store_unreachable")["detail"]
    assert "another database" in str(ready)
    assert [finding.code for finding in found] == ["store_unreachable"]
    assert dict(served.runtime.blobs.all()).keys() == kept
    assert served.http.get(f"{served.path}/items/i0/image").content == some[0]


@pytest.mark.parametrize("content", [b"", b"no image", b"cut"], ids=["empty", "other", "cut"])
def test_an_image_that_no_longer_decodes_is_given_up_alone_and_stays_reachable(
    served: Any, a_worker: SteppedWorker, pictures: list[bytes], content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.runtime.database.lookup() as connection:
        key = blob_of(connection, "i4")
    damaged = served.runtime.settings.data / "blobs" / key
    damaged.write_bytes(pictures[4][:40] if content == b"cut" else content)
    number = start(served, chunk_size=3)

    drain(a_worker, served, number, monkeypatch)

    assert shown(served, number) == ("done", 5, 1, 0)
    (failure,) = served.http.get(f"/backfills/{number}/failures").json()["failures"]
    assert (failure["item"], failure["code"], failure["attempts"], failure["version"]) == (
        "i4",
        "image_invalid",
        1,
        "v1",
    )
    loaded = served.runtime.replica.find(served.path.rpartition("/")[2])
    served.runtime.replica.refresh(loaded.id)
    matches = served.query(served.path, pictures[4], k=1).json()["results"][0]["matches"]
    assert (matches[0]["id"], matches[0]["version"]) == ("i4", "v1")
