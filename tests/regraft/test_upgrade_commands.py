"""The commands of an upgrade: gates, deployments, evaluation sets and edges."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from staging.answers import GALLERY
from staging.builders import make_version

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


def test_a_fit_of_the_best_kind_tells_what_each_reached_and_what_to_make_of_it(run, service):
    measured = {"cmc@1": {"value": 0.7, "low": 0.6, "high": 0.8}}
    made = {"tried": {"ridge": measured}, "left_out": {"low_rank": "rank"}, "advice": ["More pairs would hardly help."]}
    service.answers["POST /v1/edges:fit"] = {**EDGE, "made": made}
    code, output, _ = run("edges", "fit", "v2", "v1", "--kind", "auto")

    assert code == 0
    assert "tried ridge: cmc@1 70.0% [60.0%, 80.0%]" in output
    assert "left out low_rank: rank" in output
    assert "More pairs would hardly help." in output


def test_a_fit_on_a_file_of_pairs_sends_the_file_and_nothing_of_stored_items(run, service, tmp_path):
    service.answers["POST /v1/edges:fit"] = EDGE
    (pairs := tmp_path / "pairs.npz").write_bytes(b"arrays")
    asked = ("edges", "fit", "v2", "v1", "--kind", "ridge", "--set", "strength=0.5", "--pairs", pairs)

    assert run(*asked)[0] == 0
    sent = service.requests[0].content
    assert b'name="pairs"; filename="pairs.npz"' in sent
    assert b'{"strength": 0.5}' in sent
    assert b"sample" not in sent
    code, _, errors = run(*asked, "--gallery", "g")
    assert (code, "--pairs takes no --gallery" in errors, len(service.requests)) == (1, True, 1)


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
