"""The doctor: every finding on data that was damaged on purpose, and nothing on healthy data."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from sqlalchemy import func, insert, select, update

from service.doctor import vectors
from service.store.database.connections import Database
from service.store.galleries import partitions
from service.store.galleries.deletion import delete_gallery
from service.store.image_store.blobs import Blobs, StoreUnreachable
from service.store.tables import embedding, evaluation, evaluation_embedding, item
from service.store.vectors.codec import to_bytes
from service.store.vectors.reader import with_vectors
from staging.api.served import problem, serving
from staging.inputs.builders import make_version
from staging.states.ward import Ward


def test_nothing_is_wrong_with_healthy_data(ward: Ward) -> None:
    assert ward.examine() == {}
    assert ward.examine(fix=True) == {}


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


def test_a_version_that_cannot_be_deleted_is_not_said_to_be_unused(ward: Ward, tmp_path: Path) -> None:
    """No gallery is at `apart`, but one was: its history names it."""
    with serving(ward.settings) as running:
        running.register(make_version(tmp_path / "apart", "apart", 3, encoder=False))
        path = running.gallery("apart")
        running.deploy(path, "v1")
        problem(running.remove("/versions/apart"), 409, "version_needed")
    assert ward.examine() == {}


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
