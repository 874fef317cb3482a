"""The doctor: every finding on data that was damaged on purpose, and nothing on healthy data."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, select, update

from index.version import Version
from service import doctor
from service.backfills.worker import Worker
from service.blobs import MARKER
from service.database import Database, upgrade
from service.doctor import Doctor, Finding
from service.references import BLOB_COLUMNS
from service.repository import from_bytes, to_bytes
from service.settings import Settings
from service.tables import embedding, evaluation_entry, item, metadata


class Ward:
    """A data folder of six items, encoded by v1 and four of them by v2 too, and what the doctor says of it."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings, self.database = settings, database
        self.ids = dict(self.rows(select(item.c.external_id, item.c.id)))

    def rows(self, statement: Any) -> list[Any]:
        with self.database.lookup() as connection:
            return [tuple(row) for row in connection.execute(statement)]

    def examine(self, fix: bool = False) -> dict[str, Finding]:
        return {finding.code: finding for finding in Doctor(self.settings, self.database).examine(fix=fix)}

    def damage(self, name: str, version_id: int, vector: np.ndarray | None) -> None:
        mine = (embedding.c.item_id == self.ids[name], embedding.c.version_id == version_id)
        with self.database.write() as connection:
            if vector is None:
                connection.execute(delete(embedding).where(*mine))
            else:
                connection.execute(update(embedding).where(*mine).values(vector=to_bytes(np.float32(vector))))


@pytest.fixture
def ward(tmp_path: Path, serving: Any, versions: dict[str, Version], pictures: list[bytes]) -> Iterator[Ward]:
    settings = Settings(data=tmp_path)
    with serving(settings) as running:
        for name in ("v1", "v2"):
            running.register(versions[name])
        path = running.gallery("v1")
        running.ingest(path, {f"i{n}": picture for n, picture in enumerate(pictures[:6])})
        running.http.post(f"{path}/deployments", json={"version": "v2"})
        running.http.post(f"{path}/backfills", json={"limit": 4, "order": "oldest"})
        worker = Worker(settings, threading.Event())
        while worker.step():
            pass
        worker.close()
    database = Database(settings.database_url)
    yield Ward(settings, database)
    database.close()


def test_nothing_is_wrong_with_healthy_data(ward: Ward) -> None:
    assert ward.examine() == {}
    assert ward.examine(fix=True) == {}


@pytest.mark.parametrize(
    ("vector", "code"),
    [
        ([1, 0, 0], "wrong_dimension"),
        ([np.nan, 0, 0, 0], "not_finite"),
        ([0, 0, 0, 0], "zero_vector"),
        ([2, 0, 0, 0], "not_unit_vector"),
    ],
)
def test_a_damaged_vector_is_found_and_named(ward: Ward, vector: list[float], code: str) -> None:
    ward.damage("i2", 1, np.asarray(vector))

    found = ward.examine()

    assert set(found) == {code}
    assert (found[code].count, found[code].severity) == (1, "error")
    assert found[code].examples[0].startswith("i2")
    assert found[code].advice


def test_the_vector_of_another_is_noted(ward: Ward) -> None:
    ward.damage("i1", 1, np.asarray([1, 0, 0, 0]))
    ward.damage("i2", 1, np.asarray([1, 0, 0, 0]))

    assert ward.examine()["duplicate_vector"].examples == ["i2 = i1"]


def test_a_long_vector_is_brought_to_unit_length_and_replicas_are_told(ward: Ward) -> None:
    ward.damage("i5", 1, np.asarray([0, 3, 4, 0]))
    (before,) = ward.rows(select(item.c.seq).where(item.c.external_id == "i5"))

    assert ward.examine(fix=True)["not_unit_vector"].fixed == 1

    assert ward.examine() == {}
    mine = (embedding.c.item_id == ward.ids["i5"], embedding.c.version_id == 1)
    ((stored,),) = ward.rows(select(embedding.c.vector).where(*mine))
    np.testing.assert_allclose(from_bytes([stored], 4)[0], [0, 0.6, 0.8, 0], atol=1e-6)
    assert ward.rows(select(item.c.seq).where(item.c.external_id == "i5"))[0] > before


def test_an_item_in_no_shard_goes_to_what_it_still_holds(ward: Ward) -> None:
    ward.damage("i0", 2, None)  # active in v2, still holds v1
    ward.damage("i5", 1, None)  # holds nothing any more

    found = ward.examine(fix=True)["no_active_embedding"]

    assert (found.count, found.fixed) == (2, 1)
    assert ward.rows(select(item.c.active_id).where(item.c.external_id == "i0")) == [(1,)]
    left = ward.examine()
    assert [example.rpartition("/")[2] for example in left["no_active_embedding"].examples] == ["i5"]


