"""`regraft query`."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from staging.api.answers import GALLERY


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


def test_query_without_a_match_says_so(run, service, tmp_path):
    (tmp_path / "q.png").write_bytes(b"x")
    service.answers["POST /v1/galleries/g/query"] = {"results": [{"matches": []}]}

    assert run("query", "g", tmp_path / "q.png") == (0, "no matches\n", "")


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
    assert ["score", "mode", "rank"] in words
    assert ["v1", "encoded", "7", "matrix", "v2", ">", "v1:", "cmc@1", "0.500", "yes", "3.50"] in words
    assert ["v2", "supplied", "8", "same", "no", "3.50"] in words
    sent = service.requests[-1].content
    assert b'name="mode"\r\n\r\nrank\r\n' in sent
    assert b'name="explain"\r\n\r\ntrue\r\n' in sent


def test_query_takes_an_image_a_text_or_an_item(run, service, tmp_path):
    (tmp_path / "q.png").write_bytes(b"x")
    service.answers["POST /v1/galleries/g/query"] = {"results": [{"matches": []}], "degraded": []}
    service.answers["GET /v1/galleries/g/items"] = {"items": [], "next": None}

    code, _, _ = run("query", "g", "--text", "a red boot", "-k", "1")

    assert code == 0
    assert json.loads(service.requests[-1].content)["texts"] == ["a red boot"]
    assert run("query", "g", "--like", "a", "-k", "1", "--threshold", "0.5")[0] == 0
    assert json.loads(service.requests[-1].content) == {"items": ["a"], "k": 1, "threshold": 0.5, "explain": False}
    assert run("query", "g", "--like", "a", "--strict")[0] == 0
    assert json.loads(service.requests[-1].content)["strict"] is True
    assert run("query", "g", "--like", "a", "-k", "1", "--filter", '{"field": "n", "eq": 1}')[0] == 0
    assert json.loads(service.requests[-2].content)["filter"] == {"field": "n", "eq": 1}
    code, _, said = run("query", "g", "--like", "a", "-k", "1", "--filter", "n=1")
    assert code == 1
    assert said.startswith("regraft: --filter must be JSON")
    for wrong in ([], [tmp_path / "q.png", "--text", "boot"], ["--like", "a", "--text", "boot"]):
        code, _, said = run("query", "g", *wrong)
        assert (code, said) == (1, "regraft: exactly one of IMAGE, --text, --like and --vector is required\n")


@pytest.mark.parametrize("many", [False, True])
def test_query_takes_vectors_of_a_file(run, service, tmp_path, many):
    rows = np.arange(6, dtype=np.float64).reshape(2, 3)[: 1 + many]
    np.save(tmp_path / "q.npy", rows if many else rows[0])
    answered: dict[str, Any] = {"results": [{"matches": []}] * len(rows), "degraded": []}
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
        (("--vector", "{0}/text.npy"), "is not an .npy file: it is neither an .npy nor an .npz"),
        (("--vector", "{0}/cut.npy"), "cut.npy is not an .npy file"),
        (("--vector", "{0}/header.npy"), "header.npy is not an .npy file"),
        (("--vector", "{0}/several.npy"), "is not an .npy file: it is an .npz"),
        (("--vector", "{0}/cube.npy"), "must have one vector"),
        (
            ("--vector", "{0}/objects.npy"),
            "or a matrix: its elements are Python objects (dtype object), not numbers or",
        ),
        (("--like", "a", "--version", "v1"), "--version can only be used with --vector"),
        (("--vector", "{0}/cube.npy", "--like", "a"), "exactly one of IMAGE, --text, --like and --vector"),
    ],
)
def test_what_is_no_query_is_told(run, service, tmp_path, given, said):
    (tmp_path / "text.npy").write_text("1, 2")
    np.save(tmp_path / "cube.npy", np.ones((1, 2, 3)))
    np.save(tmp_path / "objects.npy", np.array([[1, 2], [3]], object), allow_pickle=True)
    (tmp_path / "header.npy").write_bytes((tmp_path / "cube.npy").read_bytes().replace(b"3), }", b"3000("))
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, one=np.ones(3), two=np.ones(3))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "several.npy").read_bytes()[:40])

    code, _, told = run("query", "g", *(word.format(tmp_path) for word in given))

    assert (code, said in " ".join(told.split()), service.requests) == (1, True, [])
