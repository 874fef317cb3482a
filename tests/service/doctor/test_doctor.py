"""The doctor: every finding on data that was damaged on purpose, and nothing on healthy data."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from sqlalchemy import delete, func, insert, select, update

from index.version import Version
from service.doctor import vectors
from service.doctor.examination import Doctor
from service.doctor.findings import Finding
from service.settings import Settings
from service.store.blob_references import open_blobs
from service.store.database.connections import Database
from service.store.galleries import partitions
from service.store.galleries.deletion import delete_gallery
from service.store.galleries.gallery import take_seq
from service.store.image_store.blobs import Blobs, StoreUnreachable
from service.store.offloading.offloader import Offloader
from service.store.tables import embedding, evaluation, evaluation_embedding, gallery, item
from service.store.vectors.codec import from_bytes, to_bytes
from service.store.vectors.reader import with_vectors
from staging.builders import make_version
from staging.served import serving
from staging.settling import settled_at_once
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

    def offload(self, patch: pytest.MonkeyPatch) -> list[str]:
        """Move all vectors into files; the keys of these, in order."""
        settled_at_once(patch)
        blobs = open_blobs(self.database, self.settings.blobs_url)
        Offloader(self.database, blobs, "objects").look()
        return sorted(key for key, _ in blobs.all_vector_files())

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
    """i5 holds nothing else, but an image; i0 is served by v2, where it is damaged too, and holds v1."""
    in_v2 = (embedding.c.item_id == ward.ids["i0"], embedding.c.version_id == 2)
    ((whole,),) = ward.rows(select(embedding.c.vector).where(*in_v2))
    ward.damage("i5", 1, np.asarray(vector))
    ward.damage("i0", 2, np.asarray([*vector, 0, 0]) if len(vector) == 4 else np.asarray(vector))

    found = ward.examine(fix=True)

    assert (found[code].count, found[code].fixed) == (2, 2)
    held = select(item.c.external_id, embedding.c.version_id).join(embedding)
    held = held.where(item.c.external_id.in_(["i0", "i5"]))
    assert ward.rows(held) == [("i0", 1)]
    assert set(ward.examine()) == {"no_embedding"}
    reencode(ward, serving)
    assert ward.examine() == {}
    assert set(ward.rows(held)) == {("i0", 1), ("i0", 2), ("i5", 2)}
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


def test_a_vector_that_cannot_be_read_is_nothing_better(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    (ward.settings.data / "blobs" / ward.offload(monkeypatch)[0]).unlink()  # those of v1
    ward.damage("i0", 2, np.asarray([np.nan, 1, 0, 0, 0, 0]))
    with ward.database.write() as connection:
        connection.execute(update(item).where(item.c.external_id == "i0").values(blob=None))

    with closing(Database(ward.settings.database_url)) as database:  # which has read nothing yet
        found = Ward(ward.settings, database).examine(fix=True)

    assert found["vector_unreadable"].count == 6
    assert (found["not_finite"].count, found["not_finite"].fixed) == (1, 0)
    assert ward.rows(select(func.count()).select_from(embedding)) == [(10,)]


def test_what_was_found_and_fixed_before_the_store_went_away_is_reported(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are looked up for an embedding that is removed; the one of i5 is nothing better."""
    ward.damage("i1", 1, np.asarray([0, 3, 4, 0]))
    ward.damage("i0", 2, np.zeros(6))
    ward.damage("i5", 1, np.zeros(4))

    monkeypatch.setattr(Blobs, "exists", away)
    found = ward.examine(fix=True)

    assert {code: (one.count, one.fixed) for code, one in found.items()} == {
        "not_unit_vector": (1, 1),
        "zero_vector": (2, 1),
    }