def test_images_and_items_that_lost_each_other(ward: Ward) -> None:
    folder = ward.settings.data / "blobs" / "1"
    (gone,) = ward.rows(select(item.c.blob).where(item.c.external_id == "i3"))[0]
    (ward.settings.data / "blobs" / gone).unlink()
    (folder / "young").write_bytes(b"x")
    (folder / "old").write_bytes(b"x")
    long_ago = time.time() - 2 * doctor.ORPHAN_SECONDS
    os.utime(folder / "old", (long_ago, long_ago))

    found = ward.examine(fix=True)

    assert [e.rpartition("/")[2] for e in found["image_missing"].examples] == ["i3"]
    assert (found["orphan_blob"].examples, found["orphan_blob"].fixed) == (["1/old"], 1)
    assert (folder / "young").exists()
    assert not (folder / "old").exists()


def age_everything(ward: Ward) -> list[Path]:
    """Every image there is, old enough to be an orphan."""
    images = [path for path in (ward.settings.data / "blobs").rglob("*") if path.is_file() and path.name != MARKER]
    long_ago = time.time() - 2 * doctor.ORPHAN_SECONDS
    for path in images:
        os.utime(path, (long_ago, long_ago))
    return images


def test_images_of_evaluation_sets_are_no_orphans_and_missed_when_they_are_gone(
    ward: Ward, serving: Any, pictures: list[bytes]
) -> None:
    with serving(ward.settings) as running:
        (gallery,) = running.http.get("/galleries").json()["galleries"]
        entries = [{"label": n, "image": str(n)} for n in range(3)]
        sent = running.http.post(
            f"/galleries/{gallery['name']}/evaluations",
            data={"entries": json.dumps(entries), "name": "set"},
            files=[("images", (str(n), pictures[n])) for n in range(3)],
        )
        assert sent.status_code == 201, sent.text
    images = age_everything(ward)

    assert ward.examine(fix=True) == {}
    assert all(path.exists() for path in images)

    ((gone,),) = ward.rows(select(evaluation_entry.c.blob).where(evaluation_entry.c.number == 1))
    (ward.settings.data / "blobs" / gone).unlink()
    found = ward.examine()
    assert set(found) == {"evaluation_image_missing"}
    assert found["evaluation_image_missing"].examples == [f"{gallery['name']}, evaluation 1, entry 1"]


def test_a_store_that_is_gone_is_one_finding_and_no_image_is_taken_for_lost(ward: Ward) -> None:
    (ward.settings.data / "blobs").rename(ward.settings.data / "elsewhere")

    found = ward.examine(fix=True)

    assert set(found) == {"store_unreachable"}
    assert str(ward.settings.data / "blobs") in found["store_unreachable"].examples[0]


def test_every_column_that_names_an_image_counts_as_a_reference() -> None:
    named = {column for table in metadata.tables.values() for column in table.columns if "blob" in column.name}

    assert set(BLOB_COLUMNS) == named


def test_a_store_that_this_database_knows_nothing_of_is_left_alone(ward: Ward, tmp_path: Path) -> None:
    images = age_everything(ward)
    other = Settings(data=tmp_path / "other", blobs_url=f"file://{ward.settings.data / 'blobs'}")
    upgrade(other)
    database = Database(other.database_url)

    found = {f.code: f for f in Doctor(other, database).examine(fix=True)}
    database.close()

    assert (found["orphan_blob"].count, found["orphan_blob"].fixed) == (len(images), 0)
    assert all(path.exists() for path in images)


def test_a_version_folder_that_changed_is_named_and_nothing_else_is_touched(ward: Ward) -> None:
    with (ward.settings.versions / "v2" / "encoder.onnx").open("ab") as stream:
        stream.write(b"x")
    (ward.settings.versions / ".incoming-1").mkdir()

    found = ward.examine(fix=True)

    assert found["version_changed"].examples == ["v2"]
    assert "encoder.onnx" in found["version_changed"].what
    assert found["upload_left"].fixed == 1
    assert not (ward.settings.versions / ".incoming-1").exists()


def test_items_nobody_can_reach_and_versions_nobody_uses(
    ward: Ward, tmp_path: Path, make_version: Callable[..., Version], serving: Any
) -> None:
    apart = make_version(tmp_path / "apart", "apart", 3, encoder=False)
    with serving(ward.settings) as running:
        running.register(apart)
    assert ward.examine()["version_unused"].examples == ["apart"]
    key = ward.ids["i4"]
    with ward.database.write() as connection:
        connection.execute(
            update(embedding)
            .where(embedding.c.item_id == key)
            .values(version_id=3, vector=to_bytes(np.float32([1, 0, 0])))
        )
        connection.execute(update(item).where(item.c.id == key).values(active_id=3))

    found = ward.examine()

    assert (found["unreachable"].count, "1 items of apart" in found["unreachable"].examples[0]) == (1, True)
