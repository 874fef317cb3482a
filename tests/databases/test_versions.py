"""Versions that two processes use, and what an item holds of several, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Connection, update

from service.http.app import create_app
from service.settings import Settings
from service.store.database.connections import Database
from service.store.tables import gallery
from service.upgrades import removal
from staging.inputs.builders import make_version, zip_version


@pytest.fixture
def processes(settings: Settings, tmp_path: Path) -> Iterator[tuple[TestClient, TestClient]]:
    """Two that serve one database, with v1, v2 and a gallery of v1."""
    with (
        TestClient(create_app(settings), base_url="http://127.0.0.1/v1") as one,
        TestClient(create_app(settings), base_url="http://127.0.0.1/v1") as other,
    ):
        for name, dim in (("v1", 4), ("v2", 6)):
            archive = zip_version(make_version(tmp_path / name, name, dim).folder)
            sent = one.post("/versions", files={"archive": archive})
            assert sent.status_code == 201, sent.text
        assert one.post("/galleries", json={"name": "g"}).status_code == 201
        assert one.post("/galleries/g/deployments", json={"version": "v1"}).status_code == 201
        yield one, other


def supply(http: TestClient, version: str, dim: int, query: str = "", **fields: Any) -> Any:
    items = [{"id": "a", "embedding": [1] * dim, **fields}]
    return http.post(f"/galleries/g/items{query}", json={"version": version, "items": items})


def held(http: TestClient) -> tuple[Any, list[str]]:
    shown = http.get("/galleries/g/items/a").json()
    return shown["metadata"], sorted(one["version"] for one in shown["embeddings"])


def test_embeddings_lie_beside_each_other_until_they_are_replaced_by_name(
    processes: tuple[TestClient, TestClient],
) -> None:
    one, other = processes
    assert supply(one, "v1", 4, metadata={"n": 1}).json()["new"] == 1

    assert supply(other, "v2", 6).json()["updated"] == 1
    assert held(one) == ({"n": 1}, ["v1", "v2"])
    assert supply(one, "v2", 6, metadata={"n": 2}).json()["updated"] == 1
    assert held(other) == ({"n": 2}, ["v1", "v2"])
    assert supply(other, "v1", 4, "?replace=false").json()["errors"][0]["code"] == "item_exists"

    assert supply(other, "v1", 4, "?replace=true").json()["replaced"] == 1
    assert held(one) == ({}, ["v1"])


def test_a_version_that_another_process_uses_stays_and_one_that_it_deleted_is_unknown(
    processes: tuple[TestClient, TestClient],
) -> None:
    one, other = processes
    assert supply(one, "v2", 6).json()["new"] == 1
    refused = other.delete("/versions/v2", params={"confirm": "v2"})
    assert (refused.status_code, refused.json()["code"]) == (409, "version_needed")
    assert one.delete("/galleries/g/items/a").status_code == 204

    assert other.delete("/versions/v2", params={"confirm": "v2"}).status_code == 204

    assert one.post("/galleries/g/deployments", json={"version": "v2"}).json()["code"] in {
        "unknown_version",
        "deleted_meanwhile",
    }
    assert supply(one, "v1", 4).status_code == 200


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)  # SQLite has one writer at a time anyway
def test_a_version_that_is_used_while_it_is_deleted_stays(
    processes: tuple[TestClient, TestClient], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = processes
    unused = removal._unused

    def used_now(connection: Connection, name: str) -> Any:
        row = unused(connection, name)
        with closing(Database(settings.database_url)) as database, database.write() as elsewhere:
            elsewhere.execute(update(gallery).values(current_id=row.id))
        return row

    monkeypatch.setattr(removal, "_unused", used_now)
    refused = one.delete("/versions/v2", params={"confirm": "v2"})

    assert (refused.status_code, refused.json()["code"]) == (409, "version_needed")
    assert (settings.versions / "v2" / "card.json").exists()
    assert {version["name"] for version in other.get("/versions").json()["versions"]} == {"v1", "v2"}
