"""A gallery written to a file and read into another answers alike, also when the import was killed again and again."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import make_url

from index.errors import InvalidArgument
from regraft import Client, cli, transfer
from regraft.client import ImageItem, TextItem
from regraft.sources.base import Wanted
from regraft.sources.pgvector import PgvectorTable
from regraft.sources.table import TableFile
from regraft.transfer import Exported, export_gallery, import_gallery
from service.settings import Settings
from staging.builders import add_text, image_bytes, make_image, make_version
from staging.forked import Forked, environment
from staging.provider import Provider, embedding, providing
from staging.served import Served, serving
from staging.waiting import until

COUNT = 23
RANDOM = np.random.default_rng(0)
OLD, NEW = (RANDOM.normal(size=(COUNT, dim)).astype(np.float32) for dim in (4, 6))
PAGES = Path(__file__).parents[2] / "docs/migrate"


@pytest.fixture
def provider() -> Iterator[Provider]:
    with providing() as running:
        yield running


@pytest.fixture
def served(settings: Settings, provider: Provider, tmp_path: Path) -> Iterator[Served]:
    settings = settings.model_copy(update={"embedding_apis": provider.url})
    v1 = add_text(make_version(tmp_path / "v1", "v1", 4), {"east": OLD[0], "north": OLD[1]})
    v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")])
    with serving(settings) as running:
        for version in (v1, add_text(v2, {"east": NEW[0], "north": NEW[1]})):
            assert running.register(version).status_code == 201
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(str(served.http.base_url).removesuffix("/v1/")) as made:
        yield made


def gallery(client: Client, name: str, version: str) -> str:
    client.create_gallery(name)
    client.deploy(name, version)
    return name


@pytest.fixture
def full(client: Client) -> str:
    """Items by v1 and most by v2 too, some of those transformed; one has v2 only, one an image; v2 is current."""
    name = gallery(client, "full", "v1")
    items = [
        {"id": f"ä/{n}", "metadata": {"n": n, "deep": {"a": [1, None]}}, "embedding": OLD[n]} for n in range(COUNT)
    ]
    client.ingest_embeddings(name, items)
    client.ingest(name, [ImageItem("image", image_bytes(make_image(1, 1)), {"label": "x"})])
    client.deploy(name, "v2")
    second = [{"id": f"ä/{n}", "embedding": NEW[n]} for n in range(COUNT)]
    client.put_embeddings(name, second[:8], version="v2")
    client.put_embeddings(name, second[8:12], version="v2", origin="transformed")
    client.ingest_embeddings(name, [{"id": "only", "embedding": NEW[0]}], version="v2")
    client.delete_item(name, "ä/3")
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


def test_a_gallery_that_was_exported_and_imported_answers_alike(client: Client, full: str, tmp_path: Path) -> None:
    file = tmp_path / "full.parquet"
    assert export_gallery(client, full, file) == Exported(changed=False, damaged=0)
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


def test_texts_are_exported_imported_and_embedded_again_alike(served: Served, client: Client, tmp_path: Path) -> None:
    texts = {f"t{n}": "east " * n + "north\x00 é 敏" for n in range(COUNT)}
    name, other = gallery(client, "texts", "v1"), "other"
    client.ingest_texts(name, [TextItem(key, text) for key, text in texts.items()])
    client.ingest_embeddings(name, [{"id": "bare", "embedding": OLD[2]}])
    client.deploy(name, "v2")
    client.put_embeddings(name, [{"id": f"t{n}", "embedding": NEW[n]} for n in range(9)], version="v2")

    file = tmp_path / "texts.parquet"
    assert export_gallery(client, name, file) == Exported(changed=False, damaged=0)
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


class Killed(BaseException):
    """What ends a process."""


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_an_import_that_is_killed_anywhere_and_run_again_stores_all_and_nothing_twice(
    client: Client, full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_gallery(client, full, file := tmp_path / "full.parquet")
    other, draw, send = gallery(client, "other", "v2"), random.Random(0), client._send

    async def deadly(*args: Any, **request: Any) -> Any:
        moment = draw.random()
        if moment < 0.3:
            raise Killed
        answer = await send(*args, **request)
        if moment > 0.7:
            raise Killed
        return answer

    monkeypatch.setattr(client, "_send", deadly)
    deaths = 0
    while True:
        try:
            done = import_gallery(client, other, TableFile(file, Wanted()), tmp_path / "state", size=2)
            break
        except Killed:
            deaths += 1
    monkeypatch.undo()

    assert deaths > 5
    assert (done.read, done.stored, sum(done.skipped.values())) == (COUNT + 1, COUNT + 1, 0)
    assert held(client, other) == held(client, full)


def again(client: Client, name: str) -> None:
    """The gallery is deleted, and another one has its name."""
    client.delete_gallery(name)
    gallery(client, name, "v1")


def elsewhere(client: Client, _: str) -> None:
    """What is asked has another address."""
    client.url = client.url.replace("127.0.0.1", "localhost")


def nothing(*_: object) -> None:
    """All is as it was."""


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("meanwhile", "wanted", "update_only", "told"),
    [
        (again, Wanted(version="v1"), False, "created was"),
        (elsewhere, Wanted(version="v1"), False, "service was"),
        (nothing, Wanted(version="v2"), False, "version='v1'.*version='v2'"),
        (nothing, Wanted(version="v1", metadata=[]), False, "metadata=None"),
        (nothing, Wanted(version="v1"), True, "update_only was False, is True"),
    ],
)
def test_an_import_of_something_else_or_into_another_gallery_is_not_gone_on_with(
    client: Client, tmp_path: Path, meanwhile: Any, wanted: Wanted, update_only: bool, told: str
) -> None:
    pq.write_table(
        pa.table({"id": [str(n) for n in range(COUNT)], "vector": OLD.tolist()}), file := tmp_path / "x.parquet"
    )
    name, state = gallery(client, "photos", "v1"), tmp_path / "state"

    def kill(_: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        import_gallery(client, name, TableFile(file, Wanted(version="v1")), state, size=7, moved=kill)
    meanwhile(client, name)
    with pytest.raises(InvalidArgument, match=told):
        import_gallery(client, name, TableFile(file, wanted), state, size=7, update_only=update_only)
    state.write_text(json.dumps({"source": TableFile(file, wanted).identity, "gallery": name, "cursor": 7}))
    with pytest.raises(InvalidArgument, match="an earlier release"):
        import_gallery(client, name, TableFile(file, wanted), state, size=7, update_only=update_only)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_command_that_goes_on_after_a_deployment_says_so_instead_of_mixing_versions(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pq.write_table(
        pa.table({"id": [str(n) for n in range(COUNT)], "vector": OLD.tolist()}), file := tmp_path / "x.parquet"
    )
    name, send = gallery(client, "photos", "v1"), transfer._write
    command = ["regraft", "import", name, str(file), "--batch", "7", "--url", client.url]

    def run(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    def write(*args: Any) -> None:
        send(*args)
        raise Killed

    monkeypatch.setattr(transfer, "_write", write)
    with pytest.raises(Killed):
        run()
    monkeypatch.setattr(transfer, "_write", send)
    client.deploy(name, "v2")

    assert run() == 1
    assert "version='v1'" in capsys.readouterr().err
    assert run("--version", "v1") == 0
    assert (client.gallery(name).items, client.gallery(name).mix) == (COUNT, {"v1": COUNT})


def test_a_process_that_imports_is_killed_at_random_points_and_goes_on(
    client: Client, full: str, tmp_path: Path
) -> None:
    export_gallery(client, full, file := tmp_path / "full.parquet")
    other, state = gallery(client, "other", "v2"), tmp_path / "state"
    command = ["-m", "regraft", "import", other, file, "--batch", "1", "--state", state, "--url", client.url, "--json"]
    draw, deaths, reached = random.Random(1), 0, [0]

    def read() -> int:
        with suppress(FileNotFoundError):  # it goes once all is done
            return int(json.loads(state.read_text())["read"])
        return 0

    while reached[-1] < COUNT:
        process = Forked(command, environment(), tmp_path / f"out{deaths}")
        point = reached[-1] + draw.randint(2, 6)
        until(lambda: read() >= point or process.poll() is not None)  # noqa: B023 - it is asked in this turn only
        time.sleep(draw.random() / 50)
        process.kill()
        if process.wait(60) == 0:
            break
        deaths += 1
        if reached[-1] and not state.exists():  # killed when all was done
            break
        reached.append(read())
    if process.returncode != 0:
        assert Forked(command, environment(), tmp_path / f"out{deaths}").wait(60) == 0

    told = json.loads((tmp_path / f"out{deaths}").read_text().splitlines()[-1])
    assert deaths >= 2
    assert reached == sorted(reached)
    assert (told["read"], told["stored"], told["skipped"]) == (COUNT + 1, COUNT + 1, {})
    assert held(client, other) == held(client, full)
    assert not state.exists()


def follow(page: Path, client: Client, monkeypatch: Any, put: dict[str, str]) -> dict[str, int]:
    """Run the commands of a page with something put in the place of parts of them; command -> exit code."""
    monkeypatch.setenv("REGRAFT_URL", client.url)
    codes = {}
    for line in "".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)).splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        for old, new in put.items():
            words = [word.replace(old, new) for word in words]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        codes[" ".join(words[1:4])] = ended.value.code or 0
    return codes


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_the_commands_of_the_page_bring_vectors_of_two_models(
    client: Client, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, vectors in (("v1", OLD), ("v2-some", NEW[:21]), ("v2", NEW)):
        np.save(f"{name}.npy", vectors)
    np.savez("queries.npz", **{"api-v1": OLD[:9], "api-v2": NEW[:9]})
    # All are right: what the two models find by chance must not refuse.
    Path("relevant.json").write_text(json.dumps([[f"d{n}" for n in range(COUNT)]] * 9))
    for name, count in (("ids", COUNT), ("ids-some", 21)):
        Path(f"{name}.txt").write_text("\n".join(f"d{n}" for n in range(count)))

    bodies = [f"word{n} word{n % 5}" for n in range(40)]
    rows = {"id": [f"n{n}" for n in range(40)], "body": bodies, "embedding": [embedding(t, 4).tolist() for t in bodies]}
    pq.write_table(pa.table(rows), "notes.parquet")
    monkeypatch.setenv("OPENAI_API_KEY", provider.key)
    put = {"1536": "4", "3072": "6", "https://api.openai.com/v1": provider.url}
    codes = follow(PAGES / "from-an-api.md", client, monkeypatch, put)

    assert [line for line, code in codes.items() if code] == [], capsys.readouterr().err
    assert client.gallery("docs").mix == {"api-v2": COUNT}
    assert client.query_embeddings("docs", NEW[22:], "api-v2").results[0].matches[0].id == "d22"
    (report,) = client.gates("docs")
    assert (report.verdict, report.queries, report.items, report.relevant_missing) == ("warn", 9, COUNT, 0)
    (fitted,) = client.edges(new="n2", old="n1")
    assert (fitted.made["held"], fitted.made["embedded"], fitted.support) == (0, 40, 32)


@pytest.mark.filterwarnings("default")  # the client's own
@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_the_commands_of_the_page_move_a_collection_of_qdrant(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    models = pytest.importorskip("qdrant_client.models", reason="regraft[from-qdrant] is not installed")
    from qdrant_client import QdrantClient

    there = QdrantClient(path=str(tmp_path / "there"))
    there.create_collection("photos", models.VectorParams(size=4, distance=models.Distance.COSINE))
    points = [models.PointStruct(id=n, vector=OLD[n].tolist(), payload={"n": n}) for n in range(COUNT)]
    there.upsert("photos", points)
    there.close()
    monkeypatch.chdir(tmp_path)

    codes = follow(
        PAGES / "from-qdrant.md", client, monkeypatch, {"http://localhost:6333": str(tmp_path / "there"), "512": "4"}
    )

    assert set(codes.values()) == {0}, (codes, capsys.readouterr())
    assert client.gallery("photos").mix == {"clip-v1": COUNT}
    assert held(client, "photos")["7"][0] == {"n": 7}


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_the_commands_of_the_page_move_a_table_of_pgvector(
    client: Client, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    url = server.create()
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as connection:
        try:
            connection.execute("CREATE EXTENSION vector")
        except psycopg.Error:
            pytest.skip("this PostgreSQL has no pgvector")
        connection.execute(
            "CREATE TABLE products (id bigint PRIMARY KEY, name text, price numeric, embedding vector(4))"
        )
        rows = [(n, f"p{n}", n / 2, None if n == 5 else str(OLD[n].tolist())) for n in range(COUNT)]
        connection.cursor().executemany("INSERT INTO products VALUES (%s, %s, %s, %s)", rows)
    monkeypatch.chdir(tmp_path)
    codes = follow(PAGES / "from-pgvector.md", client, monkeypatch, {"$DATABASE_URL": plain, "1536": "4"})
    server.drop(url)

    assert codes.pop(f"import products pgvector:{plain}#products") == 3, capsys.readouterr()  # one row has no vector
    assert set(codes.values()) == {0}, (codes, capsys.readouterr())
    stored = held(client, "products")
    assert set(stored) == {str(n) for n in range(COUNT) if n != 5}
    assert stored["7"][0] == {"name": "p7", "price": "3.5"}


@pytest.mark.parametrize(("kind", "named"), [("integer", "{}"), ("char(8)", "k{:02}"), ("bit(8)", "{:08b}")])
def test_rows_of_a_table_come_once_in_the_order_of_their_ids_and_those_without_one_are_counted(
    server: Any, kind: str, named: str
) -> None:
    urls, sources = [server.create(), server.create()], []
    for url in urls:
        plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(plain) as connection:
            connection.execute(f"CREATE TABLE things (id {kind}, embedding real[])")
            rows = [(None if n % 3 == 0 else named.format(n), OLD[n].tolist()) for n in range(COUNT)]
            connection.cursor().executemany("INSERT INTO things VALUES (%s, %s)", rows)
        sources.append(PgvectorTable(plain, "things", Wanted()))

    batches = list(islice(sources[0].batches(4), 20))
    for url in urls:
        server.drop(url)

    assert [i for batch in batches for i in batch.ids] == [named.format(n) for n in range(COUNT) if n % 3]
    assert (sum(batch.read for batch in batches), batches[-1].skipped) == (COUNT, {"no id": 8})
    assert batches[-1].cursor == batches[-2].cursor
    assert sources[0].identity != sources[1].identity


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_the_commands_of_the_page_store_a_folder_of_images_and_change_its_model(
    served: Served, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, dim, drift in (("first", 6, 0.0), ("second", 8, 0.1)):
        made = make_version(tmp_path / "made" / name, name, dim, drift=drift)
        Path("models", name).mkdir(parents=True)
        shutil.copy(made.folder / "encoder.onnx", f"models/{name}/model.onnx")
        described = json.loads((made.folder / "card.json").read_text())["preprocess"]
        Path("models", name, "preprocessor_config.json").write_text(json.dumps(described))
    for number in range(60):
        path = Path("my-photos", ("cats", "dogs", "owls")[number % 3], f"{number // 3 + 1}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(make_image(number % 3, number)))

    codes = follow(PAGES / "from-a-folder-of-images.md", client, monkeypatch, {})
    shown = capsys.readouterr()
    gallery = client.gallery("photos")
    served.work()

    assert set(codes.values()) == {0}, [c for c in codes if codes[c]]
    assert (gallery.current, gallery.mix) == ("second", {"first": 60})
    assert shown.out.count("cats/1.png") == 2
    assert client.gallery("photos").mix == {"second": 60}
    client.retire("photos", "first")
