"""What anybody may have written into names, metadata and reasons is shown as text, by every command that prints it."""

from __future__ import annotations

import json
import re

import httpx
import numpy as np
import pytest
import typer

from regraft import cli
from regraft.commands.console import visible
from service.doctor.examination import Doctor
from service.doctor.findings import Finding
from staging.builders import make_version

HOSTILE = "[/nobody][bold]:boom:\x1b]0;owned\x07\x1b[2J\r\x9b1m\u202egnp.\u2066\u2028\x00"
SHOWN = r"[/nobody][bold]:boom:\x1b]0;owned\x07\x1b[2J\r\x9b1m\u202egnp.\u2066\u2028\x00"
ACTING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff]")
H = HOSTILE

SCORE = {"value": 0.5, "low": 0.4, "high": 0.6}
DEPLOYED = {"id": 1, "version": H, "previous": H, "activated": 1, "state": H, "gate": 1, "reason": H}
EDGE = {"new": H, "old": H, "kind": H, "origin": H, "scores": {H: SCORE}, "support": 1, "calibration": None}
EDGE |= {"made": {}, "warning": H, "problem": H}
POINT = {"share": 0.0, "moved": 0, "queries": 2, **SCORE}
CURVE = {"state": H, "error": H, "metric": H, "points": [POINT], "area": None, "largest_dip": 0.0}
COUNTS = dict.fromkeys(("total", "done", "skipped", "remaining"), 1)
BACKFILL = {"id": 3, "version": H, "kind": H, "state": H, **COUNTS, "failed": 1, "curve": CURVE}
ESTIMATE = {"kind": H, "version": H, "items": 1, "without_image": 1, "seconds": 1.0, "sampled": 1, "bytes_now": 1}
ESTIMATE |= {"bytes_after": 1, "bytes_after_retiring": None, "macs_per_item": {"reencode": None, "transform": 1.0}}
REPORT = {"id": 1, "version": H, "current": H, "metric": H, "verdict": "refuse", "old_old": SCORE, "unlabelled": 1}
REPORT |= {"whole": False, "queries": 1, "items": 2, "seed": 0, "slice": H}
REPORT["slices"] = [{"value": json.dumps(H), "queries": 1, "old_old": 0.1, "new_old": 0.1}]
GALLERY = {"name": H, "current": H, "items": 2, "mix": {H: 2}}
SHARD = {"version": H, "origin": H, "items": 1, "route": [EDGE], "calibration": None}
SHARD["seconds"] = {"transform": 0.0, "scan": 0.0}
MATCH = {"id": H, "score": 0.5, "version": H, "route": [H], "metadata": {H: H}}
ANSWER = {"mode": H, "results": [{"matches": [MATCH]}], "explain": {"shards": [SHARD]}}
ANSWER["degraded"] = [{"version": H, "items": 1, "reason": H}]
STEP = {"after": H, "who": H, "why": H, "at": 0.0, "evidence": {H: H}}
SET = {"id": 1, "name": H, "kind": H, "size": 1, "labelled": 1, "versions": [H]}
VERSION = {"name": H, "dim": 2, "space": {"kind": H}, "method": H, "edges": [{"kind": H, "old": H}], "problem": H}
DEPENDENT = {"gallery": H, "moved": 1, "lost": 1, "routes": [{"items": 1, "version": H, "after": [H]}]}
FAILED = {"failures": [{"item": H, "reason": H}], "next": None}
REFUSED = {"GET /v1/galleries/g/items:embeddings": httpx.Response(409, json={"code": "x", "detail": H})}

