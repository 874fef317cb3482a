"""A gallery of vectors, measured by vectors: an evaluation set in one file, a gate and a curve, all by command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from index.encoders.encoder import Encoder
from regraft import cli
from staging.api.served import Served
from staging.inputs.builders import make_image


@pytest.fixture
def run(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    monkeypatch.setenv("REGRAFT_URL", served.url)

    def command(*words: object) -> tuple[int, Any, str]:
        monkeypatch.setattr(sys, "argv", ["regraft", *map(str, words), "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), json.loads(told.out) if told.out else None, told.err

    return command


@pytest.fixture(scope="module")
def vectors(served: Served) -> dict[str, Any]:
    """What v1 and `fct` say of the same sixty images of five classes."""
    made = {"v1": served.versions["v1"], "fct": served.add("fct", 5, edges=[("v1", "forward")])}
    images = [make_image(n % 5, n) for n in range(60)]
    return {name: Encoder(version).encode(images).vectors for name, version in made.items()}


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_a_gate_and_a_curve_are_measured_on_vectors(
    served: Served, run: Any, vectors: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    path = served.gallery("v1")
    name, labels = path.rpartition("/")[2], [n % 5 for n in range(60)]
    rows = {"id": [f"i{n}" for n in range(30)], "label": labels[:30], "embedding": vectors["v1"][:30].tolist()}
    pq.write_table(pa.table(rows), items := tmp_path / "items.parquet")
    asked = {name: rows[30:] for name, rows in vectors.items()}
    if kind == "npz":
        np.savez(file := tmp_path / "asked.npz", **asked, labels=np.array(labels[30:]))
    else:
        columns = {"vector:v1": asked["v1"].tolist(), "fct": asked["fct"].tolist(), "label": labels[30:]}
        pq.write_table(pa.table(columns), file := tmp_path / "asked.parquet")

    assert run("import", name, items)[0] == 0
    code, added, _ = run("evaluation", "add", name, "--embeddings", file)
    assert (code, added["kind"], added["size"], added["labelled"]) == (0, "embeddings", 30, 30)
    assert sorted(added["versions"]) == ["fct", "v1"]
    code, gate, _ = run("gate", name, "fct", "--evaluation", added["id"])
    assert (gate["items"], gate["verdict"] in {"pass", "warn", "refuse"}, code in {0, 2, 3}) == (30, True, True)

    served.deploy(path, "fct")
    curve = ("--evaluation", added["id"], "--label", "label", "--marks", "2")
    code, begun, said = run("backfill", "start", name, "--kind", "transform", *curve)
    assert code == 0, said
    served.work()
    points = served.http.get(f"/backfills/{begun['id']}").json()["curve"]["points"]
    assert {point["queries"] for point in points} == {30}
    assert served.http.get(path).json()["mix"] == {"fct": 30}


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"labels": np.arange(3)}, "has no array of embeddings"),
        ({"v1": np.eye(4), "labels": np.arange(3)}, "3 values of label for 4 embeddings"),
        ({"v1": np.eye(4), "fct": np.eye(5)}, "the same number of embeddings"),
        ({"v1": np.full((2, 4), np.nan)}, "must be finite"),
    ],
)
def test_a_file_that_is_no_set_is_named(served: Served, run: Any, tmp_path: Path, arrays: Any, told: str) -> None:
    np.savez(file := tmp_path / "a.npz", **arrays)
    code, _, said = run("evaluation", "add", "g", "--embeddings", file)
    assert code != 0
    assert told in said


def keep_in_qdrant(distance: str, payloads: Sequence[dict[str, Any]]) -> None:
    """Create the collection qdrant:kept#things in the working folder, with a point for each payload."""
    models = pytest.importorskip("qdrant_client.models", reason="regraft[from-qdrant] is not installed")
    from qdrant_client import QdrantClient

    kept = QdrantClient(path="kept")
    kept.create_collection("things", models.VectorParams(size=4, distance=models.Distance(distance)))
    points = enumerate(payloads, 1)
    kept.upsert("things", [models.PointStruct(id=n, vector=[n, 1.0, 0.0, 0.0], payload=p) for n, p in points])
    kept.close()


def test_a_database_that_compares_otherwise_is_imported_only_when_told_to(
    served: Served, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep_in_qdrant("Euclid", [{}] * 3)
    gallery = served.gallery("v1").rpartition("/")[2]

    code, _, said = run("import", gallery, "qdrant:kept#things")
    done, counted, _ = run("import", gallery, "qdrant:kept#things", "--ignore-metric")

    assert (code, "by Euclid, but v1 has space cosine" in said) == (1, True)
    assert (done, counted["stored"]) == (0, 3)


def test_a_row_that_is_too_large_for_the_service_is_skipped_and_the_import_goes_on(
    served: Served, run: Any, tmp_path: Path
) -> None:
    vectors, notes = np.eye(4).tolist(), ["short"] * 4
    notes[2] *= served.runtime.settings.max_body_bytes // len(notes[2])
    pq.write_table(pa.table({"id": list("abcd"), "embedding": vectors, "note": notes}), file := tmp_path / "r.parquet")
    path = served.gallery("v1")

    code, counted, said = run("import", path.rpartition("/")[2], file)

    assert (code, counted["stored"], counted["skipped"]) == (3, 3, {"body_too_large": 1})
    assert "c: the body is larger than" in said
    assert {one["id"] for one in served.http.get(f"{path}/items").json()["items"]} == set("abd")


def test_a_field_of_metadata_that_no_row_has_is_warned_of(
    served: Served, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keep_in_qdrant("Cosine", [*({"n": n} for n in range(1, 5)), {}])
    gallery = served.gallery("v1").rpartition("/")[2]
    asked = ("import", gallery, "qdrant:kept#things", "--metadata", "n,citty")

    code, counted, said = run(*asked, "--batch", "2")

    assert (code, counted["stored"], counted["fields"]) == (0, 5, {"n": 4, "citty": 0})
    assert [line for line in said.splitlines() if "warning" in line] == [
        f"warning: none of {which} rows has a value of the metadata field 'citty'" for which in ("the first 2", "5")
    ]
    code, _, said = run(*asked, "--update-only")
    assert (code, "--metadata cannot be used with --update-only" in said) == (1, True)


def test_the_nested_metadata_of_a_framework_become_those_of_items(
    served: Served, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nested = [{"page_content": f"text {n}", "metadata": {"source": f"s{n % 2}", "page": n}} for n in range(1, 4)]
    keep_in_qdrant("Cosine", nested)
    path = served.gallery("v1")
    asked = ("import", path.rpartition("/")[2], "qdrant:kept#things", "--text", "page_content", "--flatten")

    assert (run(*asked, "meta")[0], run(*asked, "metadata", "--update-only")[0]) == (1, 1)
    assert run(*asked, "metadata")[0] == 0

    found = served.http.get(f"{path}/items", params={"filter": '{"field": "source", "eq": "s1"}'}).json()["items"]
    assert [one["metadata"] for one in found] == [{"source": "s1", "page": 1}, {"source": "s1", "page": 3}]
