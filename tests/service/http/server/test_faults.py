"""A full disk and a damaged database are told as what they are, a slow store holds up few; nothing is half applied."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete
from sqlalchemy.exc import SQLAlchemyError

import service.http.upgrades.edges
import service.http.upgrades.versions
from index.version import Version
from regraft.commands.doctor import doctor
from service.errors import DatabaseDamaged
from service.settings import Settings
from service.store import faults
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.image_store import blobs
from service.store.tables import evaluation_entry
from staging.api.edges import edge_archive
from staging.api.served import problem, serving
from staging.inputs.builders import make_version
from staging.processes.forked import environment, run


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def problems(served: Any) -> list[str]:
    return list(served.http.get("/health/ready").json()["problems"])


def test_a_store_that_is_slow_holds_up_no_query_and_no_readiness(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = served.filled(pictures[:3])
    answers, waiting = threading.Event(), threading.Semaphore(0)

    def slow(*_: object) -> bytes:
        waiting.release()
        answers.wait(60)
        raise blobs.StoreUnreachable("the store is slow")

    for name in ("write", "fetch"):
        monkeypatch.setattr(blobs.Blobs, name, slow)
    writers, readers = served.runtime.settings.threads, 40
    with ThreadPoolExecutor(writers + readers) as clients:
        asked = [clients.submit(served.ingest, path, {"new": pictures[0]}) for _ in range(writers)]
        asked += [clients.submit(served.http.get, f"{path}/items/i0/image") for _ in range(readers)]
        try:
            for _ in asked:
                assert waiting.acquire(timeout=30)
            for asked_for in ("/health/ready", str(served.http.base_url).replace("/v1/", "/metrics")):
                assert served.http.get(asked_for, timeout=10).status_code == 200
            assert served.query(path, pictures[2], k=1).json()["results"][0]["matches"][0]["id"] == "i2"
        finally:
            answers.set()
    assert {answer.result().json()["code"] for answer in asked} == {"store_unreachable"}


@pytest.mark.parametrize("what", ["version", "edge", "images"])
def test_a_full_disk_is_told_and_readiness_tells_it_until_there_is_space(
    served: Any,
    versions: dict[str, Version],
    pictures: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    made = make_version(tmp_path / "v", f"full-{what}", 6, edges=[(versions["v1"], "truncate")])
    path = served.gallery("v1")
    monkeypatch.setattr(service.http.upgrades.versions, "sync_all", full)
    monkeypatch.setattr("service.upgrades.edges.changes.sync_all", full)
    monkeypatch.setattr(blobs, "sync_all", full)
    monkeypatch.setattr(faults.DiskSpace, "_accepts_write", lambda self: False)

    send = {
        "version": lambda: served.register(made),
        "edge": lambda: served.http.post(
            "/edges",
            data={"new": "v2", "old": "v1"},
            files={"archive": ("e.zip", edge_archive(zero_padded(made), "v1"))},
        ),
        "images": lambda: served.ingest(path, {"a": pictures[0]}),
    }[what]
    assert problem(send(), 503, "storage_full")["request_id"] in caplog.text
    assert any("is full" in told for told in problems(served))
    assert served.http.get(path).json()["items"] == 0

    monkeypatch.undo()
    served.runtime.blobs.check_again()  # as its own thread does every half minute
    assert not any("is full" in told for told in problems(served))
    assert send().status_code in {200, 201}


def zero_padded(version: Version) -> Version:
    place = version.folder / "edges" / "v1" / "edge.json"
    place.write_text(place.read_text().replace("truncate", "zero_pad"))
    return version


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_form_that_no_more_files_can_be_opened_for_may_be_sent_again(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def none_left(*_: Any, **__: Any) -> None:
        raise OSError(number, "Too many open files")

    path = served.gallery("v1")
    with monkeypatch.context() as patch:
        patch.setattr("starlette.formparsers.SpooledTemporaryFile", none_left)
        problem(served.ingest(path, {"a": pictures[0]}), 503, "too_many_files")

    assert served.ingest(path, {"a": pictures[0]}).json()["new"] == 1


def test_a_database_without_space_is_a_full_disk(served: Any) -> None:
    """SQLite's own answer, from a file that may not grow."""
    path = served.gallery("v1")
    items = [{"id": str(n), "embedding": [1, 2, 3, 4], "metadata": {"note": "x" * 3000}} for n in range(50)]
    writer = served.runtime.database._writer
    with writer.connect() as connection:
        pages = connection.exec_driver_sql("pragma page_count").scalar()
        connection.exec_driver_sql(f"pragma max_page_count={pages}")
        connection.connection.cursor()
    try:
        problem(served.http.post(f"{path}/items", json={"items": items}), 503, "storage_full")
    finally:
        with writer.connect() as connection:
            connection.exec_driver_sql("pragma max_page_count=1073741823")
    assert served.http.get(path).json()["items"] == 0
    assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200