COMMANDS = [
    ("audit", {"GET /v1/audit": {"audit": [dict.fromkeys(("who", "action", "subject", "why"), H) | {"at": 0.0}]}}),
    ("gallery create g", {"POST /v1/galleries": GALLERY}),
    ("version delete v1 --yes", {"DELETE /v1/versions/v1": {}}),
    ("gallery list", {"GET /v1/galleries": {"galleries": [GALLERY]}}),
    ("gallery show g", {"GET /v1/galleries/g": GALLERY}),
    ("gallery index g auto", {"PATCH /v1/galleries/g": GALLERY}),
    ("gallery delete g --yes", {"DELETE /v1/galleries/g": {}}),
    (
        "ingest g {folder}",
        {
            "POST /v1/galleries/g/items": {
                **dict.fromkeys(("stored", "new", "replaced"), 0),
                "failed": 1,
                "errors": [{"index": 0, "detail": H}],
            }
        },
    ),
    ("query g --like a --explain", {"GET /v1/galleries/g": GALLERY, "POST /v1/galleries/g/query": ANSWER}),
    ("version list", {"GET /v1/versions": {"versions": [VERSION]}}),
    ("version register {version}", {"POST /v1/versions": VERSION}),
    (
        "import g {vectors}",
        {
            "GET /v1/galleries/g": GALLERY,
            "POST /v1/galleries/g/items": {
                **dict.fromkeys(("stored", "new", "updated", "replaced", "seq"), 0),
                "failed": 1,
                "errors": [{"index": 0, "id": H, "code": H, "pointer": H, "detail": H}],
                "warnings": [],
            },
        },
    ),
    ("gallery export g {folder}/no.parquet", {"GET /v1/galleries/g": GALLERY, **REFUSED}),
    ("evaluation add g {folder}", {"POST /v1/galleries/g/evaluations": {"id": 1, "size": 1}}),
    ("evaluation list g", {"GET /v1/galleries/g/evaluations": {"evaluations": [SET]}}),
    ("evaluation delete g 1", {"DELETE /v1/galleries/g/evaluations/1": {}}),
    ("edges list", {"GET /v1/edges": {"edges": [EDGE]}}),
    ("edges add v2 v1 --kind truncate", {"POST /v1/edges": EDGE}),
    ("edges fit v2 v1 --kind ridge", {"POST /v1/edges:fit": EDGE}),
    (
        "edges remove v2 v1 matrix",
        {"DELETE /v1/edges/v2/v1/matrix": {"edge": EDGE, "dependents": [DEPENDENT], "blocked_by": [7]}},
    ),
    ("gate g v2", {"POST /v1/galleries/g/gates": REPORT}),
    ("deploy g v2", {"POST /v1/galleries/g/deployments": DEPLOYED}),
    ("deployment list g", {"GET /v1/galleries/g/deployments": {"deployments": [DEPLOYED]}}),
    (
        "deployment show g 1",
        {"GET /v1/galleries/g/deployments/1": DEPLOYED | {"transitions": [STEP], "trial": {"shadow": {H: H}}}},
    ),
    ("deployment advance g 1 current", {"POST /v1/galleries/g/deployments/1/advance": DEPLOYED}),
    ("rollback g", {"POST /v1/galleries/g/rollback": DEPLOYED | {"out_of_reach": {H: 1}}}),
    ("retire g v1", {"POST /v1/galleries/g/retire": {"embeddings": 7, "bytes": 112}}),
    (
        "backfill start g --watch",
        {
            "POST /v1/galleries/g/backfills": BACKFILL,
            "GET /v1/backfills/3/failures": FAILED,
            "GET /v1/backfills/3/events": httpx.Response(200, text="event: end\ndata: {}\n\n"),
        },
    ),
    ("backfill estimate g", {"POST /v1/galleries/g/backfills": ESTIMATE}),
    ("backfill list g", {"GET /v1/galleries/g/backfills": {"backfills": [BACKFILL]}}),
    ("backfill show 3", {"GET /v1/backfills/3": BACKFILL, "GET /v1/backfills/3/failures": FAILED}),
    (
        "backfill watch 3",
        {
            "GET /v1/backfills/3": BACKFILL,
            "GET /v1/backfills/3/failures": FAILED,
            "GET /v1/backfills/3/events": httpx.Response(200, text="event: end\ndata: {}\n\n"),
        },
    ),
    *((f"backfill {verb} 3 --dry-run", {f"POST /v1/backfills/3/{verb}": BACKFILL}) for verb in ("pause", "resume")),
    ("backfill cancel 3", {"POST /v1/backfills/3/cancel": BACKFILL}),
]
QUIET = {
    "gallery index",
    "gallery create",
    "gallery export",
    "gallery delete",
    "version delete",
    "ingest",
    "evaluation add",
    "evaluation delete",
    "retire",
}
"""Of what the service says these print nothing but numbers when all goes well."""
LOCAL = {
    *("serve", "worker", "migrate", "doctor", "plan", "version verify", "version pack", "version create"),
    *("train", "recipes", "evaluate", "fit-edge", "export", "sweep", "reproduce"),
}
"""These speak to no service; the doctor has a test of its own below."""


