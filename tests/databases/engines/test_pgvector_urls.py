"""The URL of the PostgreSQL with pgvector: what it says of sessions holds, and its password is not shown."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest

from index.engines.pgvector.connections import libpq_url
from index.engines.pgvector.engine import PgvectorEngine
from index.engines.remote.base import EngineUnavailable
from staging.external.postgres import Server


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:se%cret@127.0.0.1:1/x",
        "postgresql+asyncpg://me:secret@127.0.0.1:1/x",
        "postgresql://me:1@127.0.0.1:1/x?secret=1",
    ],
)
def test_one_that_cannot_be_read_is_not_repeated(url: str) -> None:
    with closing(PgvectorEngine(url)) as engine, pytest.raises(EngineUnavailable, match="its URL") as refused:
        engine.check()

    assert "cret" not in refused.value.message


def test_its_search_path_may_name_the_schema_of_pgvector(server: Server) -> None:
    url = server.create()
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        connection.execute("create schema extensions")
        try:
            connection.execute("create extension vector schema extensions")
        except psycopg.Error as error:
            pytest.skip(f"no pgvector here: {error}")

    with closing(PgvectorEngine(url)) as engine, pytest.raises(EngineUnavailable, match="search_path"):
        engine.check()
    with closing(PgvectorEngine(f"{url}&options=-csearch_path%3Dpublic,extensions")) as engine:
        engine.check()
    server.drop(url)
