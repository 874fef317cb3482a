"""`Blobs` on an S3: how many requests it takes, and what an S3 that hangs or is away costs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from s3fs import S3FileSystem

from index.errors import RegraftError
from service.store.image_store.blobs import MAX_PARALLEL, Blobs, StoreUnreachable
from service.store.image_store.object_store import S3
from staging.external.s3 import KEYS, ObjectStore


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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 is given up soon."""
    config: Any = S3["config_kwargs"]
    monkeypatch.setitem(S3, "config_kwargs", {**config, "read_timeout": 0.2, "retries": {"total_max_attempts": 1}})


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


def test_images_of_s3_take_one_request_each_and_many_are_under_way_at_once(stub: Server) -> None:
    readers = 2
    stub.under_way = threading.Barrier(readers * MAX_PARALLEL)
    blobs, keys = Blobs("s3://bucket/images", list, str), [f"1/{n}" for n in range(MAX_PARALLEL)]

    with ThreadPoolExecutor(readers) as pool:
        read = list(pool.map(lambda _: [read() for read in blobs.read_all(keys)], range(readers)))

    assert read == [[b"x"] * MAX_PARALLEL] * readers
    assert stub.asked == ["GET"] * readers * MAX_PARALLEL


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
