"""An emulator of S3 (moto's server) as a separate process that can be stopped and restarted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from s3fs import S3FileSystem

from regraft.connection import certificates
from staging.processes.ports import free_port

KEYS = {"AWS_ACCESS_KEY_ID": "regraft", "AWS_SECRET_ACCESS_KEY": "regraft-secret", "AWS_DEFAULT_REGION": "us-east-1"}


class ObjectStore:
    """Listens on a port of this machine; its content is lost when it stops."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of clients."""
        return {**KEYS, "AWS_ENDPOINT_URL_S3": self.url}

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with Path(os.devnull).open("wb") as nothing:
            self._process = subprocess.Popen(command, stdout=nothing, stderr=nothing)
        deadline = time.monotonic() + 60
        while True:
            assert self._process.poll() is None, "the emulator of S3 ended"
            assert time.monotonic() < deadline, "the emulator of S3 does not answer"
            try:
                httpx.get(f"{self.url}/moto-api/", timeout=5, verify=certificates())
            except httpx.TransportError:
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def bucket(self) -> str:
        """The URL of a new bucket with a prefix."""
        name = f"b{uuid.uuid4().hex}"
        httpx.put(f"{self.url}/{name}", timeout=10, verify=certificates()).raise_for_status()
        return f"s3://{name}/regraft/images"


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """An emulator that runs until the end of the block."""
    made = ObjectStore()
    S3FileSystem.clear_instance_cache()  # cached clients would use an earlier emulator
    try:
        made.start()
        yield made
    finally:
        made.stop()


@contextmanager
def reachable_object_store() -> Iterator[ObjectStore]:
    """An emulator that clients in this process find by its environment variables."""
    with object_store() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running
