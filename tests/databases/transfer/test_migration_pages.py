"""The commands of docs/migrate, run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from index.engines.pgvector.connections import libpq_url
from regraft import Client, cli
from staging.api.served import Served
from staging.external.provider import Provider, embedding
from staging.inputs.builders import image_bytes, make_image, make_version
from staging.states.transferred import COUNT, NEW, OLD, create_pgvector, held

PAGES = Path(__file__).parents[3] / "docs/migrate"


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
        codes[" ".join(words[1:4])] = int(ended.value.code or 0)
    return codes


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
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
@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
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


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_the_commands_of_the_page_move_a_table_of_pgvector(
    client: Client, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    url = server.create()
    plain = libpq_url(url)
    with psycopg.connect(plain) as connection:
        create_pgvector(connection)
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


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
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
