"""The commands of an upgrade: gates and deployments."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from staging.api.answers import GALLERY

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
    assert "1000 queries over 2500 items (all comparable items), seed 3" in shown
    assert bool(said) == (verdict != "pass")


def test_gate_names_slices_as_they_were_written_and_what_was_left_out(run, service):
    slices = [{"value": value, "old_old": 0.5, "new_old": 0.25, "queries": 9} for value in ('"ok"', "3")]
    service.answers["POST /v1/galleries/g/gates"] = {**REPORT, "slice": "shop", "slices": slices, "unlabelled": 2}

    shown = run("gate", "g", "v2", "--slice", "shop")[1]

    assert "shop ok: 50.0% -> 25.0% (9 queries)" in shown
    assert "shop 3: 50.0%" in shown
    assert "2 entries without a label left out" in shown


def test_deploy_and_rollback_say_from_where_to_where(run, service):
    deployed = {"id": 1, "version": "v2", "previous": "v1", "activated": 0, "state": "current"}
    service.answers["POST /v1/galleries/g/deployments"] = deployed
    back = {**deployed, "version": "v1", "previous": "v2", "activated": 5, "out_of_reach": {"v2": 3}}
    service.answers["POST /v1/galleries/g/rollback"] = back

    assert run("deploy", "g", "v2", "--gate", 4, "--override", "why")[1] == "g: v1 -> v2\n"
    _, shown, said = run("rollback", "g", "--reason", "bad", "--force")
    assert shown == "g: v2 -> v1, 5 items switched to stored embeddings\n"
    assert said == "unreachable: 3 items of v2\n"
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
    evidence = {"gate": 3, "verdict": "pass", "override": None}
    step = {"before": None, "after": "registered", "who": "ann", "why": "try", "at": 0.0, "evidence": evidence}
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


def test_an_unknown_gallery_is_told_with_the_names_near_it(run, service):
    gone = {"code": "unknown_gallery", "detail": "gallery 'shose' does not exist"}
    service.answers["GET /v1/galleries/shose"] = httpx.Response(404, json=gone)
    service.answers["GET /v1/galleries"] = {"galleries": [{**GALLERY, "name": name} for name in ("shoes", "faces")]}

    assert run("gallery", "show", "shose")[2] == "regraft: gallery 'shose' does not exist; did you mean shoes?\n"


def test_a_rehearsal_is_asked_for_and_told_as_one(run, service):
    backfill = {"id": 3, "kind": "reencode", "version": "v2", "state": "paused"}
    backfill |= {"done": 1, "skipped": 0, "failed": 0, "remaining": 2}
    edge: dict[str, Any] = {"new": "v2", "old": "v1", "kind": "truncate", "scores": {}, "made": {}, "warning": None}
    service.answers = {
        "POST /v1/backfills/3/pause": backfill,
        "POST /v1/backfills/3/resume": {**backfill, "state": "running"},
        "POST /v1/backfills/3/cancel": {**backfill, "state": "cancelled"},
        "POST /v1/edges": edge,
        "POST /v1/edges:fit": edge,
        "DELETE /v1/galleries/g": httpx.Response(204),
        "DELETE /v1/galleries/g/evaluations/4": {},
    }
    told = [
        run(*line.split(), "--dry-run")[1]
        for line in (
            "backfill pause 3",
            "backfill resume 3",
            "backfill cancel 3",
            "edge add v2 v1 --kind truncate",
            "edge fit v2 v1 --kind ridge",
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


def test_a_page_that_could_not_be_written_is_refused_before_anything_is_measured(run, service, tmp_path):
    code, _, said = run("gate", "g", "v2", "--page", tmp_path / "nowhere" / "gate.html")

    assert (code, said, service.requests) == (1, f"regraft: the folder {tmp_path / 'nowhere'} does not exist\n", [])


def test_a_rehearsed_gate_keeps_no_report_that_a_page_could_show(run, service):
    value = {"value": 0.5, "low": 0.4, "high": 0.6}
    report = {**REPORT, "id": None, "old_old": value, "new_old": value, "new_new": None, "difference": value}
    service.answers["POST /v1/galleries/g/gates"] = report

    shown = run("gate", "g", "v2", "--dry-run")
    refused = run("gate", "g", "v2", "--dry-run", "--page", "x.html")

    assert shown[0] == 0
    assert shown[1].startswith("gate (dry run): v1 -> v2, verdict pass\n")
    assert refused[0] == 1
    assert "--dry-run" in refused[2]


UNCHANGED = "so no answer changes until a backfill"


@pytest.mark.parametrize(
    ("verdict", "changes", "said"),
    [
        ("pass", {}, ""),
        (
            "warn",
            {"difference": (0.0, -0.1, 0.1)},
            "it is uncertain whether v2 raises cmc@1: the difference may be 0\n",
        ),
        (
            "warn",
            {"route": ["dual"]},
            f"no edge leads from v2 to v1, which still embeds the queries for its items, {UNCHANGED}\n",
        ),
        ("warn", {"slices": (-0.3, -0.4, -0.1)}, "cmc@1 falls for 1 of 1 values of city\n"),
        ("warn", {}, "there are too few queries, or too few false accepts, for another verdict\n"),
        ("pass", {"new_new": (0.1, 0.0, 0.2)}, "note: a backfill would lower cmc@1 from 50.0% to 10.0%\n"),
        ("pass", {"new_new": (0.1, 0.0, 0.2), "new_new_items": 1}, ""),
    ],
)
def test_a_gate_says_why_it_warns_and_when_a_backfill_would_lower_the_metric(run, service, verdict, changes, said):
    scores = {"old_old": (0.5, 0.4, 0.6), "new_old": (0.7, 0.6, 0.8), "new_new": None, "difference": (0.2, 0.1, 0.3)}
    report = {**REPORT, **scores, "verdict": verdict, **changes}
    for name, value in report.items():
        if isinstance(value, tuple):
            report[name] = dict(zip(("value", "low", "high"), value, strict=True))
    if "slices" in changes:
        part = {"value": '"Bern"', "queries": 9, "old_old": 0.5, "new_old": 0.2, "difference": report["slices"]}
        report |= {"slice": "city", "slices": [part]}
    service.answers["POST /v1/galleries/g/gates"] = report

    assert run("gate", "g", "v2")[2] == said


def test_the_audit_says_who_changed_what_and_why(run, service):
    row = {"id": 1, "at": 0.0, "who": "api_key", "action": "edge_removed", "subject": "v2/v1/matrix", "why": "drill"}
    service.answers["GET /v1/audit"] = {"audit": [{**row, "evidence": {}}]}

    code, shown, _ = run("audit", "--limit", "5")

    assert code == 0
    assert [part in shown for part in ("api_key", "edge_removed", "v2/v1/matrix", "drill")] == [True] * 4
    assert service.requests[0].url.params["limit"] == "5"
