"""Vectors of two models for the same inputs, galleries of them, their content and answers, and tables of pgvector."""

from __future__ import annotations

from typing import Any

import numpy as np
import psycopg
import pytest

from regraft import Client

COUNT = 23
RANDOM = np.random.default_rng(0)
OLD, NEW = (RANDOM.normal(size=(COUNT, dim)).astype(np.float32) for dim in (4, 6))


def gallery(client: Client, name: str, version: str) -> str:
    client.create_gallery(name)
    client.deploy(name, version)
    return name


def held(client: Client, name: str) -> Any:
    items = client.embeddings(name, limit=1000).items
    supplied = {"encoded": "supplied"}
    return {
        i.id: (
            i.metadata,
            i.active,
            [(e.version, supplied.get(e.origin, e.origin), np.round(e.embedding, 6).tolist()) for e in i.embeddings],
        )
        for i in items
    }


def answers(client: Client, name: str) -> Any:
    found = client.query_embeddings(name, NEW[:5], "v2", k=30).results
    return [[(m.id, pytest.approx(m.raw_score, abs=1e-5), m.metadata, m.version) for m in one.matches] for one in found]


def create_pgvector(connection: psycopg.Connection[Any]) -> None:
    """The extension; without it the test is skipped."""
    try:
        connection.execute("CREATE EXTENSION vector")
    except psycopg.Error:
        pytest.skip("this PostgreSQL has no pgvector")