@pytest.mark.parametrize("lost", ["vectors", "files", "images"])
def test_a_check_that_the_store_leaves_keeps_its_findings(
    ward: Ward, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vectors of the last items, the second file, or the list of images cannot be read any more."""
    first, second = ward.offload(monkeypatch)
    (ward.settings.data / "blobs" / first).unlink()  # the vectors of v1
    blocks, read_part = 0, Blobs.read_part

    def two_blocks(*given: Any) -> Any:
        nonlocal blocks
        blocks += 1
        return with_vectors(*given) if blocks <= 2 else away()

    def all_but_second(blobs: Blobs, key: str, start: int, end: int) -> bytes | None:
        return away() if (key, start) == (second, 0) else read_part(blobs, key, start, end)

    monkeypatch.setattr(vectors, "ITEMS", 2)
    if lost == "vectors":
        monkeypatch.setattr(vectors, "with_vectors", two_blocks)
    elif lost == "files":
        monkeypatch.setattr(Blobs, "read_part", all_but_second)
    else:
        monkeypatch.setattr(Blobs, "all", away)
    with closing(Database(ward.settings.database_url)) as database:  # which has read nothing yet
        found = Ward(ward.settings, database).examine(fix=True)

    assert found.pop("vector_file_missing").count == 1
    assert {code: one.count for code, one in found.items()} == {
        "vectors": {"vector_unreadable": 4, "vectors_unseen": 1},
        "files": {"vectors_unseen": 1, "store_unreachable": 1},
        "images": {"vector_unreadable": 6, "store_unreachable": 1},
    }[lost]


def away(*_: object) -> Any:
    raise StoreUnreachable("no route")


def test_what_could_not_be_removed_is_not_counted_as_fixed(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    left = ward.settings.versions / ".incoming-1"
    left.mkdir()
    orphan = ward.settings.data / "blobs" / "1" / ("0" * 32)
    orphan.write_bytes(b"")
    os.utime(orphan, (1, 1))

    def refused(*_: object, **__: object) -> None:
        raise OSError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "rm_file", refused)
        patch.setattr(os, "rmdir", refused)
        found = ward.examine(fix=True)
    assert {code: (one.count, one.fixed) for code, one in found.items()} == {
        "upload_left": (1, 0),
        "orphan_blob": (1, 0),
    }
    assert {code: one.fixed for code, one in ward.examine(fix=True).items()} == {"upload_left": 1, "orphan_blob": 1}
    assert not left.exists()
    assert not orphan.exists()


def test_a_deleted_gallery_that_is_still_being_read_ends_no_examination(
    ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on PostgreSQL, where its partitions cannot be dropped meanwhile."""
    with ward.database.write() as connection:
        delete_gallery(connection, 1)
    monkeypatch.setattr(partitions, "drop_gallery", lambda *_: False)

    found = ward.examine(fix=True)["gallery_half_freed"]

    assert (found.count, found.fixed) == (1, 0)
    assert found.advice

    monkeypatch.undo()
    assert ward.examine(fix=True)["gallery_half_freed"].fixed == 1
    assert "gallery_half_freed" not in ward.examine()


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


def test_a_gallery_is_gone_through_some_items_at_a_time(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    ward.damage("i1", 1, np.asarray([1, 0, 0, 0]))
    ward.damage("i4", 1, np.asarray([1, 0, 0, 0]))
    ward.damage("i5", 1, np.asarray([0, 3, 4, 0]))
    check_block, items = vectors._check_block, []

    def watched(context: Any, block: Any, *about: Any, **options: Any) -> None:
        items.append(len({row.item_id for row in block}))
        check_block(context, block, *about, **options)

    monkeypatch.setattr(vectors, "ITEMS", 2)
    monkeypatch.setattr(vectors, "_check_block", watched)
    found = ward.examine(fix=True)

    assert found["duplicate_vector"].examples == [f"{ward.gallery}/i4 = i1"]
    assert found["not_unit_vector"].fixed == 1
    assert items == [2, 2, 2]


def test_a_long_vector_is_brought_to_unit_length_and_replicas_are_told(ward: Ward) -> None:
    ward.damage("i5", 1, np.asarray([0, 3, 4, 0]))
    (before,) = ward.rows(select(item.c.seq).where(item.c.external_id == "i5"))

    assert ward.examine(fix=True)["not_unit_vector"].fixed == 1

    assert ward.examine() == {}
    mine = (embedding.c.item_id == ward.ids["i5"], embedding.c.version_id == 1)
    ((stored,),) = ward.rows(select(embedding.c.vector).where(*mine))
    np.testing.assert_allclose(from_bytes([stored], 4)[0], [0, 0.6, 0.8, 0], atol=1e-6)
    assert ward.rows(select(item.c.seq).where(item.c.external_id == "i5"))[0] > before


def test_what_another_doctor_fixed_meanwhile_is_no_finding(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    ward.damage("i5", 1, np.asarray([0, 3, 4, 0]))
    ward.damage("i0", 1, np.zeros(4))  # and holds one by v2
    faster: dict[str, Finding] = {}
    fix = vectors._fix

    def slower(*given: Any) -> None:
        monkeypatch.setattr(vectors, "_fix", fix)
        faster.update(ward.examine(fix=True))
        fix(*given)

    monkeypatch.setattr(vectors, "_fix", slower)

    assert ward.examine(fix=True) == {}

    assert {code: one.fixed for code, one in faster.items()} == {"not_unit_vector": 1, "zero_vector": 1}


def test_what_was_moved_into_a_file_meanwhile_is_still_a_finding(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    ward.damage("i5", 1, np.asarray([0, 3, 4, 0]))
    with ward.database.write() as connection:
        connection.execute(update(embedding).values(digest=None))  # else damaged ones stay where they are
    fix = vectors._fix

    def slower(*given: Any) -> None:
        monkeypatch.setattr(vectors, "_fix", fix)
        ward.offload(monkeypatch)
        fix(*given)

    monkeypatch.setattr(vectors, "_fix", slower)

    found = ward.examine(fix=True)["not_unit_vector"]

    assert (found.count, found.fixed, found.examples) == (1, 0, [f"{ward.gallery}/i5 of v1: 5"])


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
    assert min(seqs.values()) > max(before.values())  # every replica hears of them
    assert len(set(seqs.values())) == 6


def test_an_item_that_lost_an_embedding_is_served_by_another_and_one_that_has_none_is_named(ward: Ward) -> None:
    ward.damage("i0", 2, None)  # served by v2, still holds v1
    ward.damage("i5", 1, None)  # holds nothing any more

    assert ward.examine()["no_embedding"].examples == [f"{ward.gallery}/i5"]
    with serving(ward.settings) as running:
        shown = running.http.get(f"/galleries/{ward.gallery}").json()
        assert shown["mix"] == {"v1": 2, "v2": 3}
        actives = [
            running.http.get(f"/galleries/{ward.gallery}/items/{name}").json()["active"] for name in ("i0", "i5")
        ]
        assert actives == ["v1", None]


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

    found = ward.examine()

    assert (found["unreachable"].count, "1 items of apart" in found["unreachable"].examples[0]) == (1, True)


@pytest.mark.parametrize("harm", ["gone", "changed", "away", "unknown"])
def test_files_of_vectors_are_looked_into_and_nothing_in_them_is_discarded(
    ward: Ward, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ward.settings.data / "blobs" / ward.offload(monkeypatch)[0]  # those of v1
    assert ward.examine(fix=True) == {}
    if harm == "gone":
        first.unlink()
    elif harm == "changed":
        first.write_bytes(first.read_bytes()[:-40])
    elif harm == "away":
        (ward.settings.data / "blobs").rename(ward.settings.data / "elsewhere")
    else:
        other = first.with_name(f"99-{'0' * 16}.parquet")
        other.write_bytes(b"")
        os.utime(other, (1, 1))

    with closing(Database(ward.settings.database_url)) as database:  # which has read nothing yet
        found = Ward(ward.settings, database).examine(fix=True)

    assert {code: finding.count for code, finding in found.items()} == {
        "gone": {"vector_file_missing": 1, "vector_unreadable": 6},
        "changed": {"vector_file_damaged": 1, "vector_unreadable": 6},
        "away": {"store_unreachable": 1, "vectors_unseen": 1},
        "unknown": {"vector_file_unknown": 1},
    }[harm]
    assert ward.rows(select(func.count()).select_from(embedding)) == [(10,)]
    assert not list(first.parent.glob("99-*"))
