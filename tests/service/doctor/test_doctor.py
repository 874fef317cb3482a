"""The doctor: every finding on data that was damaged on purpose, and nothing on healthy data."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, delete, event, insert, select, update

from index.version import Version
from service.doctor import findings, vectors
from service.doctor.examination import Doctor
from service.doctor.findings import Finding
from service.registry.incoming import incoming_folder
from service.settings import Settings
from service.store.blob_references import SOURCES
from service.store.blobs import MARKER, Blobs
from service.store.database import Database, upgrade
from service.store.deletion import delete_gallery, free_items
from service.store.repository import take_seq
from service.store.tables import embedding, evaluation, evaluation_embedding, evaluation_entry, gallery, item, metadata
from service.store.vector_codec import from_bytes, to_bytes
from staging.builders import make_version
from staging.served import serving
from staging.working import work


class Ward:
    """A data folder of six items, encoded by v1 and four of them by v2 too, and what the doctor says of it."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings, self.database = settings, database
        ((self.gallery,),) = self.rows(select(gallery.c.name))
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


UNUSABLE = [
    pytest.param([1, 0, 0], "wrong_dimension", id="short"),
    pytest.param([], "wrong_dimension", id="empty"),
    pytest.param([1] * 8, "wrong_dimension", id="long"),
    pytest.param([np.nan, 0, 0, 0], "not_finite", id="nan"),
    pytest.param([0, 0, 0, 0], "zero_vector", id="zero"),
]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version], pictures: list[bytes]) -> Path:
    settings = Settings(data=tmp_path_factory.mktemp("healthy"))
    with serving(settings) as running:
        for name in ("v1", "v2"):
            running.register(versions[name])
        path = running.filled(pictures[:6], "v1", "v2")
        running.http.post(f"{path}/backfills", json={"limit": 4, "order": "oldest"})
        work(settings)
    return settings.data


@pytest.fixture
def ward(tmp_path: Path, healthy: Path) -> Iterator[Ward]:
    settings = Settings(data=tmp_path / "data")
    shutil.copytree(healthy, settings.data)
    database = Database(settings.database_url)
    yield Ward(settings, database)
    database.close()


def test_nothing_is_wrong_with_healthy_data(ward: Ward) -> None:
    assert ward.examine() == {}
    assert ward.examine(fix=True) == {}


@pytest.mark.parametrize(("vector", "code"), [*UNUSABLE, pytest.param([2, 0, 0, 0], "not_unit_vector", id="not unit")])
def test_a_damaged_vector_is_found_and_named(ward: Ward, vector: list[float], code: str) -> None:
    ward.damage("i2", 1, np.asarray(vector))

    found = ward.examine()

    assert set(found) == {code}
    assert (found[code].count, found[code].severity) == (1, "error")
    assert found[code].examples[0].startswith(f"{ward.gallery}/i2")
    assert found[code].advice


def reencode(ward: Ward, serving: Any) -> None:
    """What the doctor advises."""
    with serving(ward.settings) as running:
        started = running.http.post(f"/galleries/{ward.gallery}/backfills", json={})
        assert started.status_code == 202, started.text
    work(ward.settings)


@pytest.mark.parametrize(("vector", "code"), UNUSABLE)
def test_what_cannot_be_compared_is_removed_and_a_backfill_makes_it_anew(
    ward: Ward, vector: list[float], code: str
) -> None:
    """i5 holds nothing else, but an image; i0 is active in v2, where it is damaged too, and holds v1."""
    in_v2 = (embedding.c.item_id == ward.ids["i0"], embedding.c.version_id == 2)
    ((whole,),) = ward.rows(select(embedding.c.vector).where(*in_v2))
    ward.damage("i5", 1, np.asarray(vector))
    ward.damage("i0", 2, np.asarray([*vector, 0, 0]) if len(vector) == 4 else np.asarray(vector))

    found = ward.examine(fix=True)

    assert (found[code].count, found[code].fixed) == (2, 2)
    assert ward.rows(select(item.c.active_id).where(item.c.external_id == "i0")) == [(1,)]
    assert set(ward.examine()) == {"no_active_embedding"}
    reencode(ward, serving)
    assert ward.examine() == {}
    rows = ward.rows(select(item.c.external_id, item.c.active_id).where(item.c.external_id.in_(["i0", "i5"])))
    assert set(rows) == {("i0", 2), ("i5", 2)}
    ((anew,),) = ward.rows(select(embedding.c.vector).where(*in_v2))
    np.testing.assert_allclose(from_bytes([anew], 6), from_bytes([whole], 6), atol=1e-6)