@pytest.fixture
def places(tmp_path):
    """What commands that need something on this machine are given."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "[bold]\x1b[2J.png").write_bytes(b"x")
    np.save(tmp_path / "v.npy", np.eye(2, dtype=np.float32))
    given = {"folder": tmp_path / "folder", "vectors": tmp_path / "v.npy"}
    return given | {"version": make_version(tmp_path / "v1", "v1", 2).folder}


@pytest.mark.parametrize(("line", "answers"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_hostile_data_is_shown_and_does_nothing(run, service, places, line, answers):
    service.answers |= answers

    code, shown, said = run(*line.format(**places).split())

    assert code in {0, 1, 3}
    assert service.requests
    assert not ACTING.search(shown + said)
    if not any(line.startswith(quiet) for quiet in QUIET):
        assert SHOWN in shown + said


def test_a_hostile_refusal_is_one_line_that_does_nothing(run, service):
    service.answers["GET /v1/galleries"] = httpx.Response(409, json={"code": "x", "detail": H})

    code, shown, said = run("gallery", "list")

    assert (code, shown) == (1, "")
    assert not ACTING.search(said)
    assert said.startswith("regraft: [/nobody][bold]:boom:")


@pytest.mark.parametrize(
    "line", ["evaluation add g {0}", "query g {0}", "backfill show {0}", "plan {0} {0} --items {0}"]
)
def test_wrong_usage_is_told_whatever_was_given(run, service, line):
    assert run(*line.format("[/nobody]").split())[0] == 2


def test_the_doctor_shows_hostile_names(run, monkeypatch, tmp_path):
    finding = Finding("lost", "error", "things", "call somebody", 1, [H])
    monkeypatch.setattr(Doctor, "examine", lambda self, *, fix: [finding])

    code, shown, _ = run("doctor", "--data", tmp_path)

    assert code == 1
    assert SHOWN in shown
    assert not ACTING.search(shown)


def test_every_command_that_speaks_to_the_service_is_tried_here():
    def leaves(command, path=()):
        inner = getattr(command, "commands", None)
        return [" ".join(path)] if inner is None else [x for n, sub in inner.items() for x in leaves(sub, (*path, n))]

    commands = set(leaves(typer.main.get_command(cli.app)))

    tried = {name for name in commands for line, _ in COMMANDS if f"{line} ".startswith(f"{name} ")}
    assert tried | LOCAL == commands
    assert not tried & LOCAL


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Ünïcode 北京 سلام 👩‍👧 a\u00adb", "Ünïcode 北京 سلام 👩‍👧 a\\xadb"),
        ("\x1b[31m\x9b\x7f\t\n", r"\x1b[31m\x9b\x7f\t\n"),
        ("\u202egnp\u2066\u200f\u061c\ufeff\u2029", r"\u202egnp\u2066\u200f\u061c\ufeff\u2029"),
        ("a\udcff.png", r"a\udcff.png"),
    ],
)
def test_what_acts_on_a_terminal_is_made_visible_and_writing_is_left_alone(text, shown):
    assert visible(text) == shown
