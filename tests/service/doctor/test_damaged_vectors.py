"""The doctor on stored vectors: what is damaged is found, and mended or left."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select, update

from service.doctor import vectors
from service.doctor.findings import Finding
from service.store.database.connections import Database
from service.store.galleries.gallery import take_seq
from service.store.tables import embedding, item
from service.store.vectors.codec import from_bytes
from staging.api.served import serving
from staging.states.ward import Ward
from staging.states.working import work

UNUSABLE = [
    pytest.param([1, 0, 0], "wrong_dimension", id="short"),
    pytest.param([], "wrong_dimension", id="empty"),
    pytest.param([1] * 8, "wrong_dimension", id="long"),
    pytest.param([np.nan, 0, 0, 0], "not_finite", id="nan"),
    pytest.param([0, 0, 0, 0], "zero_vector", id="zero"),
]


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