@pytest.mark.parametrize("lost", ["no image", "image gone", "no encoder"])
def test_what_nothing_better_remains_of_is_left_as_it_is(ward: Ward, lost: str) -> None:
    ward.damage("i5", 1, np.asarray([0, 0, 0, 0]))
    ((blob,),) = ward.rows(select(item.c.blob).where(item.c.external_id == "i5"))
    if lost == "no image":
        with ward.database.write() as connection:
            connection.execute(update(item).where(item.c.external_id == "i5").values(blob=None))
    elif lost == "image gone":
        (ward.settings.data / "blobs" / blob).unlink()
    else:
        (ward.settings.versions / "v2" / "encoder.onnx").unlink()

    found = ward.examine(fix=True)["zero_vector"]

    assert (found.count, found.fixed) == (1, 0)
    assert "ingest the others again" in found.advice
    assert ward.examine()["zero_vector"].count == 1


def test_an_evaluation_set_of_damaged_embeddings_is_named(ward: Ward) -> None:
    with ward.database.write() as connection:
        made = {"gallery_id": 1, "name": "", "kind": "embeddings", "size": 2, "labelled": 0, "created": 0.0}
        for _ in range(3):
            connection.execute(insert(evaluation).values(made))
        for number, numbers in ((1, 8), (2, 7), (3, 8)):
            vectors = np.full(numbers, np.nan if number == 3 else 0.5, np.float32)
            row = {"evaluation_id": number, "version_id": 1, "vectors": to_bytes(vectors)}
            connection.execute(insert(evaluation_embedding).values(row))

    found = ward.examine()

    assert set(found) == {"evaluation_damaged"}
    assert [e.partition(":")[0] for e in found["evaluation_damaged"].examples] == [
        f"{ward.gallery}, evaluation 2",
        f"{ward.gallery}, evaluation 3",
    ]


def test_the_vector_of_another_is_noted(ward: Ward) -> None:
    ward.damage("i1", 1, np.asarray([1, 0, 0, 0]))
    ward.damage("i2", 1, np.asarray([1, 0, 0, 0]))

    assert ward.examine()["duplicate_vector"].examples == [f"{ward.gallery}/i2 = i1"]


def test_a_long_vector_is_brought_to_unit_length_and_replicas_are_told(ward: Ward) -> None:
    ward.damage("i5", 1, np.asarray([0, 3, 4, 0]))
    (before,) = ward.rows(select(item.c.seq).where(item.c.external_id == "i5"))

    assert ward.examine(fix=True)["not_unit_vector"].fixed == 1

    assert ward.examine() == {}
    mine = (embedding.c.item_id == ward.ids["i5"], embedding.c.version_id == 1)
    ((stored,),) = ward.rows(select(embedding.c.vector).where(*mine))
    np.testing.assert_allclose(from_bytes([stored], 4)[0], [0, 0.6, 0.8, 0], atol=1e-6)
    assert ward.rows(select(item.c.seq).where(item.c.external_id == "i5"))[0] > before