def test_little_space_is_told_before_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 99 << 20})
    monkeypatch.setattr("service.store.faults.shutil.disk_usage", lambda folder: usage)

    assert "99 MiB left, less than 100 MiB" in (faults.DiskSpace(tmp_path, 100 << 20).problem() or "")
    assert faults.DiskSpace(tmp_path, 99 << 20).problem() is None


def test_what_the_service_may_not_write_to_is_told(
    served: Any, versions: dict[str, Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(place: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(place))

    with monkeypatch.context() as patch:
        patch.setattr("service.store.faults.os.access", lambda place, _: place.name != "versions")
        assert problems(served) == [f"the service has no permission to write to {served.runtime.settings.versions}"]
        patch.setattr("index.incoming.Path.mkdir", denied)
        told = problem(served.register(versions["v2"]), 503, "storage_read_only")
        assert str(served.runtime.settings.versions) in told["detail"]


def test_a_database_that_may_only_be_read_is_told(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(self: Database, **_: Any) -> None:
        with self.lookup() as connection:
            connection.exec_driver_sql("pragma query_only=1")
            try:
                connection.execute(delete(evaluation_entry))
            finally:
                connection.exec_driver_sql("pragma query_only=0")

    monkeypatch.setattr(Database, "write", reading)
    told = problem(served.http.post("/galleries", json={"name": "late"}), 503, "storage_read_only")

    assert "nothing was changed" in told["detail"]


def overwrite_header(path: Path) -> None:
    path.write_bytes(b"not a database " * 500)


def overwrite_pages(path: Path) -> None:
    """Of tables and indexes: the schema, on the first page, stays readable."""
    content = bytearray(path.read_bytes())
    content[3 * 4096 : 40 * 4096] = os.urandom(37 * 4096)
    path.write_bytes(content)


def overwrite_an_index(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        asked = "select rootpage from sqlite_master where name = 'ix_item_gallery_id_seq'"
        (page,) = connection.execute(asked).fetchone()
    content = bytearray(path.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = os.urandom(4096)
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lose_a_row(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        columns = "evaluation_id, number, label, metadata"
        connection.execute(f"insert into evaluation_entry ({columns}) values (99, 0, 'null', '{{}}')")


@pytest.mark.parametrize("damage", [overwrite_header, overwrite_pages, cut_off, lose_a_row])
def test_a_damaged_database_is_named_with_what_to_do(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    settings = Settings(data=tmp_path)
    upgrade(settings)
    damage(tmp_path / "regraft.db")

    with pytest.raises(DatabaseDamaged, match=r"regraft\.db is damaged .* restore it from a backup") as caught:
        upgrade(settings)
    assert ".recover" in caught.value.message


def test_the_doctor_looks_at_all_of_a_file_that_is_too_large_to_be_looked_at_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGRAFT_DATA", str(tmp_path))
    upgrade(Settings())
    doctor(None, fix=False)
    assert "checking" not in capsys.readouterr().err
    overwrite_an_index(tmp_path / "regraft.db")
    monkeypatch.setattr(faults, "CHECKED_BYTES", 0)
    faults.check_sqlite(Settings().database_url)

    with pytest.raises(DatabaseDamaged, match=r"regraft\.db is damaged"):
        doctor(None, fix=False)
    assert "checking 0 MiB" in capsys.readouterr().err


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    (tmp_path / "regraft.db").touch()
    upgrade(Settings(data=tmp_path))


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("worker",), ("doctor",)])
def test_each_command_ends_with_a_sentence(tmp_path: Path, command: tuple[str, ...]) -> None:
    overwrite_header(tmp_path / "regraft.db")

    code, _, said = run(["-m", "regraft", *command, "--data", tmp_path], environment(), tmp_path)

    assert code == 1
    assert "Traceback" not in said
    assert "restore it from a backup" in " ".join(said.split())


@pytest.mark.parametrize("change", ["replace", "delete item", "delete items", "delete evaluation", "delete gallery"])
def test_images_stay_while_the_commit_that_forgets_them_has_not_come(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = served.gallery("v1")
    assert served.ingest(path, {"a": pictures[0], "b": pictures[1]}).status_code == 200
    entries = json.dumps([{"image": str(n), "label": n} for n in range(2)])
    files = [("images", (str(n), pictures[n])) for n in range(2)]
    made = served.http.post(f"{path}/evaluations", data={"name": "e", "entries": entries}, files=files)
    assert made.status_code == 201, made.text
    store = Path(served.runtime.settings.data) / "blobs"
    before = {place: place.read_bytes() for place in store.rglob("*") if place.is_file()}
    real = Database.write

    @contextmanager
    def failing(self: Database, **options: Any) -> Iterator[Any]:
        with real(self, **options) as connection:
            yield connection
            raise SQLAlchemyError("no commit")  # which threads beside the request survive, too

    monkeypatch.setattr(Database, "write", failing)
    answer = {
        "replace": lambda: served.ingest(path, {"a": pictures[2]}),
        "delete item": lambda: served.http.delete(f"{path}/items/a"),
        "delete items": lambda: served.http.post(f"{path}/items:delete", json={"ids": ["a", "b"]}),
        "delete evaluation": lambda: served.remove(f"{path}/evaluations/{made.json()['id']}"),
        "delete gallery": lambda: served.remove(path),
    }[change]()
    assert answer.status_code == 500
    monkeypatch.undo()

    assert {place: place.read_bytes() for place in before if place.exists()} == before
    assert served.http.get(path).json()["items"] == 2


def test_a_database_that_is_damaged_while_the_service_runs_is_told(
    tmp_path: Path, versions: dict[str, Version], caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data=tmp_path / "data")
    with serving(settings) as served:
        assert served.register(versions["v1"]).status_code == 201
        path = served.gallery("v1")
        items = [{"id": f"i{n}", "embedding": [1, n, 0, 0], "metadata": {"text": "x" * 500}} for n in range(200)]
        assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200
        with closing(sqlite3.connect(settings.data / "regraft.db")) as other:
            other.execute("pragma wal_checkpoint(truncate)")
            root, size = other.execute(
                "select rootpage, (select * from pragma_page_size) from sqlite_master where name = 'item'"
            ).fetchone()
        with (settings.data / "regraft.db").open("r+b") as file:
            file.seek((root - 1) * size)
            file.write(b"\xff" * size)

        assert problem(served.http.get(f"{path}/items"), 503, "database_damaged")["request_id"] in caplog.text
        probe = problem(served.http.get("/health/ready"), 503, "database_damaged")
        assert probe["request_id"] not in caplog.text  # probes repeat, and would fill the log
        body = {"version": "v1", "embeddings": [[1, 2, 3, 4]]}
        assert served.http.post(f"{path}/query", json=body).status_code == 200  # answered from memory
        problem(served.http.post(f"{path}/items", json={"items": items[:1]}), 503, "database_damaged")
        assert served.http.get("/health").status_code == 200
