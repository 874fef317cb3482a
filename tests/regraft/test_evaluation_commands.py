"""`regraft evaluation`: sets of images, and of embeddings made elsewhere."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def test_evaluation_add_names_the_image_that_is_refused(run, service, tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"x")
    detail = "these bytes are not an image"
    errors = [{"pointer": "/entries/1/image", "detail": detail}]
    body = {"code": "invalid_image", "detail": detail, "errors": errors}
    service.answers["POST /v1/galleries/g/evaluations"] = httpx.Response(422, json=body)

    code, _, said = run("evaluation", "add", "g", tmp_path)

    assert code == 1
    assert f"{tmp_path / 'b.png'}: these bytes are not an image" in said


def test_evaluation_add_names_the_file_that_is_empty(run, service, tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "b.png").write_bytes(b"")

    code, _, said = run("evaluation", "add", "g", tmp_path)

    assert (code, f"{tmp_path / 'b.png'} is empty" in said, service.requests) == (1, True, [])


@pytest.mark.parametrize("there", ["a folder", "a file", ""])
def test_evaluation_add_of_nothing_is_wrong_usage_and_names_the_folder(run, service, tmp_path, there):
    folder = tmp_path / "empty"
    if there == "a folder":
        folder.mkdir()
    elif there:
        folder.write_text("[]")

    code, _, said = run("evaluation", "add", "g", folder)

    assert code == 2
    words = "".join(said.replace("│", "").split())  # a long path is wrapped
    assert ("hasnoimages" if there else "doesnotexist") in words
    assert "empty" in words
    assert service.requests == []


def test_evaluation_add_sends_embeddings_of_each_version_with_labels(run, service, tmp_path):
    service.answers["POST /v1/galleries/g/evaluations"] = {"id": 2, "size": 2, "kind": "embeddings"}
    rows = {"v1": [[1.0, 0.0], [0.0, 1.0]], "v2": [[0.5], [2.0]], "v3": [[3.0], [4.0]]}
    np.save(tmp_path / "a.npy", np.array(rows["v1"], np.float32))
    np.savez(tmp_path / "b.npz", v2=np.array(rows["v2"]), other=np.zeros(3))
    (tmp_path / "c.json").write_text(json.dumps(rows["v3"]))
    (tmp_path / "labels.json").write_text('["boot", 3]')
    given = [("--embeddings", tmp_path / f) for f in ("a.npy", "b.npz", "c.json")] + [("--version", v) for v in rows]
    options = [word for pair in given for word in pair]

    shown = run("evaluation", "add", "g", *options, "--labels", tmp_path / "labels.json", "--name", "feet")[1]

    assert shown == "g: evaluation set 2 of 2 embeddings\n"
    sent = json.loads(service.requests[-1].content)
    assert sent == {"name": "feet", "entries": [{"label": "boot"}, {"label": 3}], "embeddings": rows}


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        ("", 2, "either a folder of images or embeddings"),
        (". --embeddings two.json --version v1", 2, "either a folder of images or embeddings"),
        (". --version v1", 2, "require --embeddings"),
        ("--embeddings two.json", 2, "as many different versions"),
        ("--embeddings two.json --version v1 --embeddings three.json --version v2", 2, "v1: 2, v2: 3"),
        ("--embeddings two.json --version v1 --labels three.json", 1, "a JSON list of 2 labels"),
        ("--embeddings two.json --version v1 --labels nowhere.json", 1, "nowhere.json"),
        ("--embeddings nowhere.npy --version v1", 1, "nowhere.npy"),
        ("--embeddings broken.npz --version v1", 1, "broken.npz cannot be read"),
        ("--embeddings damaged.npz --version v1", 1, "damaged.npz cannot be read as embeddings"),
        ("--embeddings number.npz", 1, "number.npz: labels must have one per embedding (N,), not the shape ()"),
        ("--embeddings header.npy --version v1", 1, "header.npy cannot be read as embeddings"),
        ("--embeddings objects.npz --version v1", 1, "as embeddings: its elements are Python objects (dtype object)"),
        ("--embeddings broken.json --version v1", 1, "broken.json cannot be read"),
        ("--embeddings several.npz --version v1", 1, "no array 'v1', only: v2, v3"),
        ("--embeddings ragged.json --version v1", 1, "ragged.json[1] has 1 numbers"),
        ("--embeddings empty.json --version v1", 1, "has no embeddings"),
        ("--embeddings two.csv --version v1", 1, ".npy, .npz or .json"),
    ],
)
def test_evaluation_add_says_what_is_wrong_with_embeddings(run, service, tmp_path, monkeypatch, options, code, why):
    monkeypatch.chdir(tmp_path)
    texts = {"two": "[[1, 2], [3, 4]]", "three": "[[1], [3], [4]]", "broken": "[", "ragged": "[[1, 2], [3]]"}
    for name, text in {**texts, "empty": "[]"}.items():
        Path(f"{name}.json").write_text(text)
    Path("broken.npz").write_bytes(b"PK no archive")
    np.savez("several.npz", v2=np.zeros((2, 2)), v3=np.zeros((2, 2)))
    np.savez("number.npz", v1=np.zeros((2, 2)), labels=np.array(3))
    np.savez_compressed("damaged.npz", v1=np.random.default_rng(0).random((20, 20)))
    damaged = bytearray(Path("damaged.npz").read_bytes())
    damaged[50:110] = bytes(0x5A ^ byte for byte in damaged[50:110])
    Path("damaged.npz").write_bytes(damaged)
    np.savez("objects.npz", v1=np.array([[1, 2], [3]], object))
    np.save("header.npy", np.zeros((2, 2)))
    Path("header.npy").write_bytes(Path("header.npy").read_bytes().replace(b"2), }", b"2000("))

    found, _, said = run("evaluation", "add", "g", *options.split())

    assert found == code
    assert why in " ".join(said.replace("│", "").split())
    assert service.requests == []


def test_evaluation_delete_asks_unless_it_is_told_yes(run, service, monkeypatch):
    service.answers["DELETE /v1/galleries/g/evaluations/4"] = httpx.Response(204)

    assert run("evaluation", "delete", "g", 4, "--json")[0] == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no terminal, as in a script
    assert "--yes" in run("evaluation", "delete", "g", 4)[2]
    assert service.requests == []
    assert run("evaluation", "delete", "g", 4, "--yes")[1] == "g: deleted evaluation set 4\n"


def test_evaluation_add_sends_entries_that_name_what_is_relevant(run, service, tmp_path):
    service.answers["POST /v1/galleries/g/evaluations"] = {"id": 2, "size": 2, "kind": "texts"}
    # U+2028 ends a line of text for Python, but is part of a string in JSON.
    lines = [{"text": "a\u2028c\x85", "relevant": ["x", "y"]}, {"text": "b", "relevant": ["z"]}]
    written = "".join(f"{json.dumps(line, ensure_ascii=False)}\r\n" for line in lines)
    (tmp_path / "q.jsonl").write_text(written, encoding="utf-8")
    (tmp_path / "right.json").write_text('[["x"], ["y", "z"]]')
    np.savez(tmp_path / "q.npz", v1=np.eye(2))
    pq.write_table(pa.table({"v1": [[1.0], [2.0]], "relevant": [["x"], ["y"]]}), tmp_path / "q.parquet")
    named = [{"relevant": ["x"]}, {"relevant": ["y", "z"]}]

    sent = []
    for options in (
        (tmp_path / "q.jsonl",),
        ("--embeddings", tmp_path / "q.npz", "--relevant", tmp_path / "right.json"),
        ("--embeddings", tmp_path / "q.parquet"),
    ):
        assert run("evaluation", "add", "g", *options)[:2] == (0, "g: evaluation set 2 of 2 texts\n")
        sent.append(json.loads(service.requests[-1].content)["entries"])

    assert sent == [lines, named, [{"relevant": ["x"]}, {"relevant": ["y"]}]]
    for line, told in (
        ("{", "line 1 is not valid JSON"),
        ("{}", "either text or image"),
        ('{"image": "none.png"}', "none.png does not exist"),
    ):
        (tmp_path / "bad.jsonl").write_text(line)
        code, _, said = run("evaluation", "add", "g", tmp_path / "bad.jsonl")
        assert (code, told in said) == (1, True)


def test_evaluation_add_sends_images_with_their_folders_as_labels(run, service, tmp_path):
    for label in ("boot", "shoe"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "a.png").write_bytes(b"x")
    service.answers["POST /v1/galleries/g/evaluations"] = {"id": 2, "size": 2, "kind": "images"}

    assert run("evaluation", "add", "g", tmp_path, "--name", "feet")[1] == "g: evaluation set 2 of 2 images\n"
    sent = service.requests[-1].content
    assert b'"label":"boot"' in sent
    assert b'"label":"shoe"' in sent
