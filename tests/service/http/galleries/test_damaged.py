"""Embeddings that are damaged in the database: left out and counted, never a crash and never compared."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import select, update

from index.version import Version
from regraft import Client
from regraft.transfer.exports import ExportResult, export_gallery
from service.replica.feed import usable
from service.settings import Settings
from service.store.database.connections import Database
from service.store.tables import embedding, item
from service.store.vectors.codec import DamagedEmbedding, from_bytes, to_bytes
from staging.api.served import problem, serving
from staging.inputs.builders import make_version
from staging.states.working import work

DAMAGE = {
    "i0": np.ones(8),
    "i1": np.ones(32),
    "i2": np.ones(0),
    "i3": np.array([np.nan, 0, 0, 0]),
    "i4": np.array([np.inf, 0, 0, 0]),
}


def damage(settings: Settings, vectors: dict[str, Any], **columns: Any) -> None:
    database = Database(settings.database_url)
    with database.write() as connection:
        for name, vector in vectors.items():
            mine = embedding.c.item_id == select(item.c.id).where(item.c.external_id == name).scalar_subquery()
            connection.execute(update(embedding).where(mine).values(vector=to_bytes(np.float32(vector))))
            if columns:
                connection.execute(update(item).where(item.c.external_id == name).values(**columns))
    database.close()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version], pictures: list[bytes]) -> Path:
    made = Settings(data=tmp_path_factory.mktemp("damaged") / "data")
    with serving(made) as served:
        for name in ("v1", "v2"):
            served.register(versions[name])
        served.http.post("/galleries", json={"name": "g"})
        served.http.post("/galleries/g/deployments", json={"version": "v1"})
        served.ingest("/galleries/g", {f"i{n}": picture for n, picture in enumerate(pictures[:10])})
    damage(made, DAMAGE)
    return made.data


@pytest.fixture
def settings(prepared: Path, tmp_path: Path) -> Settings:
    """Ten items of v1, five of them damaged while nobody looked."""
    shutil.copytree(prepared, tmp_path / "data")
    return Settings(data=tmp_path / "data")


def test_a_start_leaves_them_out_and_says_so(settings: Settings, pictures: list[bytes]) -> None:
    with serving(settings) as served:
        answered = served.query("/galleries/g", pictures[7], k=5).json()
        assert {m["id"] for m in answered["results"][0]["matches"]} == {f"i{n}" for n in range(5, 10)}
        (left,) = answered["degraded"]
        assert (left["version"], left["items"], "damaged" in left["reason"]) == ("v1", 5, True)
        ready = served.http.get("/health/ready").json()
        assert (ready["status"], ["5 items" in p for p in ready["problems"]]) == ("degraded", [True])
        assert served.http.get("/galleries/g").json()["mix"] == {"v1": 5}

        # Written anew it is whole again.
        served.ingest("/galleries/g", {"i0": pictures[0]})
        assert served.query("/galleries/g", pictures[0], k=1).json()["results"][0]["matches"][0]["id"] == "i0"
        assert served.http.get("/galleries/g").json()["mix"] == {"v1": 6}


def test_a_running_service_takes_them_out(settings: Settings, pictures: list[bytes]) -> None:
    with serving(settings) as served:
        loaded = served.runtime.replica.find("g")
        damage(settings, {"i7": np.ones(3)}, seq=1000)
        with served.runtime.database.write() as connection:
            connection.exec_driver_sql("update gallery set next_seq = 1001")
        served.runtime.replica.refresh(loaded.id)

        found = served.query("/galleries/g", pictures[7], k=4).json()["results"][0]["matches"]

        assert {m["id"] for m in found} == {"i5", "i6", "i8", "i9"}


def test_one_that_asks_is_asked_by_its_image_or_named(settings: Settings) -> None:
    damage(settings, {"i1": np.ones(32)}, blob=None)
    with serving(settings) as served:

        def like(name: str) -> Any:
            return served.http.post("/galleries/g/query", json={"items": [name], "k": 1})

        assert like("i0").json()["results"][0]["matches"][0]["id"] == "i5"  # of the same class
        assert "'i1'" in problem(like("i1"), 503, "embedding_damaged", "/items/0")["detail"]


def test_one_that_asks_does_so_by_what_is_whole_of_it(settings: Settings) -> None:
    with serving(settings) as served:

        def like() -> list[str]:
            (found,) = served.http.post("/galleries/g/query", json={"items": ["i9"], "k": 4}).json()["results"]
            return [match["id"] for match in found["matches"]]

        by_v1 = like()
        served.deploy("/galleries/g", "v2")
        newer = [{"id": "i9", "embedding": np.eye(6)[0].tolist()}]
        assert served.http.put("/galleries/g/items:embeddings", json={"items": newer}).status_code == 200
        with served.runtime.database.write() as connection:
            mine = embedding.c.version_id == served.runtime.registry.named("v2").id
            connection.execute(update(embedding).where(mine).values(vector=to_bytes(np.ones(3, np.float32))))
            connection.execute(update(item).where(item.c.external_id == "i9").values(blob=None))

        assert len(by_v1) == 4
        assert like() == by_v1


def test_a_gate_embeds_them_anew_and_a_fit_leaves_them_out(settings: Settings, pictures: list[bytes]) -> None:
    with serving(settings) as served:
        served.ingest("/galleries/g", {f"j{n}": picture for n, picture in enumerate(pictures)})
        report = served.http.post("/galleries/g/gates", json={"version": "v2", "metric": "recall@k", "k": 3})
        served.deploy("/galleries/g", "v2")
        served.backfill("/galleries/g")
        served.work()
        pairs = {"gallery": "g", "new": "v2", "old": "v1", "kind": "procrustes"}
        fitted = served.http.post("/edges:fit", json=pairs)

        assert (report.status_code, report.json()["items"], report.json()["queries"]) == (201, 30, 30), report.text
        assert fitted.status_code == 201, fitted.text


def test_a_reencode_to_another_version_moves_them_like_any_item(settings: Settings) -> None:
    with serving(settings) as served:
        served.http.post("/galleries/g/deployments", json={"version": "v2"})
        number = served.http.post("/galleries/g/backfills", json={}).json()["id"]
        work(settings)

        shown = served.http.get(f"/backfills/{number}").json()
        assert (shown["state"], shown["done"], shown["failed"]) == ("done", 10, 0)
        served.runtime.replica.refresh(served.runtime.replica.find("g").id)
        assert served.http.get("/health/ready").json()["status"] == "ready"


def test_a_transform_names_them_and_moves_the_others(settings: Settings, tmp_path: Path) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    carrying = make_version(tmp_path / "v3", "v3", 4, seed=3, edges=[(v1, "forward")])
    with serving(settings) as served:
        served.register(carrying)
        served.http.post("/galleries/g/deployments", json={"version": "v3"})
        asked = {"kind": "transform", "chunk_size": 10, "attempts": 1}
        started = served.http.post("/galleries/g/backfills", json=asked)
        work(settings)

        shown = served.http.get(f"/backfills/{started.json()['id']}").json()
        assert (shown["state"], shown["done"], shown["failed"]) == ("done", 5, 5)
        failures = served.http.get(f"/backfills/{shown['id']}/failures").json()["failures"]
        assert {f["item"] for f in failures} == set(DAMAGE)


def test_what_is_usable() -> None:
    rows = [np.ones(2), np.ones(3), np.array([1, np.nan]), np.zeros(2)]

    kept, vectors, damaged = usable([4, 3, 2, 1], [to_bytes(np.float32(row)) for row in rows], 2)

    assert (kept, vectors.tolist(), damaged) == ([4, 1], [[1, 1], [0, 0]], [2, 3])
    assert usable([], [], 2)[0] == []


def test_the_sum_of_two_wrong_lengths_is_not_taken_for_a_right_one() -> None:
    with pytest.raises(DamagedEmbedding):
        from_bytes([to_bytes(np.ones(1, np.float32)), to_bytes(np.ones(3, np.float32))], 2)


def test_pages_of_embeddings_leave_them_out_and_name_them(settings: Settings, tmp_path: Path) -> None:
    with serving(settings) as served:
        page = served.http.get("/galleries/g/items:embeddings").json()
        with Client(served.url) as client:
            exported = export_gallery(client, "g", tmp_path / "g.parquet")

    held = {one["id"]: len(one["embeddings"]) for one in page["items"]}
    assert held == {f"i{n}": int(n >= len(DAMAGE)) for n in range(10)}
    assert page["damaged"] == [{"id": name, "version": "v1"} for name in DAMAGE]
    assert exported == ExportResult(changed=False, damaged=len(DAMAGE))
    vectors = pq.read_table(tmp_path / "g.parquet").column("vector:v1").to_pylist()
    assert [one is None for one in vectors] == [n < len(DAMAGE) for n in range(10)]
