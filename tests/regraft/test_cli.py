"""The command: what it asks of the service, what it prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from index.errors import InvalidArgument
from regraft import backfill_routes, cli
from regraft.client import Client
from regraft.commands import galleries
from regraft.models import BackfillInfo, ItemError
from staging.answers import filled
from staging.builders import make_version

GALLERY = {"name": "g", "current": "v1", "items": 2, "mix": {"v1": 2}, "seq": 3, "created": 0.0}
BACKFILL = filled(
    BackfillInfo,
    {
        "id": 3,
        "version": "v2",
        "kind": "reencode",
        "state": "done",
        "total": 4,
        "done": 4,
        "skipped": 0,
        "failed": 0,
        "remaining": 0,
    },
)

COMMANDS = [
    *(
        "serve",
        "worker",
        "migrate",
        "doctor",
        "plan",
        "gallery",
        "ingest",
        "query",
        "version",
        "gate",
        "deploy",
        "rollback",
        "backfill",
    ),
    *("edges", "evaluation", "deployment", "retire", "audit"),
    *("train", "recipes", "evaluate", "fit-edge", "export"),
]


def problem(status: int, **body: object) -> httpx.Response:
    return httpx.Response(status, json=body)


def test_help_shows_every_command_with_one_line(run):
    code, shown, _ = run("--help")

    assert code == 0
    for name in COMMANDS:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"│ {name} ")]
        assert line.rstrip(" │").endswith(".")


def test_version_is_the_package_version(run):
    assert run("--version")[:2] == (0, "0.2.0\n")


def test_galleries_are_listed_with_their_mix(run, service):
    service.answers["GET /v1/galleries"] = {"galleries": [{**GALLERY, "mix": {"v1": 1, "v2": 1}}]}

    code, shown, _ = run("gallery", "list")

    assert code == 0
    assert [line.split() for line in shown.splitlines()] == [
        ["gallery", "current", "items", "mix"],
        ["g", "v1", "2", "v1:", "1,", "v2:", "1"],
    ]


def test_a_row_that_is_piped_is_one_line_and_loses_nothing(run, service):
    names = ["g" * 150, "h " * 70]
    service.answers["GET /v1/galleries"] = {"galleries": [{**GALLERY, "name": name} for name in names]}

    shown = run("gallery", "list")[1].splitlines()

    assert [line.startswith(name) for line, name in zip(shown[1:], names, strict=True)] == [True, True]


def test_url_and_key_come_from_options_or_the_environment(run, service, monkeypatch):
    service.answers["GET /v1/galleries"] = {"galleries": []}
    monkeypatch.setenv("REGRAFT_URL", "http://elsewhere:9")
    monkeypatch.setenv("REGRAFT_API_KEY", "secret")

    run("gallery", "list")
    run("gallery", "list", "--url", "http://option:1", "--api-key", "other")

    assert [(str(r.url), r.headers["authorization"]) for r in service.requests] == [
        ("http://elsewhere:9/v1/galleries", "Bearer secret"),
        ("http://option:1/v1/galleries", "Bearer other"),
    ]


def test_deleting_a_gallery_asks_first(run, service):
    code, _, _ = run("gallery", "delete", "g")

    assert code == 1
    assert service.requests == []

    service.answers["DELETE /v1/galleries/g"] = httpx.Response(204)
    assert run("gallery", "delete", "g", "--yes")[:2] == (0, "deleted gallery g\n")


@pytest.fixture
def folder(tmp_path):
    for name in ("cats/1.png", "cats/2.PNG", "dogs/3.jpg", "dogs/notes.txt", "dogs/old/4.webp"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "images"


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
        list(galleries.find_images([tmp_path / "missing"]))
    with pytest.raises(InvalidArgument, match=r"no image files.*\.png"):
        list(galleries.find_images([tmp_path]))


def test_a_single_file_is_taken_whatever_its_name(tmp_path):
    (tmp_path / "photo").write_bytes(b"x")

    assert list(galleries.find_images([tmp_path / "photo"])) == [((tmp_path / "photo").as_posix(), tmp_path / "photo")]


def test_a_file_outside_gets_an_id_that_climbs_nowhere(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    (tmp_path / "photo.png").write_bytes(b"x")
    monkeypatch.chdir(tmp_path / "inside")

    assert [key for key, _ in galleries.find_images([Path("../photo.png")])] == ["photo.png"]


def test_two_files_that_would_be_one_item_are_refused_before_anything_is_sent(run, service, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(b"x")

    code, _, said = run("ingest", "g", tmp_path / "a", tmp_path / "b")

    assert (code, service.requests) == (1, [])
    assert "--prefix" in said


def test_a_prefix_tells_folders_apart_and_what_is_there_may_be_kept(run, service, folder):
    refused = [{"index": 0, "id": "x", "detail": "an item of this id is there"}]
    answer = {"stored": 3, "new": 3, "replaced": 0, "failed": 1, "errors": refused}
    service.answers["POST /v1/galleries/g/items"] = answer

    assert run("ingest", "g", folder, "--prefix", "2024/", "--no-replace")[0] == 1
    run("ingest", "g", folder, "--replace")

    first, second = service.requests
    assert described(first)[0]["id"] == "2024/cats/1.png"
    assert [r.url.params.get("replace") for r in (first, second)] == ["false", "true"]


def test_batches_are_cut_by_bytes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(galleries, "MAX_BATCH_BYTES", 10)
    for name, size in (("a", 6), ("b", 6), ("c", 20), ("d", 2)):
        (tmp_path / name).write_bytes(b"x" * size)
    files = [(name, tmp_path / name) for name in "abcd"]

    assert [[name for name, _ in chunk] for chunk in galleries.batches(files, 3)] == [["a"], ["b"], ["c"], ["d"]]


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
        assert (code, said) == (1, "regraft: give one of IMAGE, --text and --like\n")


REPORT = {
    "id": 1,
    "version": "v2",
    "current": "v1",
    "metric": "cmc@1",
    "verdict": "pass",
    "slices": [],
    "new_old": {"value": 0.85, "low": 0.8, "high": 0.9},
    "queries": 1000,
    "items": 2500,
    "whole": True,
    "seed": 3,
}


@pytest.mark.parametrize(("verdict", "expected"), [("pass", 0), ("warn", 0), ("refuse", 1)])
def test_gate_ends_with_code_1_only_when_it_refuses(run, service, verdict, expected):
    service.answers["POST /v1/galleries/g/gates"] = {**REPORT, "verdict": verdict}

    code, shown, said = run("gate", "g", "v2", "--label", "digit")

    assert code == expected
    assert f"verdict {verdict}" in shown
    assert "85.0% [80.0%, 90.0%]" in shown
    assert "1000 queries over 2500 items (all that can be compared), seed 3" in shown
    assert bool(said) == bool(expected)


def test_gate_names_slices_as_they_were_written_and_what_was_left_out(run, service):
    slices = [{"value": value, "old_old": 0.5, "new_old": 0.25, "queries": 9} for value in ('"ok"', "3")]
    service.answers["POST /v1/galleries/g/gates"] = {**REPORT, "slice": "shop", "slices": slices, "unlabelled": 2}

    shown = run("gate", "g", "v2", "--slice", "shop")[1]

    assert "shop ok: 50.0% -> 25.0% (9 queries)" in shown
    assert "shop 3: 50.0%" in shown
    assert "2 entries without a label were left out" in shown


def test_deploy_and_rollback_say_from_where_to_where(run, service):
    deployed = {"id": 1, "version": "v2", "previous": "v1", "activated": 0, "state": "current"}
    service.answers["POST /v1/galleries/g/deployments"] = deployed
    back = {**deployed, "version": "v1", "previous": "v2", "activated": 5, "out_of_reach": {"v2": 3}}
    service.answers["POST /v1/galleries/g/rollback"] = back

    assert run("deploy", "g", "v2", "--gate", 4, "--override", "why")[1] == "g: v1 -> v2\n"
    _, shown, said = run("rollback", "g", "--reason", "bad", "--force")
    assert shown == "g: v2 -> v1, 5 items moved to embeddings they held\n"
    assert said == "out of reach: 3 items of v2\n"
    sent = [json.loads(r.content) for r in service.requests]
    asked = {"version": "v2", "gate": 4, "override": "why", "until": "current", "reason": ""}
    assert sent == [asked, {"reason": "bad", "force": True}]


def test_a_canary_is_begun_with_its_limits_and_advanced(run, service):
    made = {"id": 3, "version": "v2", "previous": "v1", "activated": 0, "state": "canary"}
    service.answers["POST /v1/galleries/g/deployments"] = {**made, "id": None}
    service.answers["POST /v1/galleries/g/deployments/3/advance"] = made

    limits = ("--share", 0.1, "--max-error-rate", 0.02, "--max-p99-ms", 80, "--min-queries", 50)
    begun = run("deploy", "g", "v2", "--until", "canary", *limits, "--dry-run")[1]
    wider = run("deployment", "advance", "g", 3, "canary", "--share", 0.5)[1]

    assert (begun, wider) == ("g: v1 -> v2 is canary (dry run)\n", "g: v1 -> v2 is canary\n")
    first, second = (json.loads(r.content) for r in service.requests)
    assert first["canary"] == {"share": 0.1, "max_error_rate": 0.02, "max_p99_ms": 80, "min_queries": 50}
    assert service.requests[0].url.params["dry_run"] == "true"
    assert (second["to"], second["canary"]) == ("canary", {"share": 0.5})


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("deploy", "g", "v2", "--share", 0.1, "--max-error-rate", 0.01), "--share"),
        (("deploy", "g", "v2", "--until", "gated", "--min-queries", 3), "--min-queries"),
        (("deploy", "g", "v2", "--until", "shadow", "--max-p99-ms", 80), "--max-p99-ms"),
        (("deployment", "advance", "g", 3, "current", "--share", 0.5), "--share"),
    ],
)
def test_an_option_of_a_trial_without_one_is_wrong_usage(run, service, command, named):
    code, _, said = run(*command)

    assert code == 2
    assert named in said
    assert service.requests == []


def test_deploy_and_advance_say_why(run, service):
    made = {"id": 3, "version": "v2", "previous": "v1", "activated": 0, "state": "verified"}
    service.answers["POST /v1/galleries/g/deployments"] = made
    service.answers["POST /v1/galleries/g/deployments/3/advance"] = made

    run("deploy", "g", "v2", "--until", "verified", "--reason", "a trial")
    run("deployment", "advance", "g", 3, "verified", "--reason", "it is time")

    assert [json.loads(r.content)["reason"] for r in service.requests] == ["a trial", "it is time"]


def test_deployment_show_lists_steps_and_counts(run, service):
    step = {"before": None, "after": "registered", "who": "ann", "why": "try", "at": 0.0}
    step["evidence"] = {"gate": 3, "verdict": "pass", "override": None}
    counted = {"overlap": 0.91234, "latency_ms": {"old": {"p50": 1.5}}, "last_errors": []}
    service.answers["GET /v1/galleries/g/deployments/3"] = {
        "version": "v2",
        "state": "shadow",
        "transitions": [step],
        "trial": {"shadow": counted},
    }

    code, shown, _ = run("deployment", "show", "g", 3)

    assert code == 0
    words = [line.split() for line in shown.splitlines()]
    assert words[0] == ["g:", "deployment", "3", "of", "v2", "is", "shadow"]
    assert ["registered", "ann", "try", "gate", "3,", "verdict", "pass"] in [line[-7:] for line in words]
    assert ["overlap", "0.9123"] in words


def test_retire_says_what_it_freed_or_would(run, service):
    service.answers["POST /v1/galleries/g/retire"] = {"embeddings": 7, "bytes": 112}

    assert run("retire", "g", "v1", "--dry-run")[1] == "g: would free 7 embeddings of v1, 112 bytes\n"
    assert run("retire", "g", "v1")[1] == "g: freed 7 embeddings of v1, 112 bytes\n"


def test_evaluation_add_names_the_image_that_is_refused(run, service, tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"x")
    body = {"code": "invalid_image", "detail": "these bytes are not an image"}
    body["errors"] = [{"pointer": "/entries/1/image", "detail": body["detail"]}]
    service.answers["POST /v1/galleries/g/evaluations"] = httpx.Response(422, json=body)

    code, _, said = run("evaluation", "add", "g", tmp_path)

    assert code == 1
    assert f"{tmp_path / 'b.png'}: these bytes are not an image" in said


@pytest.mark.parametrize("there", [True, False])
def test_evaluation_add_of_nothing_is_wrong_usage_and_names_the_folder(run, service, tmp_path, there):
    folder = tmp_path / "empty"
    if there:
        folder.mkdir()

    code, _, said = run("evaluation", "add", "g", folder)

    assert code == 2
    assert "empty" in "".join(said.replace("│", "").split())  # a long path is wrapped
    assert service.requests == []


def test_evaluation_add_sends_embeddings_of_each_version_with_labels(run, service, tmp_path):
    service.answers["POST /v1/galleries/g/evaluations"] = {"id": 2, "size": 2}
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
        (". --version v1", 2, "go with --embeddings"),
        ("--embeddings two.json", 2, "as many versions"),
        ("--embeddings two.json --version v1 --embeddings three.json --version v2", 2, "v1: 2, v2: 3"),
        ("--embeddings two.json --version v1 --labels three.json", 1, "a JSON list of 2 labels"),
        ("--embeddings two.json --version v1 --labels nowhere.json", 1, "nowhere.json"),
        ("--embeddings nowhere.npy --version v1", 1, "nowhere.npy"),
        ("--embeddings broken.npz --version v1", 1, "broken.npz cannot be read"),
        ("--embeddings broken.json --version v1", 1, "broken.json cannot be read"),
        ("--embeddings several.npz --version v1", 1, "no array 'v1'; it has: v2, v3"),
        ("--embeddings ragged.json --version v1", 1, "ragged.json[1] has 1 numbers"),
        ("--embeddings empty.json --version v1", 1, "holds no embeddings"),
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

    found, _, said = run("evaluation", "add", "g", *options.split())

    assert found == code
    assert why in " ".join(said.replace("│", "").split())
    assert service.requests == []


def test_evaluation_add_sends_images_with_their_folders_as_labels(run, service, tmp_path):
    for label in ("boot", "shoe"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "a.png").write_bytes(b"x")
    service.answers["POST /v1/galleries/g/evaluations"] = {"id": 2, "size": 2}

    assert run("evaluation", "add", "g", tmp_path, "--name", "feet")[1] == "g: evaluation set 2 of 2 images\n"
    sent = service.requests[-1].content
    assert b'"label": "boot"' in sent
    assert b'"label": "shoe"' in sent


def test_watching_a_backfill_ends_when_it_ends(run, service, monkeypatch):
    monkeypatch.setattr(backfill_routes, "RECONNECT_SECONDS", 0.0)
    running = {**BACKFILL, "state": "running", "done": 1, "remaining": 3}
    service.answers["POST /v1/galleries/g/backfills"] = running
    first, second = (f"id: {n}\nevent: progress\ndata: {json.dumps(b)}\n\n" for n, b in ((7, running), (9, BACKFILL)))
    # The stream breaks in the middle of an event, and is taken up behind the last whole one.
    streams = [first + second[:20], ": hello\n\n" + second + "event: end\ndata: {}\n\n"]
    service.answers["GET /v1/backfills/3/events"] = [httpx.Response(200, text=text) for text in streams]

    code, shown, _ = run("backfill", "start", "g", "--rate", 100, "--watch")

    assert code == 0
    assert shown == "backfill 3: reencode to v2 is done (4 done, 0 skipped, 0 failed, 0 remaining)\n"
    assert json.loads(service.requests[0].content) == {
        "kind": "reencode",
        "order": "random",
        "rate": 100,
        "attempts": 3,
    }
    assert [r.headers.get("last-event-id") for r in service.requests[1:]] == [None, "7"]


POINT = {"share": 0.0, "moved": 0, "meanwhile": 0, "low": 0.4, "high": 0.7, "queries": 20, "seq": 9, "at": 1.0}
CURVE = {
    "state": "complete",
    "error": None,
    "metric": "cmc@1",
    "points": [{**POINT, "share": s, "moved": int(4 * s), "value": v} for s, v in ((0, 0.5), (0.5, 0.48), (1, 0.64))],
    "area": 0.525,
    "largest_dip": 0.02,
}


def test_a_backfill_with_a_curve_shows_it(run, service):
    service.answers["POST /v1/galleries/g/backfills"] = {**BACKFILL, "curve": CURVE}

    code, shown, _ = run("backfill", "start", "g", "--label", "kind", "--metric", "cmc@1", "--marks", 2, "--seed", 0)

    assert code == 0
    sent = json.loads(service.requests[0].content)["curve"]
    assert sent == {"label": "kind", "metric": "cmc@1", "marks": 2, "seed": 0}
    assert [line.rstrip() for line in shown.splitlines()[1:]] == [
        "cmc@1 50.0% ▂▁█ 64.0%, largest dip 2.0%, area 52.5%: complete",
        "share   moved  cmc@1                 queries",
        "0.0%    0      50.0% [40.0%, 70.0%]  20",
        "50.0%   2      48.0% [40.0%, 70.0%]  20",
        "100.0%  4      64.0% [40.0%, 70.0%]  20",
    ]


def test_a_curve_that_was_given_up_says_why(run, service):
    flat = {**CURVE, "points": CURVE["points"][:1], "state": "stopped", "error": "no more images", "area": None}
    service.answers["GET /v1/backfills/3"] = {**BACKFILL, "curve": flat}

    assert run("backfill", "show", 3)[1].splitlines()[1:3] == [
        "cmc@1 50.0% ▁ 50.0%, largest dip 2.0%: stopped",
        "  no more images",
    ]


def test_points_are_watched_apart_from_the_rest(service):
    points = [f"id: {n}\nevent: point\ndata: {json.dumps(POINT | {'moved': n, 'value': 0.5})}\n\n" for n in (2, 4)]
    progress = f"id: 5\nevent: progress\ndata: {json.dumps(BACKFILL)}\n\n"
    service.answers["GET /v1/backfills/3/events"] = httpx.Response(
        200, text="".join([points[0], points[1], progress, "event: end\ndata: {}\n\n"])
    )

    transport = httpx.MockTransport(service)
    with Client(transport=transport) as client:
        assert [point.moved for point in client.watch_curve(3)] == [2, 4]
    with Client(transport=transport) as client:
        assert [shown.id for shown in client.watch_backfill(3)] == [BACKFILL["id"]]


def test_a_backfill_that_failed_for_items_names_them(run, service):
    service.answers["GET /v1/backfills/3"] = {**BACKFILL, "failed": 1}
    service.answers["GET /v1/backfills/3/failures"] = [
        {"failures": [{"item": "a", "reason": "dark"}], "next": "x"},
        {"failures": [{"item": "b", "reason": "no image"}]},
    ]

    assert run("backfill", "show", 3)[1].splitlines()[-2:] == ["  a: dark", "  b: no image"]
    assert service.requests[-1].url.params["cursor"] == "x"


def test_a_watched_backfill_says_by_its_exit_code_that_items_failed(run, service):
    failed = {**BACKFILL, "failed": 1}
    service.answers["GET /v1/backfills/3"] = failed
    service.answers["GET /v1/backfills/3/failures"] = {"failures": [{"item": "a", "reason": "dark"}], "next": None}
    events = f"id: 1\nevent: progress\ndata: {json.dumps(failed)}\n\nevent: end\ndata: {{}}\n\n"
    service.answers["GET /v1/backfills/3/events"] = httpx.Response(200, text=events)

    assert run("backfill", "watch", 3)[0] == 3


def test_a_backfill_deleted_while_it_is_watched_is_an_error(run, service):
    service.answers["GET /v1/backfills/3"] = BACKFILL
    service.answers["GET /v1/backfills/3/events"] = httpx.Response(200, text="event: gone\ndata: {}\n\n")

    code, _, shown = run("backfill", "watch", 3)

    assert (code, "was deleted with its gallery" in shown) == (1, True)


@pytest.mark.parametrize("url", ["foo", "localhost:8080", "http://", "ftp://x"])
def test_an_address_that_is_none_is_refused_at_once(run, url):
    code, _, shown = run("gallery", "list", "--url", url)

    assert (code, "http:// or https://" in shown) == (1, True)


@pytest.mark.parametrize("rate", ["0", "-5", "nan", "inf"])
def test_a_plan_takes_possible_rates_only(run, rate):
    for option in ("--reencode-rate", "--transform-rate"):
        code, _, shown = run("plan", "a", "b", option, rate)

        assert (code, "must be a number above 0" in shown) == (2, True)


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_each_verb_of_backfill_reaches_its_route(run, service, verb):
    service.answers[f"POST /v1/backfills/3/{verb}"] = BACKFILL

    assert run("backfill", verb, 3)[0] == 0


def test_version_pack_writes_an_archive_that_verifies_again(run, tmp_path):
    version = make_version(tmp_path / "v1", "v1", 4)

    assert run("version", "verify", version.folder)[1] == "v1: 4 numbers, cosine, method independent; edges: none\n"
    code, shown, _ = run("version", "pack", version.folder, tmp_path / "out.zip")

    assert (code, shown) == (0, f"wrote {tmp_path / 'out.zip'}\n")


def test_a_broken_version_folder_is_refused_in_one_line(run, tmp_path):
    version = make_version(tmp_path / "v1", "v1", 4)
    (version.folder / "encoder.onnx").write_bytes(b"other")

    code, shown, said = run("version", "verify", version.folder)

    assert (code, shown) == (1, "")
    assert said == "regraft: encoder.onnx does not have the sha256 that card.json lists\n"


def test_versions_are_registered_and_listed(run, service, tmp_path):
    edges = [{"old": "v1", "kind": "truncate"}]
    listed = {"name": "v2", "dim": 6, "space": {"kind": "cosine"}, "method": "oca", "edges": edges, "problem": None}
    broken = {**listed, "name": "v3", "problem": "encoder.onnx is [not] it"}
    service.answers |= {"POST /v1/versions": listed, "GET /v1/versions": {"versions": [listed, broken]}}

    assert run("version", "register", make_version(tmp_path / "v2", "v2", 6).folder)[1] == "registered v2\n"
    shown = run("version", "list")[1].splitlines()
    assert shown[1].split() == ["v2", "6", "cosine", "oca", "truncate->v1"]
    assert shown[-1] == "v3 is quarantined: encoder.onnx is [not] it"


def test_a_missing_optional_package_is_named_with_the_extra_that_brings_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "training.train", None)

    code, _, said = run("train", "digits_v1")

    assert code == 1
    assert said == "regraft: training.train is not installed; this command needs: pip install 'regraft[train]'\n"


def test_an_unwritable_target_is_one_line_too(run, tmp_path):
    version = make_version(tmp_path / "v1", "v1", 4)

    code, _, said = run("version", "pack", version.folder, tmp_path / "missing" / "v1.zip")

    assert code == 1
    assert said.startswith("regraft: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", [["gallery", "list"], ["migrate", "--data", "/dev/null/x"]])
def test_no_service_and_no_data_folder_give_one_line_and_no_traceback(command):
    url = ["--url", "http://127.0.0.1:9"] if command[0] == "gallery" else []
    root = Path(cli.__file__).parent.parent

    ended = subprocess.run(
        [sys.executable, "-m", "regraft", *command, *url], capture_output=True, text=True, cwd=root, check=False
    )

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("regraft: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "the database cannot be used: "),
        ("sqlite:////nowhere/x.db", "the database cannot be used: "),
        ("oracle+nodriver://x", "the database cannot be used: "),
        ("firebird://x", "the database cannot be used: "),
        ("mssql+pyodbc://x", "REGRAFT_DATABASE_URL needs the Python package pyodbc"),
    ],
)
@pytest.mark.parametrize("command", ["migrate", "serve", "worker"])
def test_a_database_that_cannot_be_used_is_one_line(run, monkeypatch, tmp_path, command, url, said):
    monkeypatch.setenv("REGRAFT_DATABASE_URL", url)

    code, _, shown = run(command, "--data", tmp_path)

    assert code == 1
    assert shown.startswith(f"regraft: {said}")
    assert shown.count("\n") == 1


def test_serve_refuses_to_be_exposed_without_a_key_before_anything_starts(run, tmp_path):
    code, shown, said = run("serve", "--host", "0.0.0.0", "--data", tmp_path / "data")

    assert (code, shown) == (1, "")
    assert "REGRAFT_API_KEY" in said
    assert not (tmp_path / "data").exists()


def test_a_wrong_setting_is_named(run, monkeypatch):
    monkeypatch.setenv("REGRAFT_PORT", "many")

    code, _, said = run("migrate")

    assert code == 1
    assert said.startswith("regraft: REGRAFT_PORT: ")


EDGE = {
    "new": "v2",
    "old": "v1",
    "kind": "matrix",
    "origin": "fitted",
    "scores": {"cmc@1": {"value": 0.9, "low": 0.85, "high": 0.95}},
    "support": 48,
    "calibration": None,
    "made": {},
    "warning": "48 pairs: fewer than 4000",
    "problem": None,
}


def test_edges_are_listed_with_what_was_measured(run, service):
    service.answers["GET /v1/edges"] = {"edges": [EDGE, {**EDGE, "scores": {}, "problem": "edge.npz is damaged"}]}
    code, output, _ = run("edges", "list", "--old", "v1")

    assert code == 0
    assert service.requests[0].url.query == b"old=v1"
    assert "fitted" in output
    assert "90.0% [85.0%, 95.0%]" in output
    assert "edge.npz is damaged" in output


def test_the_two_fits_name_each_other(run, service, tmp_path):
    assert "regraft fit-edge OLD NEW" in run("edges", "fit", "--help")[1]
    assert "regraft edges fit NEW OLD" in " ".join(run("fit-edge", "--help")[1].split())
    code, _, said = run("edges", "fit", "v2", "v1", "--kind", "mlp")
    assert (code, "`regraft fit-edge OLD NEW --kind mlp`" in said) == (1, True)
    code, _, said = run("fit-edge", "v1", "v2", "--kind", "ridge", "--pairs", "x.npz")
    assert (code, "v1 is no version folder" in said, "`regraft edges fit NEW OLD`" in said) == (1, True, True)
    assert service.requests == []


def test_an_unknown_gallery_is_told_with_the_names_near_it(run, service):
    gone = {"code": "unknown_gallery", "detail": "there is no gallery 'shose'"}
    service.answers["GET /v1/galleries/shose"] = httpx.Response(404, json=gone)
    service.answers["GET /v1/galleries"] = {"galleries": [{**GALLERY, "name": name} for name in ("shoes", "faces")]}

    assert run("gallery", "show", "shose")[2] == "regraft: there is no gallery 'shose'; near it: shoes\n"


def test_a_fit_sends_its_options_and_says_what_is_uncertain(run, service):
    service.answers["POST /v1/edges:fit"] = EDGE
    code, output, errors = run("edges", "fit", "v2", "v1", "--kind", "low_rank", "--set", "rank=8", "--label", "x")

    assert code == 0
    sent = json.loads(service.requests[0].content)
    assert (sent["kind"], sent["options"], sent["label"], sent["sample"]) == ("low_rank", {"rank": 8.0}, "x", 5000)
    assert "fitted v2 -> v1, matrix" in output
    assert "48 pairs" in errors
    code, _, errors = run("edges", "fit", "v2", "v1", "--kind", "ridge", "--set", "strength")
    assert (code, "NAME=NUMBER" in errors) == (1, True)


def test_an_edge_is_added_from_its_folder_or_by_its_kind(run, service, tmp_path):
    service.answers["POST /v1/edges"] = {**EDGE, "made": {"items": {"images": 5, "distance": 2e-7}}}
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 4, edges=[(v1, "matrix")])

    assert run("edges", "add", "v2", "v1", v2.folder / "edges" / "v1")[0] == 0
    code, output, _ = run("edges", "add", "v2", "v1", "--kind", "identity", "--gallery", "g", "--items", "5")
    assert code == 0
    assert b"edge.npz" in service.requests[0].content
    assert json.loads(service.requests[1].content)["verify"] == {"gallery": "g", "items": 5, "seed": 0}
    assert "5 items compared, at most 2e-07 apart" in output
    code, _, errors = run("edges", "add", "v2", "v1")
    assert (code, "either a folder or --kind" in errors) == (1, True)


def test_removing_an_edge_says_what_depends_on_it(run, service):
    routes = [{"version": "v1", "items": 3, "before": ["matrix"], "after": None}]
    dependent = {"gallery": "g", "version": "v2", "routes": routes, "moved": 0, "lost": 3}
    service.answers["DELETE /v1/edges/v2/v1/matrix"] = {"edge": EDGE, "dependents": [dependent], "blocked_by": [7]}
    code, output, _ = run("edges", "remove", "v2", "v1", "matrix", "--dry-run")

    assert code == 0
    assert dict(service.requests[0].url.params) == {
        "confirm": "matrix",
        "dry_run": "true",
        "force": "false",
        "reason": "",
    }
    assert "g: 3 items of v1 then by nothing" in output
    assert "3 cannot be reached any more" in output
    assert "backfill 7 applies it" in output
    assert "would remove v2 -> v1, matrix" in output


def test_a_rehearsal_is_asked_for_and_told_as_one(run, service):
    backfill = {"id": 3, "kind": "reencode", "version": "v2", "state": "paused"}
    backfill |= {"done": 1, "skipped": 0, "failed": 0, "remaining": 2}
    edge = {"new": "v2", "old": "v1", "kind": "truncate", "scores": {}, "made": {}, "warning": None}
    service.answers = {
        "POST /v1/backfills/3/pause": backfill,
        "POST /v1/backfills/3/resume": {**backfill, "state": "running"},
        "POST /v1/backfills/3/cancel": {**backfill, "state": "cancelled"},
        "POST /v1/edges": edge,
        "POST /v1/edges:fit": edge,
        "DELETE /v1/galleries/g": {},
        "DELETE /v1/galleries/g/evaluations/4": {},
    }
    told = [
        run(*line.split(), "--dry-run")[1]
        for line in (
            "backfill pause 3",
            "backfill resume 3",
            "backfill cancel 3",
            "edges add v2 v1 --kind truncate",
            "edges fit v2 v1 --kind ridge",
            "gallery delete g",
            "evaluation delete g 4",
        )
    ]

    assert all(request.url.params["dry_run"] == "true" for request in service.requests)
    counts = "(1 done, 0 skipped, 0 failed, 2 remaining)"
    assert told == [
        *(f"backfill 3: reencode to v2 would be {s} {counts}\n" for s in ("paused", "running", "cancelled")),
        *2 * ["would add v2 -> v1, truncate\n"],
        "would delete gallery g\n",
        "g: would delete evaluation set 4\n",
    ]


def test_a_rehearsed_gate_keeps_no_report_that_a_page_could_show(run, service):
    value = {"value": 0.5, "low": 0.4, "high": 0.6}
    report = {**REPORT, "id": None, "old_old": value, "new_old": value, "new_new": None, "difference": value}
    service.answers["POST /v1/galleries/g/gates"] = report

    shown = run("gate", "g", "v2", "--dry-run")
    refused = run("gate", "g", "v2", "--dry-run", "--page", "x.html")

    assert shown[0] == 0
    assert shown[1].startswith("gate (dry run): v1 -> v2, verdict pass\n")
    assert refused[0] == 1
    assert "leave out --dry-run" in refused[2]


def test_the_audit_says_who_changed_what_and_why(run, service):
    row = {"id": 1, "at": 0.0, "who": "api_key", "action": "edge_removed", "subject": "v2/v1/matrix", "why": "drill"}
    service.answers["GET /v1/audit"] = {"audit": [{**row, "evidence": {}}]}

    code, shown, _ = run("audit", "--limit", "5")

    assert code == 0
    assert [part in shown for part in ("api_key", "edge_removed", "v2/v1/matrix", "drill")] == [True] * 4
    assert service.requests[0].url.params["limit"] == "5"