def test_images_are_looked_for_while_nobody_waits_to_write(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("i4", "i5"):  # hold nothing else but an image
        ward.damage(name, 1, np.zeros(4))
    asked: list[str] = []
    exists = Blobs.exists

    def watched(blobs: Blobs, key: str) -> bool:
        with closing(sqlite3.connect(ward.settings.data / "regraft.db", timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")
        asked.append(key)
        return exists(blobs, key)

    monkeypatch.setattr(Blobs, "exists", watched)

    assert ward.examine(fix=True)["zero_vector"].fixed == 2

    mine = item.c.external_id.in_(["i4", "i5"])
    assert {blob for (blob,) in ward.rows(select(item.c.blob).where(mine))} <= set(asked)


@pytest.mark.parametrize(("vector", "code"), [([0, 3, 4, 0], "not_unit_vector"), ([0, 0, 0, 0], "zero_vector")])
def test_embeddings_are_mended_many_in_a_transaction(
    ward: Ward, vector: list[float], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(ward.rows(select(item.c.external_id, item.c.seq)))
    for name in ward.ids:
        ward.damage(name, 1, np.asarray(vector))
    sizes: list[int] = []

    def counted(connection: Any, gallery_id: int, count: int) -> int:
        sizes.append(count)
        return take_seq(connection, gallery_id, count)

    monkeypatch.setattr(vectors, "BLOCK", 4)
    monkeypatch.setattr(vectors, "take_seq", counted)

    assert ward.examine(fix=True)[code].fixed == 6

    assert sizes == [4, 2]
    seqs = dict(ward.rows(select(item.c.external_id, item.c.seq)))
    told = {name for name in seqs if seqs[name] > max(before.values())}
    assert told == {"i4", "i5"}  # the others are active in v2
    assert len({seqs[name] for name in told}) == 2


def test_an_item_in_no_shard_goes_to_what_it_still_holds(ward: Ward) -> None:
    ward.damage("i0", 2, None)  # active in v2, still holds v1
    ward.damage("i5", 1, None)  # holds nothing any more

    found = ward.examine(fix=True)["no_active_embedding"]

    assert (found.count, found.fixed) == (2, 1)
    assert ward.rows(select(item.c.active_id).where(item.c.external_id == "i0")) == [(1,)]
    left = ward.examine()
    assert [example.rpartition("/")[2] for example in left["no_active_embedding"].examples] == ["i5"]


def test_items_in_no_shard_are_placed_all_at_once_as_a_deployment_would(ward: Ward) -> None:
    moved: list[str] = []

    @event.listens_for(Engine, "before_cursor_execute")
    def listen(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE item"):
            moved.append(statement)

    before = dict(ward.rows(select(item.c.external_id, item.c.seq)))
    for name in ("i0", "i1", "i2"):  # active in v2, still hold v1
        ward.damage(name, 2, None)

    found = ward.examine(fix=True)["no_active_embedding"]
    event.remove(Engine, "before_cursor_execute", listen)

    assert (found.count, found.fixed, len(moved)) == (3, 3, 1)
    rows = ward.rows(select(item.c.external_id, item.c.active_id, item.c.seq))
    assert {name: active for name, active, _ in rows} == {f"i{n}": 2 if n == 3 else 1 for n in range(6)}
    new = {seq for name, _, seq in rows if seq != before[name]}
    assert (len(new), min(new) > max(before.values())) == (3, True)
    assert ward.examine() == {}


def test_images_and_items_that_lost_each_other(ward: Ward) -> None:
    folder = ward.settings.data / "blobs" / "1"
    (gone,) = ward.rows(select(item.c.blob).where(item.c.external_id == "i3"))[0]
    (ward.settings.data / "blobs" / gone).unlink()
    (folder / "young").write_bytes(b"x")
    (folder / "old").write_bytes(b"x")
    long_ago = time.time() - 2 * findings.ORPHAN_SECONDS
    os.utime(folder / "old", (long_ago, long_ago))

    found = ward.examine(fix=True)

    assert [e.rpartition("/")[2] for e in found["image_missing"].examples] == ["i3"]
    assert (found["orphan_blob"].examples, found["orphan_blob"].fixed) == (["1/old"], 1)
    assert (folder / "young").exists()
    assert not (folder / "old").exists()


def age_everything(ward: Ward) -> list[Path]:
    """Every image there is, old enough to be an orphan."""
    images = [path for path in (ward.settings.data / "blobs").rglob("*") if path.is_file() and path.name != MARKER]
    long_ago = time.time() - 2 * findings.ORPHAN_SECONDS
    for path in images:
        os.utime(path, (long_ago, long_ago))
    return images


def test_images_of_evaluation_sets_are_no_orphans_and_missed_when_they_are_gone(
    ward: Ward, pictures: list[bytes]
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


def test_what_is_left_of_a_deleted_gallery_is_one_finding_and_nothing_of_it_is_taken_for_lost(ward: Ward) -> None:
    images = age_everything(ward)
    images[0].unlink()
    with ward.database.write() as connection:
        delete_gallery(connection, 1)
        free_items(connection, 1, 0, 2)

    found = ward.examine()

    assert (found.pop("gallery_half_freed").count, set(found)) == (1, {"version_unused"})
    assert ward.examine(fix=True)["gallery_half_freed"].fixed == 1
    assert set(ward.examine()) == {"version_unused"}
    assert (ward.rows(select(gallery.c.id)), ward.rows(select(item.c.id))) == ([], [])
    assert not any(path.exists() for path in images)


def test_a_store_that_is_gone_is_one_finding_and_no_image_is_taken_for_lost(ward: Ward) -> None:
    (ward.settings.data / "blobs").rename(ward.settings.data / "elsewhere")

    found = ward.examine(fix=True)

    assert set(found) == {"store_unreachable"}
    assert str(ward.settings.data / "blobs") in found["store_unreachable"].examples[0]


def test_every_column_that_names_an_image_counts_as_a_reference() -> None:
    named = {column for table in metadata.tables.values() for column in table.columns if "blob" in column.name}

    assert {source.column for source in SOURCES} == named


def test_a_store_that_this_database_knows_nothing_of_is_left_alone(ward: Ward, tmp_path: Path) -> None:
    images = age_everything(ward)
    other = Settings(data=tmp_path / "other", blobs_url=f"file://{ward.settings.data / 'blobs'}")
    upgrade(other)
    database = Database(other.database_url)

    found = {f.code: f for f in Doctor(other, database).examine(fix=True)}
    database.close()

    assert (found["orphan_blob"].count, found["orphan_blob"].fixed) == (len(images), 0)
    assert all(path.exists() for path in images)


def test_a_version_folder_that_changed_is_named_and_the_rest_is_looked_at_all_the_same(ward: Ward) -> None:
    for file in ("encoder.onnx", "edges/v1/edge.json"):
        with (ward.settings.versions / "v2" / file).open("ab") as stream:
            stream.write(b"x")
    ward.damage("i1", 2, np.asarray([0.5, 0, 0, 0, 0, 0]))
    ((gone,),) = ward.rows(select(item.c.blob).where(item.c.external_id == "i3"))
    (ward.settings.data / "blobs" / gone).unlink()

    found = ward.examine(fix=True)

    assert found["version_changed"].examples[0].startswith("v2: e")
    assert found["edge_changed"].examples[0].startswith("truncate from v2 to v1: edge.json")
    assert found["not_unit_vector"].fixed == 1
    assert found["image_missing"].count == 1


def test_remains_of_uploads_go_when_nobody_fills_them(ward: Ward) -> None:
    left = ward.settings.versions / ".incoming-1"
    left.mkdir()
    with incoming_folder(ward.settings.versions) as filled:
        found = ward.examine(fix=True)["upload_left"]

        assert (found.examples, found.fixed) == ([".incoming-1"], 1)
        assert (left.exists(), filled.exists()) == (False, True)


def test_items_nobody_can_reach_and_versions_nobody_uses(ward: Ward, tmp_path: Path) -> None:
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
