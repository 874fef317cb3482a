"""A real service in a process of its own, which benchmarks query over HTTP, and what it takes."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from index.engines.memory.segments import SETTLED_SECONDS
from index.version import Card, Edge, Version
from index.version_folder.archive import pack_version
from index.version_folder.folder import load_version, write_card, write_edge

SEALING_SECONDS = 3_600.0
RESTING_SECONDS, RESTING_SHARE = 5.0, 0.1
"""A service that takes no more than this share of a processor for so long has nothing left to build."""


@contextmanager
def served(scratch: Path, processes: int = 1, database_url: str = "") -> Iterator[tuple[str, int]]:
    """Its address and process id; `scratch` gets its log and its data, with the database unless `database_url`."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "regraft",
        "serve",
        "--port",
        str(port),
        "--workers",
        "0",
        "--processes",
        str(processes),
        "--data",
        str(data_of(scratch)),
    ]
    place = {"REGRAFT_DATABASE_URL": database_url} if database_url else {}
    log = (scratch / "log").open("w")
    service = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **place})
    try:
        yield f"http://127.0.0.1:{port}", service.pid
    finally:
        service.terminate()
        service.wait()


def data_of(scratch: Path) -> Path:
    return scratch / "d"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health/ready").is_success
    except httpx.TransportError:
        return False


@contextmanager
def client(url: str) -> Iterator[httpx.Client]:
    """A client, once the service is ready."""
    with httpx.Client(base_url=f"{url}/v1", timeout=600, trust_env=False) as http:
        while not answers(http):
            time.sleep(0.02)
        yield http


def register(http: httpx.Client, scratch: Path, card: Card, *edges: Edge) -> None:
    """Register a version of embeddings only, with its edges."""
    (folder := scratch / f"{card.name}-folder").mkdir()
    for edge in edges:
        write_edge(folder, edge)
    write_card(folder, card)
    upload(http, load_version(folder))


def upload(http: httpx.Client, version: Version) -> None:
    """Register a version of a folder."""
    pack_version(version.folder, archive := version.folder.parent / f"{version.name}.zip")
    http.post("/versions", files={"archive": archive.read_bytes()}).raise_for_status()


def wait_until_at_rest(pid: int) -> None:
    """After the last write; what has settled is sealed and merged."""
    until = time.monotonic() + SEALING_SECONDS
    time.sleep(SETTLED_SECONDS)
    spent, before = math.inf, cpu_seconds(pid)
    while spent > RESTING_SHARE * RESTING_SECONDS and time.monotonic() < until:
        time.sleep(RESTING_SECONDS)
        spent, before = cpu_seconds(pid) - before, cpu_seconds(pid)


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [
        child for thread in Path(f"/proc/{pid}/task").glob("*/children") for child in thread.read_text().split()
    ]
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
