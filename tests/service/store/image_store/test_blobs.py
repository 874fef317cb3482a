from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from s3fs import S3FileSystem

from index.errors import RegraftError
from service.errors import StorageFull
from service.store.image_store import blobs as store_of_blobs
from service.store.image_store.blobs import MARKER, MAX_PARALLEL, Blobs, StoreUnreachable
from service.store.image_store.object_store import S3
from staging.s3 import KEYS, ObjectStore, object_store


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStore]:
    with object_store() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(params=["file", "memory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "s3":
        return Blobs(request.getfixturevalue("s3").bucket(), list, str)
    return Blobs(f"{request.param}://{tmp_path / 'blobs'}", list, str)


def test_what_is_written_can_be_read(blobs: Blobs) -> None:
    images = [b"a", b"", b"\x00" * 100_000, b"a"]

    keys = blobs.write(3, iter(images))

    assert [blobs.read(key) for key in keys] == images
    assert len(set(keys)) == 4
    assert all(key.startswith("3/") for key in keys)


def test_many_are_fetched_in_order_and_one_that_is_gone_is_none(blobs: Blobs) -> None:
    images = [b"%d" % n for n in range(2 * MAX_PARALLEL)]
    keys = blobs.write(1, images)
    blobs.remove([keys[3]])

    assert list(blobs.fetch_all(keys)) == [None if n == 3 else image for n, image in enumerate(images)]
    assert list(blobs.fetch_all([])) == []
    reads = list(blobs.read_all(keys))
    assert [read() for n, read in enumerate(reads) if n != 3] == [*images[:3], *images[4:]]
    with pytest.raises(FileNotFoundError):
        reads[3]()


def test_a_store_over_the_network_is_asked_for_many_at_once_and_for_no_more_once_it_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs, asked = Blobs(f"memory://{tmp_path}", list, str), threading.Barrier(MAX_PARALLEL)
    numbers = itertools.count()

    def away(_: str) -> bytes:
        next(numbers)
        asked.wait(30)
        raise StoreUnreachable("away")

    monkeypatch.setattr(blobs, "fetch", away)
    with pytest.raises(StoreUnreachable):
        list(blobs.fetch_all([f"1/{n}" for n in range(10 * MAX_PARALLEL)]))

    assert next(numbers) == MAX_PARALLEL


class Server(ThreadingHTTPServer):
    """An S3 that answers once so many requests are under way, and no PUT before it is told to."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.asked: list[str] = []
        self.under_way = threading.Barrier(1)
        self.takes = threading.Event()

    def handle_error(self, *_: Any) -> None:
        """Nothing: clients give up."""


class Asked(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def handle_expect_100(self) -> bool:
        self.server.takes.wait(30)
        return super().handle_expect_100()

    def do_GET(self) -> None:
        self.server.asked.append(self.command)
        self.server.under_way.wait(20)
        self.send_response(200)
        self.send_header("content-length", "1")
        self.end_headers()
        self.wfile.write(b"x")

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        self.server.takes.wait(30)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    S3FileSystem.clear_instance_cache()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.server_address[1]}"}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.takes.set()
    server.shutdown()
    server.server_close()
    S3FileSystem.clear_instance_cache()


def test_images_of_s3_take_one_request_each_and_many_are_under_way_at_once(stub: Server) -> None:
    readers = 2
    stub.under_way = threading.Barrier(readers * MAX_PARALLEL)
    blobs, keys = Blobs("s3://bucket/images", list, str), [f"1/{n}" for n in range(MAX_PARALLEL)]

    with ThreadPoolExecutor(readers) as pool:
        read = list(pool.map(lambda _: [read() for read in blobs.read_all(keys)], range(readers)))

    assert read == [[b"x"] * MAX_PARALLEL] * readers
    assert stub.asked == ["GET"] * readers * MAX_PARALLEL


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 is given up soon."""
    config: Any = S3["config_kwargs"]
    monkeypatch.setitem(S3, "config_kwargs", {**config, "read_timeout": 0.2, "retries": {"total_max_attempts": 1}})


@pytest.mark.usefixtures("quick")
def test_an_s3_that_hangs_is_asked_once_and_away(stub: Server) -> None:
    stub.under_way = threading.Barrier(2)
    blobs = Blobs("s3://bucket/images", list, str)

    for read in (blobs.read, blobs.fetch, lambda key: blobs.read_part(key, 0, 1)):
        stub.asked.clear()
        with pytest.raises(StoreUnreachable, match="Read timeout"):
            read("1/a")
        assert stub.asked == ["GET"]
        stub.under_way.abort()
        stub.under_way = threading.Barrier(2)
    assert "Read timeout" in (blobs.problem or "")


@pytest.mark.usefixtures("quick")
def test_an_s3_that_hangs_while_it_is_written_to_is_away_soon(stub: Server) -> None:
    blobs = Blobs("s3://bucket/images", list, lambda: "x")

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(blobs.write, 1, [b"image"])
        try:
            error = written.exception(20)
        finally:
            stub.takes.set()

    assert isinstance(error, StoreUnreachable)
    assert "Read timeout" in str(error)


def test_what_is_removed_is_gone_and_the_rest_stays(blobs: Blobs, caplog: pytest.LogCaptureFixture) -> None:
    kept, gone = blobs.write(1, [b"kept", b"gone"])

    blobs.remove([gone, gone, "1/never"])

    assert blobs.read(kept) == b"kept"
    with pytest.raises(FileNotFoundError):
        blobs.read(gone)
    assert not caplog.records


def test_a_gallery_is_removed_whole(blobs: Blobs, caplog: pytest.LogCaptureFixture) -> None:
    (gone,), (kept,) = blobs.write(1, [b"gone"]), blobs.write(11, [b"kept"])

    blobs.remove_gallery(1)
    blobs.remove_gallery(1)

    assert blobs.read(kept) == b"kept"
    with pytest.raises(FileNotFoundError):
        blobs.read(gone)
    assert not caplog.records


def test_everything_there_is_is_listed_with_its_age(blobs: Blobs) -> None:
    assert list(blobs.all()) == []
    keys = blobs.write(1, [b"a", b"b"]) + blobs.write(2, [b"c"])

    found = dict(blobs.all())

    assert sorted(found) == sorted(keys)
    assert all(0 <= age < 600 for age in found.values())
    assert [blobs.exists(key) for key in (*keys, "1/never")] == [True, True, True, False]
    blobs.remove(keys)
    assert list(blobs.all()) == []


def test_an_age_is_by_the_clock_of_the_store(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = blobs.write(1, [b"a"])
    here = time.time
    monkeypatch.setattr(store_of_blobs, "time", SimpleNamespace(time=lambda: here() + 7200))

    assert [key for key, age in blobs.all() if age < 600] == keys


def test_what_is_in_a_store_that_takes_no_writes_is_listed_with_its_age(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = blobs.write(1, [b"a"])
    monkeypatch.setattr(blobs, "_put", refused)

    assert [key for key, age in blobs.all() if age < 600] == keys


def refused(*_: object) -> None:
    raise PermissionError("read-only")


def test_files_of_others_are_not_told_of(blobs: Blobs) -> None:
    (key,) = blobs.write(1, [b"a"])
    ours = (f"vectors/1/7-{'0' * 16}.parquet", "folders/versions/0.zip")
    for name in (
        *ours,
        "notes.txt",
        "folders/notes",
        "1/mine.jpg",
        "holiday/1/0.png",
        "vectors/notes",
        f"x/{key}",
        f"{key}.bak",
    ):
        blobs.put(name, b"x")

    assert [name for name, _ in blobs.all()] == [key]
    assert [name for place in (blobs.all_vector_files(), blobs.all_folders()) for name, _ in place] == [*ours]


def test_what_another_process_writes_or_removes_is_seen_at_once(blobs: Blobs) -> None:
    """No listing is remembered."""
    (key,) = blobs.write(1, [b"a"])
    assert [name for name, _ in blobs.all()] == [key]
    blobs._store.__class__(**blobs._store.storage_options).rm_file(blobs._path(key))

    assert not blobs.exists(key)
    assert list(blobs.all()) == []


def test_many_at_once_keep_their_order(blobs: Blobs) -> None:
    images = [str(n).encode() for n in range(3 * MAX_PARALLEL)]

    keys = blobs.write(1, iter(images))

    assert [blobs.read(key) for key in keys] == images


@pytest.mark.parametrize("blobs", ["s3", "memory"], indirect=True)
def test_a_write_of_many_that_fails_leaves_no_image(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Blobs._put

    def failing(self: Blobs, key: str, content: bytes) -> None:
        if content == b"13":
            raise OSError("connection reset")
        put(self, key, content)

    monkeypatch.setattr(Blobs, "_put", failing)
    with pytest.raises(StoreUnreachable, match="connection reset"):
        blobs.write(1, [str(n).encode() for n in range(40)])

    assert list(blobs.all()) == []


def test_a_full_store_is_a_problem_until_what_was_refused_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs, room = Blobs(f"file://{tmp_path}", list, str), 100
    write = blobs._store.pipe_file

    def with_room(path: str, content: bytes) -> None:
        if len(content) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(blobs._store, "pipe_file", with_room)
    with pytest.raises(StorageFull):
        blobs.put("vectors/1/1-x.parquet", bytes(5000))
    blobs.check_again()
    assert "is full" in str(blobs.problem)

    room = 5000
    blobs.check_again()
    assert blobs.problem is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [MARKER]


def test_a_store_that_is_read_and_takes_nothing_is_a_problem_until_it_does(tmp_path: Path) -> None:
    blobs = Blobs(f"file://{tmp_path}", list, str)
    (first,) = blobs.write(1, [b"first"])
    (tmp_path / "2").touch()  # where the folder of a gallery would be, as what may not be written is for root, too

    with pytest.raises(StoreUnreachable):
        blobs.write(2, [b"second"])
    assert blobs.read(first) == b"first"
    assert "cannot be written" in str(blobs.problem)

    (tmp_path / "2").unlink()
    blobs.write(2, [b"second"])
    assert blobs.problem is None


def test_an_object_store_that_is_away_says_so_and_is_used_again_when_it_is_back(s3: ObjectStore) -> None:
    url = s3.bucket()
    named: list[str] = []
    blobs = Blobs(url, lambda: named, str)
    named += blobs.write(1, [b"a"])
    s3.stop()

    for work in (
        lambda: blobs.write(1, [b"b"]),
        lambda: blobs.read(named[0]),
        lambda: blobs.fetch(named[0]),
        lambda: blobs.exists(named[0]),
        lambda: list(blobs.all()),
    ):
        with pytest.raises(StoreUnreachable, match="s3://"):
            work()
    assert "unreachable" in str(blobs.problem)

    s3.start()  # an empty one: no bucket, no marker, none of what rows name
    with pytest.raises(StoreUnreachable):
        blobs.check()
    httpx.put(f"{s3.url}/{url.split('/')[2]}")
    with pytest.raises(StoreUnreachable, match="nor any image; REGRAFT_DATA and REGRAFT_BLOBS_URL must"):
        blobs.fetch(named[0])
    named.clear()
    assert blobs.read(*blobs.write(1, [b"c"])) == b"c"
    assert blobs.problem is None


@pytest.mark.parametrize("url", ["s4://bucket/x", "s3://"])
def test_a_store_that_cannot_be_opened_is_named(url: str) -> None:
    with pytest.raises(RegraftError, match="REGRAFT_BLOBS_URL"):
        Blobs(url, list, str)


def test_keys_in_a_url_of_s3_are_refused_and_not_shown() -> None:
    with pytest.raises(RegraftError, match="AWS_SECRET_ACCESS_KEY") as refused:
        Blobs("s3://AKIA1234:secret/one@bucket/images", list, str)
    assert "secret/" not in str(refused.value)

    assert Blobs("s3://arn:aws:s3:eu-west-1:1234:accesspoint/images", list, str).public_url.startswith("s3://arn:")


def test_nothing_to_write_is_nothing_written(tmp_path: Path) -> None:
    assert Blobs(f"file://{tmp_path}", list, str).write(1, []) == []
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [MARKER]


def test_a_write_that_fails_in_the_middle_leaves_no_image(tmp_path: Path) -> None:
    def images() -> Iterator[bytes]:
        yield b"first"
        raise ValueError("unreadable")

    with pytest.raises(ValueError, match="unreadable"):
        Blobs(f"file://{tmp_path}", list, str).write(1, images())

    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [MARKER]


def test_an_image_that_cannot_be_removed_is_told_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blobs = Blobs(f"file://{tmp_path}", list, str)
    (tmp_path / "1" / "folder" / "below").mkdir(parents=True)

    with caplog.at_level(logging.WARNING):
        left = blobs.remove(["1/folder", "1/never"])

    assert left == ["1/folder"]
    assert "1/folder" in caplog.text


def test_new_images_are_handed_to_the_disk_before_their_folder_and_that_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name survives a power cut only once the folder it is in was written."""
    store = Blobs(f"file://{tmp_path / 'blobs'}", list, str)
    store.check()
    opened: dict[int, Path] = {}
    synced: list[Path] = []
    real_open, real_sync = os.open, os.fsync

    def opening(path: Any, *rest: Any, **more: Any) -> int:
        handle = real_open(path, *rest, **more)
        opened[handle] = Path(path)
        return handle

    def syncing(handle: int) -> None:
        real_sync(handle)
        synced.append(opened[handle])

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "fsync", syncing)
    keys = store.write(7, [b"one", b"two"])

    places = [tmp_path / "blobs" / key for key in keys]
    assert set(synced[:2]) == set(places)
    assert set(synced[2:]) == {tmp_path / "blobs" / "7", tmp_path / "blobs"}
