"""`regraft ingest` of images."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import httpx
import pytest

from index.errors import InvalidArgument
from regraft.commands import ingest
from regraft.models import ItemError
from staging.api.answers import filled, problem


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
    monkeypatch.setattr(ingest, "MAX_BATCH_BYTES", 10)

    assert [[name for name, _ in batch] for batch in ingest.batches(files, 5)] == [
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


@pytest.mark.parametrize("lost", [httpx.ConnectError, httpx.ReadError, httpx.ReadTimeout, 502, 503])
def test_an_ingest_that_loses_its_service_says_how_to_continue(run, service, folder, monkeypatch, lost):
    def fail(_: httpx.Request) -> httpx.Response:
        if isinstance(lost, int):  # of a proxy, or of a service that shuts down
            return httpx.Response(lost)
        raise lost("gone")

    service.answers["POST /v1/galleries/g/items"] = [{"stored": 3, "new": 3}]
    answer = service.__call__
    monkeypatch.setattr(type(service), "__call__", lambda _, request: (fail if service.requests else answer)(request))

    code, shown, said = run("ingest", "g", folder, "--batch", 3)

    assert (code, shown) == (1, "")
    told, error = said.replace("\n", " ").split("regraft: ")
    assert told.startswith(
        "until the service was lost, 3 images were stored, and perhaps some of the last batch. Run the command again "
    )
    assert error


def test_an_ingest_that_never_reaches_its_service_has_nothing_to_continue(run, service, folder, monkeypatch):
    def refuse(*_: object) -> httpx.Response:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(type(service), "__call__", refuse)

    code, shown, said = run("ingest", "g", folder)

    assert (code, shown) == (1, "")
    assert "regraft: no answer from " in said
    assert "stored" not in said


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


def test_a_batch_that_is_too_large_for_the_service_or_a_proxy_is_sent_in_halves(run, service, folder):
    """Four images of which the second is too large even alone, and the fourth is broken."""
    large = httpx.Response(413, html="<html>Request Entity Too Large</html>")
    broken = filled(list[ItemError], [{"index": 1, "id": "dogs/old/4.webp", "detail": "not an image"}])
    service.answers["POST /v1/galleries/g/items"] = [
        large,
        large,
        {"stored": 1, "new": 1},
        large,
        {"stored": 1, "replaced": 1, "failed": 1, "errors": broken},
    ]

    code, shown, said = run("ingest", "g", folder)

    assert (code, shown) == (1, "stored 2 images in g, 2 failed (1 new, 1 replaced)\n")
    assert "cats/2.PNG: 413" in said
    assert "dogs/old/4.webp: not an image" in said
    assert [[i["id"] for i in described(request)] for request in service.requests[2:]] == [
        ["cats/1.png"],
        ["cats/2.PNG"],
        ["dogs/3.jpg", "dogs/old/4.webp"],
    ]


def test_a_refused_request_stops_the_ingest(run, service, folder):
    service.answers["POST /v1/galleries/g/items"] = problem(409, code="no_version", detail="g has no current version")

    code, _, said = run("ingest", "g", folder)

    assert code == 1
    assert said.splitlines()[-1] == "regraft: g has no current version"


def test_find_images_refuses_a_path_that_is_not_there_and_a_folder_without_images(tmp_path):
    with pytest.raises(InvalidArgument, match="missing does not exist"):
        ingest.find_images([tmp_path / "missing"])
    with pytest.raises(InvalidArgument, match=r"no image files.*\.png"):
        ingest.find_images([tmp_path])


def test_links_are_followed_and_labelled_by_where_they_lie_as_in_training(run, service, tmp_path):
    service.answers["POST /v1/galleries/g/items"] = {"stored": 2, "new": 2}
    service.answers["POST /v1/galleries/g/evaluations"] = {"id": 2, "size": 2, "kind": "images"}
    split, pool = tmp_path / "split", tmp_path / "pool"
    for folder in (pool, split / "cat", split / ".thumbs", split / "__MACOSX" / "cat"):
        folder.mkdir(parents=True)
        (folder / "1.png").write_bytes(b"x")
    (split / "cat" / "1.png").unlink()
    (split / "cat" / "1.png").symlink_to(pool / "1.png")
    (split / "cat" / "all").symlink_to(split)
    (split / "dog").symlink_to(pool)

    assert run("ingest", "g", split)[0] == 0
    assert run("evaluation", "add", "g", split)[0] == 0
    stored, kept = service.requests
    labelled = [(i["id"], i["metadata"]["label"]) for i in described(stored)]
    assert labelled == [("cat/1.png", "cat"), ("dog/1.png", "dog")]
    assert re.findall(rb'"label":"(\w+)"', kept.content) == [b"cat", b"dog"]


def test_a_link_to_nothing_is_named_and_a_pipe_is_no_image(run, service, folder):
    service.answers["POST /v1/galleries/g/items"] = {"stored": 4, "new": 4}
    (folder / "cats" / "gone.png").symlink_to(folder / "nowhere.png")
    os.mkfifo(folder / "cats" / "pipe.png")

    code, shown, said = run("ingest", "g", folder)

    assert (code, shown) == (1, "stored 4 images in g, 1 failed (4 new, 0 replaced)\n")
    assert "cats/gone.png: No such file or directory" in said


def test_files_of_other_names_are_left_out_and_counted(run, service, tmp_path):
    """Images without a suffix, as some data sets have them, are no images by their names."""
    service.answers["POST /v1/galleries/g/items"] = {"stored": 1, "new": 1}
    (tmp_path / "cats" / ".hidden").mkdir(parents=True)
    for name in ("1.png", "0a1b", "2c3d", "Thumbs.DB", "labels.csv", ".hidden/x.csv"):
        (tmp_path / "cats" / name).write_bytes(b"x")

    code, shown, said = run("ingest", "g", tmp_path)

    assert (code, shown) == (0, "stored 1 images in g, 0 failed (1 new, 0 replaced)\n")
    assert "left out files without the suffix of an image: 2 without a suffix, 1 .csv, 1 .db\n" in said
    assert json.loads(run("ingest", "g", tmp_path, "--json")[1])["left_out"] == {"": 2, ".csv": 1, ".db": 1}
    assert "left out" not in run("ingest", "g", tmp_path / "cats" / "1.png")[2]


def test_a_single_file_is_taken_whatever_its_name(tmp_path):
    (tmp_path / "photo").write_bytes(b"x")

    assert ingest.find_images([tmp_path / "photo"]) == {(tmp_path / "photo").as_posix(): tmp_path / "photo"}


def test_a_file_outside_gets_an_id_that_climbs_nowhere(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    (tmp_path / "photo.png").write_bytes(b"x")
    monkeypatch.chdir(tmp_path / "inside")

    assert list(ingest.find_images([Path("../photo.png")])) == ["photo.png"]


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
