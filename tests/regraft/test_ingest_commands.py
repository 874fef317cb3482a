"""`regraft ingest` and `regraft query`."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import httpx
import numpy as np
import pytest

from index.errors import InvalidArgument
from regraft.commands import galleries
from regraft.models import ItemError
from staging.answers import GALLERY, filled, problem


def described(request: httpx.Request) -> list[dict]:
    """The item list of a multipart ingest."""
    start = request.content.index(b"[{")
    return json.loads(request.content[start : request.content.index(b"\r\n", start)])


def test_ingest_labels_images_by_their_folder_in_batches(run, service, folder):
    service.answers["POST /v1/galleries/g/items"] = [
        {"stored": stored, "new": stored - 1, "replaced": 1} for stored in (3, 1)
    ]

    code, shown, _ = run("ingest", "g", folder, "--batch", 3)

    assert (code, shown) == (0, "stored 4 images in g, 0 failed (2 new, 2 replaced)\n")
    assert [[(i["id"], i["metadata"]["label"]) for i in described(r)] for r in service.requests] == [
        [("cats/1.png", "cats"), ("cats/2.PNG", "cats"), ("dogs/3.jpg", "dogs")],
        [("dogs/old/4.webp", "old")],
    ]


def test_ingest_says_once_how_many_images_of_all_batches_lose_much(run, service, folder):
    warning = {"code": "image_mostly_unseen", "version": "v1", "count": 2, "detail": "they are cropped"}
    service.answers["POST /v1/galleries/g/items"] = {
        "stored": 2,
        "new": 2,
        "replaced": 0,
        "failed": 0,
        "errors": [],
        "warnings": [warning],
    }

    code, _, said = run("ingest", "g", folder, "--batch", 2)

    assert (code, [line for line in said.splitlines() if "warning" in line]) == (
        0,
        ["warning: 4 images: they are cropped"],
    )


def test_batches_are_cut_by_their_bytes_each_counted_from_its_own_first_image(tmp_path, monkeypatch):
    files = [(f"{n}", tmp_path / f"{n}") for n in range(7)]
    for (_, path), size in zip(files, (4, 4, 4, 4, 9, 30, 4), strict=True):
        path.write_bytes(b"x" * size)
    monkeypatch.setattr(galleries, "MAX_BATCH_BYTES", 10)

    assert [[name for name, _ in batch] for batch in galleries.batches(files, 5)] == [
        ["0", "1"],
        ["2", "3"],
        ["4"],
        ["5"],
        ["6"],
    ]


def test_ingest_names_every_image_that_failed_and_ends_with_code_1(run, service, folder):
    errors = [{"index": 1, "id": "cats/2.PNG", "detail": "not an image"}]
    service.answers["POST /v1/galleries/g/items"] = {
        "stored": 3,
        "new": 3,
        "replaced": 0,
        "failed": 1,
        "errors": errors,
    }

    code, shown, said = run("ingest", "g", folder)

    assert (code, shown) == (1, "stored 3 images in g, 1 failed (3 new, 0 replaced)\n")
    assert f"{folder / 'cats' / '2.PNG'}: not an image" in said.replace("\n", "")


def test_files_that_cannot_be_sent_are_failures_of_their_own(run, service, folder, monkeypatch):
    latin, unreadable = folder / "cats" / os.fsdecode(b"caf\xe9.png"), folder / "dogs" / "3.jpg"
    (folder / "cats" / "1.png").write_bytes(b"")
    latin.write_bytes(b"x")
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == unreadable:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    refused = [{"index": 0, "id": "cats/2.PNG", "code": "invalid_image", "detail": "not an image"}]
    service.answers["POST /v1/galleries/g/items"] = [
        problem(422, code="items_refused", detail="none", errors=filled(list[ItemError], refused)),
        {"stored": 1, "new": 1},
    ]

    code, shown, said = run("ingest", "g", folder, "--batch", 2, "--json")

    told = json.loads(shown)
    assert (code, told["stored"], told["failed"]) == (1, 1, 4)
    assert [(Path(error["file"]), error["code"]) for error in told["errors"]] == [
        (folder / "cats" / "1.png", "invalid_input"),
        (folder / "cats" / "2.PNG", "invalid_image"),
        (latin, "invalid_input"),
        (unreadable, "os_error"),
    ]
    assert [f"{folder}/{name}" in said for name in ("cats/1.png", "cats/caf\\udce9.png", "dogs/3.jpg")] == [True] * 3
    assert [[item["id"] for item in described(r)] for r in service.requests] == [["cats/2.PNG"], ["dogs/old/4.webp"]]


def test_a_batch_of_nothing_but_bad_images_does_not_stop_the_others(run, service, folder):
    errors = [{"index": n, "id": "x", "detail": "not an image"} for n in range(2)]
    service.answers["POST /v1/galleries/g/items"] = [
        problem(422, code="invalid_items", detail="no item could be stored", errors=filled(list[ItemError], errors)),
        {"stored": 2, "new": 2},
    ]

    assert run("ingest", "g", folder, "--batch", 2)[:2] == (1, "stored 2 images in g, 2 failed (2 new, 0 replaced)\n")


def test_a_refused_request_stops_the_ingest(run, service, folder):
    service.answers["POST /v1/galleries/g/items"] = problem(409, code="no_version", detail="g has no current version")

    code, _, said = run("ingest", "g", folder)

    assert code == 1
    assert said.splitlines()[-1] == "regraft: g has no current version"


def test_find_images_refuses_a_path_that_is_not_there_and_a_folder_without_images(tmp_path):
    with pytest.raises(InvalidArgument, match="missing does not exist"):
        galleries.find_images([tmp_path / "missing"])
    with pytest.raises(InvalidArgument, match=r"no image files.*\.png"):
        galleries.find_images([tmp_path])


def test_a_single_file_is_taken_whatever_its_name(tmp_path):
    (tmp_path / "photo").write_bytes(b"x")

    assert galleries.find_images([tmp_path / "photo"]) == {(tmp_path / "photo").as_posix(): tmp_path / "photo"}


def test_a_file_outside_gets_an_id_that_climbs_nowhere(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    (tmp_path / "photo.png").write_bytes(b"x")
    monkeypatch.chdir(tmp_path / "inside")

    assert list(galleries.find_images([Path("../photo.png")])) == ["photo.png"]


@pytest.mark.parametrize(
    ("given", "texts", "told"),
    [
        (["a", "b"], False, ["a/1.png", "b/1.png", "--prefix"]),
        (["a/1.png", "b/../a/1.png"], False, ["a/1.png", "b/../a/1.png", "--prefix"]),
        (["a/1.png", "b/1.png", "a/1.png"], False, ["a/1.png is given twice"]),
        (["a", "b"], True, ["a/1.txt", "b/1.txt", "--prefix"]),
        (["a/1.txt", "b/1.txt"], False, ["a/1.txt", "b/1.txt", "--prefix"]),
        (["l.jsonl", "a/1.txt", "l.jsonl"], False, ["l.jsonl is given twice"]),
        (["l.jsonl", "missing.txt"], False, ["missing.txt does not exist"]),
    ],
)
def test_files_that_would_be_one_item_are_refused_before_anything_is_sent(
    run, service, tmp_path, monkeypatch, given, texts, told
):
    for name in ("a/1.png", "b/1.png", "a/1.txt", "b/1.txt", "l.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"id": "x", "text": "x"}')
    monkeypatch.chdir(tmp_path)

    code, _, said = run("ingest", "g", *given, *(["--texts"] if texts else []), "--batch", 1)

    assert (code, service.requests) == (1, [])
    assert all(each in said for each in told), said


def test_a_prefix_tells_folders_apart_and_what_is_there_may_be_kept(run, service, folder):
    refused = [{"index": 0, "id": "x", "detail": "an item of this id is there"}]
    answer = {"stored": 3, "new": 3, "replaced": 0, "failed": 1, "errors": refused}
    service.answers["POST /v1/galleries/g/items"] = answer

    assert run("ingest", "g", folder, "--prefix", "2024/", "--no-replace")[0] == 1
    run("ingest", "g", folder, "--replace")

    first, second = service.requests
    assert described(first)[0]["id"] == "2024/cats/1.png"
    assert [r.url.params.get("replace") for r in (first, second)] == ["false", "true"]


def test_query_prints_matches_and_what_was_not_searched(run, service, tmp_path):
    (tmp_path / "q.png").write_bytes(b"x")
    match = {"id": "a", "score": 0.98765, "version": "v1", "route": ["identity"], "metadata": {"digit": 3}}
    service.answers["POST /v1/galleries/g/query"] = {
        "results": [{"matches": [match]}],
        "degraded": [{"version": "v0", "items": 7, "reason": "no edge"}],
        "warnings": [{"count": 1, "detail": "it is cropped"}],
    }

    code, shown, said = run("query", "g", tmp_path / "q.png")

    assert code == 0
    assert shown.splitlines()[1].split(maxsplit=4) == ["a", "0.9877", "v1", "identity", "{'digit': 3}"]
    assert said == "not searched: 7 items of v0: no edge\nwarning: 1 image: it is cropped\n"
    assert b'name="k"\r\n\r\n10\r\n' in service.requests[-1].content


def test_query_explains_how_each_shard_was_reached(run, service, tmp_path):
    (tmp_path / "q.png").write_bytes(b"x")
    edge = {"new": "v2", "old": "v1", "kind": "matrix", "scores": {"cmc@1": {"value": 0.5, "low": 0.4, "high": 0.6}}}
    seconds = {"transform": 0.001, "scan": 0.0025}
    shards = [
        {
            "version": "v1",
            "origin": "encoded",
            "items": 7,
            "route": [edge],
            "calibration": {"kind": "x"},
            "seconds": seconds,
        },
        {"version": "v2", "origin": "supplied", "items": 8, "route": [], "calibration": None, "seconds": seconds},
    ]
    service.answers["POST /v1/galleries/g/query"] = {
        "mode": "rank",
        "results": [{"matches": []}],
        "degraded": [],
        "explain": {"shards": shards},
    }

    code, shown, _ = run("query", "g", tmp_path / "q.png", "-k", "3", "--mode", "rank", "--explain")

    assert code == 0
    words = [line.split() for line in shown.splitlines()]
    assert ["ranked", "together", "by", "mode", "rank"] in words
    assert ["v1", "encoded", "7", "matrix", "v2", ">", "v1:", "cmc@1", "0.500", "yes", "3.50"] in words
    assert ["v2", "supplied", "8", "same", "no", "3.50"] in words
    sent = service.requests[-1].content
    assert b'name="mode"\r\n\r\nrank\r\n' in sent
    assert b'name="explain"\r\n\r\ntrue\r\n' in sent


def test_query_takes_an_image_a_text_or_an_item(run, service, tmp_path):
    (tmp_path / "q.png").write_bytes(b"x")
    service.answers["POST /v1/galleries/g/query"] = {"results": [{"matches": []}], "degraded": []}

    code, _, _ = run("query", "g", "--text", "a red boot", "-k", "1")

    assert code == 0
    assert json.loads(service.requests[-1].content)["texts"] == ["a red boot"]
    assert run("query", "g", "--like", "a", "-k", "1", "--threshold", "0.5")[0] == 0
    assert json.loads(service.requests[-1].content) == {"items": ["a"], "k": 1, "threshold": 0.5, "explain": False}
    assert run("query", "g", "--like", "a", "--strict")[0] == 0
    assert json.loads(service.requests[-1].content)["strict"] is True
    assert run("query", "g", "--like", "a", "-k", "1", "--filter", '{"field": "n", "eq": 1}')[0] == 0
    assert json.loads(service.requests[-1].content)["filter"] == {"field": "n", "eq": 1}
    code, _, said = run("query", "g", "--like", "a", "-k", "1", "--filter", "n=1")
    assert code == 1
    assert said.startswith("regraft: --filter must be JSON")
    for wrong in ([], [tmp_path / "q.png", "--text", "boot"], ["--like", "a", "--text", "boot"]):
        code, _, said = run("query", "g", *wrong)
        assert (code, said) == (1, "regraft: give one of IMAGE, --text, --like and --vector\n")


@pytest.mark.parametrize("many", [False, True])
def test_query_takes_vectors_of_a_file(run, service, tmp_path, many):
    rows = np.arange(6, dtype=np.float64).reshape(2, 3)[: 1 + many]
    np.save(tmp_path / "q.npy", rows if many else rows[0])
    answered = {"results": [{"matches": []}] * len(rows), "degraded": []}
    service.answers |= {"GET /v1/galleries/g": GALLERY, "POST /v1/galleries/g/query": answered}

    code, shown, _ = run("query", "g", "--vector", tmp_path / "q.npy", "-k", 3)
    run("query", "g", "--vector", tmp_path / "q.npy", "--version", "v9")

    first, named = (request for request in service.requests if request.method == "POST")
    assert (code, "row 1" in shown) == (0, many)
    assert (first.url.params["version"], named.url.params["version"], first.url.params["k"]) == ("v1", "v9", "3")
    assert np.load(io.BytesIO(first.content)).tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--vector", "{0}/text.npy"), "is no .npy file"),
        (("--vector", "{0}/cube.npy"), "must hold one vector, or a matrix with a row each"),
        (("--like", "a", "--version", "v1"), "--version says what made the vectors of --vector"),
        (("--vector", "{0}/cube.npy", "--like", "a"), "give one of IMAGE, --text, --like and --vector"),
    ],
)
def test_what_is_no_query_is_told(run, service, tmp_path, given, said):
    (tmp_path / "text.npy").write_text("1, 2")
    np.save(tmp_path / "cube.npy", np.ones((1, 2, 3)))

    code, _, told = run("query", "g", *(word.format(tmp_path) for word in given))

    assert (code, said in " ".join(told.split()), service.requests) == (1, True, [])
