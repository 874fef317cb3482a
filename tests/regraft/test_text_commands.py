"""`regraft ingest` of texts."""

from __future__ import annotations

import json
import os

import pytest


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "notes" / "a").mkdir(parents=True)
    (tmp_path / "notes" / "a" / "one.txt").write_text("erstens: é")
    (tmp_path / "notes" / "two.TXT").write_text("two")
    lines = [{"id": "x", "text": "one\ntwo"}, {"id": "y", "text": "敏", "metadata": {"n": 1}}]
    (tmp_path / "notes.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    return tmp_path


def sent(service):
    return [item for request in service.requests for item in json.loads(request.content)["items"]]


def test_lines_and_files_are_texts(run, service, texts):
    service.answers["POST /v1/galleries/g/items"] = [{"stored": 1, "new": 1, "replaced": 0}] * 2
    code, shown, _ = run("ingest", "g", texts / "notes.jsonl", "--batch", 1, "--prefix", "p/")
    assert (code, shown) == (0, "stored 2 texts in g, 0 failed (2 new, 0 replaced)\n")
    assert sent(service) == [{"id": "p/x", "text": "one\ntwo"}, {"id": "p/y", "text": "敏", "metadata": {"n": 1}}]

    service.requests.clear()
    service.answers["POST /v1/galleries/g/items"] = {"stored": 2, "new": 2, "replaced": 0}
    assert run("ingest", "g", texts / "notes", "--texts")[0] == 0
    assert sent(service) == [
        {"id": "a/one.txt", "text": "erstens: é", "metadata": {"label": "a"}},
        {"id": "two.TXT", "text": "two", "metadata": {"label": "notes"}},
    ]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b'{"id": "a"}', "a.jsonl, line 1: "),
        ("a.jsonl", b'{"id": "a", "text": 3}', "id and text must be strings"),
        ("a.jsonl", b'\n{"id": "a", "text": "b", "metadata": []}', "a.jsonl, line 2: metadata must be an object"),
        ("a.jsonl", b"nothing", "not valid JSON"),
        ("a.txt", b"\xff", "cannot be read as UTF-8"),
        ("missing.txt", None, "does not exist"),
    ],
)
def test_what_is_no_text_is_named(run, service, tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, _, said = run("ingest", "g", tmp_path / name)
    assert code != 0
    assert told in " ".join(said.split())


def test_a_line_that_is_no_text_costs_no_other_its_place(run, service, tmp_path):
    lines = [
        '{"id": "a", "text": "x"}',
        "broken",
        '{"id": "b", "text": "y"}',
        '{"id": "c"}',
        '{"id": "d", "text": "z"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    service.answers["POST /v1/galleries/g/items"] = [{"stored": 2, "new": 2}, {"stored": 1, "new": 1}] * 2

    code, shown, said = run("ingest", "g", tmp_path / "a.jsonl", tmp_path / "bad.txt", "--batch", 2)

    assert (code, shown) == (1, "stored 3 texts in g, 3 failed (3 new, 0 replaced)\n")
    assert [told in said for told in ("a.jsonl, line 2: not valid", "line 4: the line must be", "bad.txt cannot")] == [
        True
    ] * 3
    told = json.loads(run("ingest", "g", tmp_path / "a.jsonl", "--batch", 2, "--json")[1])
    assert (told["failed"], [error["item"] for error in told["errors"]]) == (2, [None, None])


def test_what_no_request_can_carry_costs_no_other_its_place(run, service, tmp_path):
    lines = ['"text": "x"}', '"text": "y", "metadata": {"price": NaN}}', '"text": "\\ud800"}', '"text": "z"}']
    folder = tmp_path / "texts"
    folder.mkdir()
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"id": "i{n}", {line}' for n, line in enumerate(lines)))
    for name in (b"a.txt", b"b\xff.txt", b"c.txt"):
        (folder / os.fsdecode(name)).write_bytes(b"\xef\xbb\xbfcat\r\n")  # as Windows' editors begin a file
    service.answers["POST /v1/galleries/g/items"] = {"stored": 2, "new": 2}

    code, shown, said = run("ingest", "g", tmp_path / "a.jsonl")
    assert (code, shown) == (1, "stored 2 texts in g, 2 failed (2 new, 0 replaced)\n")
    assert [f"a.jsonl, line {n}: it cannot be sent" in said for n in (1, 2, 3, 4)] == [False, True, True, False]
    assert [item["id"] for item in sent(service)] == ["i0", "i3"]

    service.requests.clear()
    assert run("ingest", "g", folder, "--texts")[:2] == (1, "stored 2 texts in g, 1 failed (2 new, 0 replaced)\n")
    assert [(item["id"], item["text"]) for item in sent(service)] == [("a.txt", "cat\r\n"), ("c.txt", "cat\r\n")]


def test_the_counts_of_nothing_are_told_too(run, service, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")

    told = json.loads(run("ingest", "g", tmp_path / "empty.jsonl", "--json")[1])

    assert [told[kind] for kind in ("stored", "new", "replaced", "failed")] == [0, 0, 0, 0]


def test_images_and_texts_are_not_mixed_in_one_command(run, service, texts):
    assert "cannot be ingested together" in run("ingest", "g", texts / "notes.jsonl", texts / "a.png")[2]
