"""A service whose vectors lie in files of an S3: it answers as one whose vectors lie in the database."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from index.version import Version
from service.doctor.examination import Doctor
from service.settings import Settings
from service.store.database.connections import Database
from service.store.offloading import offloader
from service.store.tables import embedding
from service.store.vectors.files import IS_IN_DATABASE, files
from staging.api.served import Served, problem, serving
from staging.external.s3 import ObjectStore, reachable_object_store
from staging.states.settling import settled_at_once
from staging.waiting import until

ITEMS = 12


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStore]:
    with reachable_object_store() as running, pytest.MonkeyPatch.context() as patch:
        settled_at_once(patch, PAUSE_SECONDS=0.01, LEASE_SECONDS=0.5)
        yield running


@pytest.fixture
def settings(tmp_path: Path, s3: ObjectStore, data_of_versions: Path) -> Settings:
    shutil.copytree(data_of_versions, tmp_path / "data")
    return Settings(data=tmp_path / "data", blobs_url=s3.bucket(), vectors="objects")


def here(database: Database) -> int:
    """Vectors that the database holds itself."""
    with database.lookup() as connection:
        return int(connection.execute(select(func.count()).select_from(embedding).where(IS_IN_DATABASE)).scalar_one())


def moved(served: Served) -> None:
    until(lambda: here(served.runtime.database) == 0)


def told(served: Served, path: str, pictures: list[bytes]) -> list[Any]:
    """What is read of a gallery in every way that reads vectors, or not."""
    found = [
        served.query(path, *pictures[:3], k=4),
        served.http.post(f"{path}/query", json={"items": ["i0", "i5"], "k": 3}),
        served.http.get(f"{path}/items:embeddings"),
        served.http.post(f"{path}/gates", json={"version": "v2"}),
    ]
    assert [answer.status_code for answer in found[:3]] == [200] * 3, [answer.text for answer in found]
    return [
        *(result["matches"] for answer in found[:2] for result in answer.json()["results"]),
        found[2].json()["items"],
        {name: found[3].json()[name] for name in ("verdict", "metrics") if name in found[3].json()},
    ]


def test_a_service_answers_alike_moves_what_a_backfill_wrote_and_starts_from_files(
    settings: Settings, versions: dict[str, Version], pictures: list[bytes]
) -> None:
    with serving(settings) as served:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offloader, "LEAST_ROWS", 1000)
            path = served.filled(pictures[:ITEMS], about=lambda n: {"label": str(n % 5)})
            before = told(served, path, pictures)
        moved(served)
        assert told(served, path, pictures) == before

        served.deploy(path, "v2")
        served.backfill(path, kind="reencode", chunk_size=5)
        served.work()
        assert served.http.get(path).json()["mix"] == {"v2": ITEMS}
        assert beside(served, path, "i1").status_code == 200
        assert served.http.delete(f"{path}/items/i2").status_code == 204
        moved(served)
        after = told(served, path, pictures)

    with serving(settings) as served:
        assert told(served, path, pictures) == after
        # Registered where images lay on a disk, the versions are in no store.
        told_first = Doctor(settings, served.runtime.database).examine(fix=True)
        assert {f.code: f.fixed for f in told_first} == {"version_unused": 0, "folder_missing": 3}
        assert {f.code for f in Doctor(settings, served.runtime.database).examine()} == {"version_unused"}
        assert served.remove(path).status_code in (200, 204)
        until(lambda: not list(served.runtime.blobs.all_vector_files()))

    back = settings.model_copy(update={"vectors": "sql"})
    with closing(Database(settings.database_url)) as database, database.lookup() as connection:
        assert files(connection) == []
    with serving(back) as served:
        assert served.http.get("/galleries").status_code == 200


def test_while_s3_is_away_what_is_in_memory_is_found_and_the_rest_says_why(
    settings: Settings, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings) as served:
        path = served.filled(pictures[:ITEMS])
        moved(served)
        monkeypatch.setattr(type(served.runtime.blobs), "_read", refused)
        assert served.query(path, pictures[3], k=1).json()["results"][0]["matches"][0]["id"] == "i3"
        problem(served.http.post(f"{path}/query", json={"items": ["i0"], "k": 1}), 503, "store_unreachable")
        # What a write leaves as it was is in memory.
        assert beside(served, path, "i1").status_code == 200
        assert served.query(path, pictures[1], k=1).json()["results"][0]["matches"][0]["id"] == "i1"
        assert served.http.get("/health/ready").json()["status"] in ("ready", "degraded")
        (before,) = served.runtime.replica.all()
        served.runtime.replica.cache.drop(before.id)  # as a process that starts
        problem(served.query(path, pictures[3], k=1), 503, "store_unreachable")
        monkeypatch.undo()
        assert served.query(path, pictures[3], k=1).json()["results"][0]["matches"][0]["id"] == "i3"


def beside(served: Served, path: str, name: str) -> Any:
    """An embedding by v2 beside what an item holds."""
    body = {"version": "v2", "items": [{"id": name, "embedding": [1, 0, 0, 0, 0, 0]}]}
    return served.http.put(f"{path}/items:embeddings", json=body)


def refused(*_: object) -> bytes:
    raise OSError("no route")
