"""A gallery written to a file and read into another answers alike; a table's rows become items."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from index.creation.supplied import Supplied
from index.engines.pgvector.connections import libpq_url
from index.errors import InvalidArgument, Unwritable
from regraft import Client, Version
from regraft.client import TextItem
from regraft.sources.base import Wanted
from regraft.sources.opening import open_source
from regraft.sources.pgvector import PgvectorTable
from regraft.sources.table import TableFile
from regraft.transfer.exports import ExportResult, export_gallery
from regraft.transfer.imports import import_gallery
from staging.api.served import Served
from staging.external.postgres import Server
from staging.states.transferred import COUNT, NEW, OLD, answers, create_pgvector, gallery, held


def test_a_gallery_that_was_exported_and_imported_answers_alike(client: Client, full: str, tmp_path: Path) -> None:
    file = tmp_path / "full.parquet"
    assert export_gallery(client, full, file) == ExportResult(changed=False, damaged=0)
    other = gallery(client, "other", "v2")

    done = import_gallery(client, other, TableFile(file, Wanted()), tmp_path / "state", size=7)

    assert (done.read, done.stored, sum(done.skipped.values())) == (COUNT + 1, COUNT + 1, 0)
    assert held(client, other) == held(client, full)
    assert answers(client, other) == answers(client, full)

    missing = client.missing_items(other, version="v2").ids
    waiting = client.start_backfill(other, kind="supplied")
    assert (waiting.remaining, len(missing)) == (COUNT + 1 - 8, COUNT + 1 - 8)
    client.put_embeddings(other, [{"id": name, "embedding": NEW[0]} for name in missing], version="v2")
    assert (client.backfill(waiting.id).state, client.gallery(other).mix) == ("done", {"v2": COUNT + 1})
    assert sorted(path.name for path in tmp_path.glob("*") if "state" in path.name or "part" in path.name) == []


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
def test_an_export_that_fails_names_the_file_and_leaves_it_and_the_next_clears_what_a_killed_one_left(
    client: Client, full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    export_gallery(client, full, file := folder / "full.parquet")
    before = file.read_bytes()

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", disk_full)
        with pytest.raises(Unwritable, match=r"full\.parquet could not be written: No space left on device"):
            export_gallery(client, full, file)
    assert (file.read_bytes(), list(folder.iterdir())) == (before, [file])

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # as killed
        patch.setattr(pq.ParquetWriter, "write_table", disk_full)
        with pytest.raises(Unwritable):
            export_gallery(client, full, file)
    assert len(list(folder.iterdir())) == 2
    export_gallery(client, full, file)
    assert list(folder.iterdir()) == [file]


def test_texts_are_exported_imported_and_embedded_again_alike(served: Served, client: Client, tmp_path: Path) -> None:
    texts = {f"t{n}": "east " * n + "north\x00 é 敏" for n in range(COUNT)}
    name, other = gallery(client, "texts", "v1"), "other"
    client.ingest_texts(name, [TextItem(key, text) for key, text in texts.items()])
    client.ingest_embeddings(name, [{"id": "bare", "embedding": OLD[2]}])
    client.deploy(name, "v2")
    client.put_embeddings(name, [{"id": f"t{n}", "embedding": NEW[n]} for n in range(9)], version="v2")

    file = tmp_path / "texts.parquet"
    assert export_gallery(client, name, file) == ExportResult(changed=False, damaged=0)
    done = import_gallery(client, gallery(client, other, "v2"), TableFile(file, Wanted()), tmp_path / "state", size=7)

    assert (done.stored, sum(done.skipped.values())) == (COUNT + 1, 0)
    assert held(client, other) == held(client, name)
    items = client.items(other, limit=1000, with_text=True).items
    assert {item.id: item.text for item in items} == {**texts, "bare": None}
    for one in (name, other):
        client.start_backfill(one)
    served.work()
    assert held(client, other) == held(client, name)
    assert client.gallery(other).mix == {"v1": 1, "v2": COUNT}


def test_a_table_of_ids_and_vectors_leaves_the_metadata_that_are_there(client: Client, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a", "b"], "embedding": OLD[:2].tolist()}), file := tmp_path / "rows.parquet")
    name = gallery(client, "bare", "v1")
    client.ingest_embeddings(name, [{"id": "a", "metadata": {"n": 1}, "embedding": OLD[9]}])

    import_gallery(client, name, TableFile(file, Wanted(version="v1")), tmp_path / "state")

    assert [(one.id, one.metadata) for one in client.items(name).items] == [("a", {"n": 1}), ("b", {})]


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_of_an_id_that_comes_again_the_first_row_is_stored_wherever_batches_end(
    client: Client, tmp_path: Path, size: int
) -> None:
    rows = {"key": ["same", "other", "same", "there", "same"], "v": OLD[:5].tolist()}
    pq.write_table(pa.table(rows), file := tmp_path / "rows.parquet")
    name = gallery(client, "again", "v1")
    client.ingest_embeddings(name, [{"id": "there", "embedding": OLD[9]}])

    source = TableFile(file, Wanted(id="key", vectors={"v": "v1"}))
    done = import_gallery(client, name, source, tmp_path / "state", size=size)

    assert (done.stored, done.new, done.skipped) == (3, 2, {"duplicate_id": 2})
    stored = {key: one[2][0][2] for key, one in held(client, name).items()}
    unit = OLD / np.linalg.norm(OLD, axis=1, keepdims=True)
    assert stored == {key: pytest.approx(unit[n], abs=1e-5) for n, key in ((0, "same"), (1, "other"), (3, "there"))}


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize(
    ("rows", "held_by", "skipped"),
    [
        ({"v": [None, OLD[1], OLD[2]]}, {"a": ["v1"], "b": ["v1"]}, {"no vector": 1}),
        ({"v": [0 * OLD[0], OLD[1], OLD[2]]}, {"a": ["v1"], "b": ["v1"]}, {"invalid_vector": 1}),
        ({"v": [np.nan * OLD[0], OLD[1], OLD[2]]}, {"a": ["v1"], "b": ["v1"]}, {"not finite": 1}),
        ({"v": [OLD[0], None, OLD[2]], "w": [None, NEW[1], NEW[2]]}, {"a": ["v1", "v2"], "b": ["v1", "v2"]}, {}),
        (
            {"v": [OLD[0], OLD[1], OLD[2]], "w": [None, NEW[1], NEW[2]]},
            {"a": ["v1", "v2"], "b": ["v1", "v2"]},
            {"duplicate_id, of v1 alone": 1},
        ),
    ],
)
def test_a_row_whose_id_came_before_adds_what_is_not_stored_yet(
    client: Client, tmp_path: Path, size: int, rows: Any, held_by: Any, skipped: Any
) -> None:
    columns = {name: [None if v is None else v.tolist() for v in vectors] for name, vectors in rows.items()}
    pq.write_table(pa.table({"id": ["a", "a", "b"], "n": [0, 1, 2], **columns}), file := tmp_path / "rows.parquet")
    name = gallery(client, "again", "v2")

    source = TableFile(file, Wanted(vectors={"v": "v1", "w": "v2"} if "w" in rows else {"v": "v1"}, id="id"))
    done = import_gallery(client, name, source, tmp_path / "state", size=size)

    assert {key: sorted(made[0] for made in one[2]) for key, one in held(client, name).items()} == held_by
    assert (done.read, done.stored, done.new, done.skipped) == (3, 2, 2, skipped)
    first = 0 if "w" in rows else 1
    assert held(client, name)["a"][0] == {"n": first}


@pytest.mark.parametrize("size", [1, 1000])
def test_of_texts_with_one_id_the_first_that_can_be_stored_is(client: Client, tmp_path: Path, size: int) -> None:
    rows = {"key": ["a", "a", "a"], "body": ["  ", "east", "north"], "v": [None, None, OLD[1].tolist()]}
    pq.write_table(pa.table(rows), file := tmp_path / "texts.parquet")

    source = TableFile(file, Wanted(id="key", text="body", vectors={"v": "v1"}))
    done = import_gallery(client, name := gallery(client, "texts", "v1"), source, tmp_path / "state", size=size)

    assert (done.stored, done.skipped) == (1, {"invalid_text": 1, "duplicate_id": 1})
    assert [one.text for one in client.items(name, with_text=True).items] == ["east"]


def test_texts_alone_are_imported_and_embedded(client: Client, tmp_path: Path) -> None:
    rows = {"key": ["a", "b", None, "d"], "body": ["east", "  ", "north", None], "n": [1, 2, 3, 4]}
    pq.write_table(pa.table(rows), file := tmp_path / "texts.parquet")

    source = TableFile(file, Wanted(id="key", text="body"))
    done = import_gallery(client, name := gallery(client, "texts", "v1"), source, tmp_path / "state")

    assert (done.stored, done.skipped) == (1, {"no id": 1, "no vector": 1, "invalid_text": 1})
    assert [(one.text, one.metadata) for one in client.items(name, with_text=True).items] == [("east", {"n": 1})]


@pytest.mark.parametrize("size", [1, 1000])
def test_a_blank_text_costs_a_row_nothing_but_its_text(client: Client, tmp_path: Path, size: int) -> None:
    rows = {"id": ["a", "b"], "body": [" \n", "east"], "v": OLD[:2].tolist()}
    pq.write_table(pa.table(rows), file := tmp_path / "texts.parquet")

    source = TableFile(file, Wanted(text="body", vectors={"v": "v1"}))
    done = import_gallery(client, name := gallery(client, "texts", "v1"), source, tmp_path / "state", size=size)

    assert (done.stored, done.skipped) == (2, {})
    items = client.items(name, with_text=True).items
    assert {one.id: one.text for one in items} == {"a": None, "b": "east"}


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_text_without_a_vector_that_the_current_version_cannot_embed_is_counted(
    client: Client, tmp_path: Path, size: int
) -> None:
    client.register_version(Version.create(tmp_path / "from-outside", Supplied(4)).folder)
    rows = {"id": ["a", "b", "c"], "body": ["north", "east", "north"], "v": [None, OLD[1].tolist(), None]}
    pq.write_table(pa.table(rows), file := tmp_path / "texts.parquet")

    source = TableFile(file, Wanted(text="body", vectors={"v": "from-outside"}))
    done = import_gallery(
        client, name := gallery(client, "texts", "from-outside"), source, tmp_path / "state", size=size
    )

    assert (done.read, done.stored, done.skipped) == (3, 1, {"no_text_entrance": 2})
    assert done.examples["no_text_entrance"].startswith("a: version 'from-outside' has no text entrance")
    assert [(one.id, one.text) for one in client.items(name, with_text=True).items] == [("b", "east")]


@pytest.mark.parametrize(("kind", "named"), [("integer", "{}"), ("char(8)", "k{:02}"), ("bit(8)", "{:08b}")])
def test_rows_of_a_table_come_once_in_the_order_of_their_ids_and_those_without_one_are_counted(
    server: Any, kind: str, named: str
) -> None:
    urls, sources = [server.create(), server.create()], []
    for url in urls:
        plain = libpq_url(url)
        with psycopg.connect(plain) as connection:
            connection.execute(f"CREATE TABLE things (id {kind}, embedding real[])")
            rows = [(None if n % 3 == 0 else named.format(n), OLD[n].tolist()) for n in range(COUNT)]
            connection.cursor().executemany("INSERT INTO things VALUES (%s, %s)", rows)
        sources.append(PgvectorTable(url, "things", Wanted()))  # with a driver, as the service's own
    with pytest.raises(InvalidArgument, match="things has no column 'citty', only: id, embedding"):
        PgvectorTable(urls[0], "things", Wanted(text="citty"))
    with pytest.raises(InvalidArgument, match="things has no field 'citty', only: id, embedding"):
        open_source(f"pgvector:{urls[0]}#things", Wanted(metadata=("id", "citty")))

    batches = list(islice(sources[0].batches(4), 20))
    for url in urls:
        server.drop(url)

    assert [i for batch in batches for i in batch.ids] == [named.format(n) for n in range(COUNT) if n % 3]
    assert (sum(batch.read for batch in batches), batches[-1].skipped) == (COUNT, {"no id": 8})
    assert batches[-1].cursor == batches[-2].cursor
    assert sources[0].identity != sources[1].identity


def test_dates_of_a_table_that_python_has_not_stay_text_and_other_columns_are_not_read(server: Server) -> None:
    url = server.create()
    plain = libpq_url(url)
    with psycopg.connect(plain) as connection:
        connection.execute("CREATE TABLE things (id int, embedding real[], d date, t timestamp, z timestamptz, n int)")
        connection.execute("SET TIME ZONE 'UTC'")
        said = [("infinity", "-infinity", "infinity"), ("0044-03-15 BC", "2024-01-02 03:04:05", "2024-01-02 03:04:05")]
        rows = [(n, OLD[n].tolist(), *one, n) for n, one in enumerate(said)]
        connection.cursor().executemany("INSERT INTO things VALUES (%s, %s, %s, %s, %s, %s)", rows)
    (everything,) = PgvectorTable(plain, "things", Wanted()).batches(9)
    with psycopg.connect(plain) as connection:
        connection.execute("ALTER TABLE things ADD COLUMN odd interval DEFAULT '-178000000 years'")  # none of Python's
    (named,) = PgvectorTable(plain, "things", Wanted(metadata=["d"])).batches(9)
    server.drop(url)

    assert everything.metadata == [
        {"d": "infinity", "t": "-infinity", "z": "infinity", "n": 0},
        {"d": "0044-03-15 BC", "t": "2024-01-02T03:04:05", "z": "2024-01-02T03:04:05+00:00", "n": 1},
    ]
    assert named.metadata == [{"d": "infinity"}, {"d": "0044-03-15 BC"}]


def test_another_column_of_vectors_and_the_ids_are_metadata_only_if_asked_for(server: Server) -> None:
    url = server.create()
    plain = libpq_url(url)
    with psycopg.connect(plain) as connection:
        create_pgvector(connection)
        connection.execute("CREATE TABLE things (id int, embedding vector(2), a vector(2), b halfvec(2), n int)")
        connection.execute("INSERT INTO things VALUES (1, '[1,2]', '[3,4]', '[5,6]', 7)")
    wanted = (Wanted(), Wanted(metadata=["a", "id"]))
    (everything,), (named,) = (PgvectorTable(plain, "things", one).batches(9) for one in wanted)
    server.drop(url)

    assert (everything.metadata, everything.columns[0].vectors.tolist()) == ([{"n": 7}], [[1.0, 2.0]])
    assert named.metadata == [{"a": "[3,4]", "id": 1}]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_rows_of_a_table_with_one_id_all_come_wherever_pages_end(server: Server, size: int) -> None:
    url = server.create()
    plain = libpq_url(url)
    with psycopg.connect(plain) as connection:
        connection.execute("CREATE TABLE things (id text, embedding real[])")
        rows = [("a", None), ("b", None), ("b", OLD[1].tolist()), ("b", OLD[2].tolist()), ("c", OLD[3].tolist())]
        connection.cursor().executemany("INSERT INTO things VALUES (%s, %s)", rows)
    batches = list(PgvectorTable(plain, "things", Wanted()).batches(size))
    texts = [text for batch in PgvectorTable(plain, "things", Wanted(text="id")).batches(size) for text in batch.texts]
    server.drop(url)

    assert sum(batch.read for batch in batches) == 5
    assert texts == ["a", "b", "b", "b", "c"]
    assert [key for batch in batches for key in batch.ids] == ["b", "b", "c"]
    assert batches[-1].cursor == "c"
