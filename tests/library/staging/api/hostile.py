"""All commands that call a service, with answers whose text would control a terminal."""

from __future__ import annotations

import json

import httpx

HOSTILE = "[/nobody][bold]:boom:\x1b]0;owned\x07\x1b[2J\r\x9b1m\u202egnp.\u2066\u2028\x00"
SHOWN = r"[/nobody][bold]:boom:\x1b]0;owned\x07\x1b[2J\r\x9b1m\u202egnp.\u2066\u2028\x00"
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
ITEM = {"id": H, "active": H, "metadata": {H: H}, "text": H}
STEP = {"after": H, "who": H, "why": H, "at": 0.0, "evidence": {H: H}}
SET = {"id": 1, "name": H, "kind": H, "size": 1, "labelled": 1, "versions": [H]}
VERSION = {"name": H, "dim": 2, "space": {"kind": H}, "method": H, "edges": [{"kind": H, "old": H}], "problem": H}
DEPENDENT = {"gallery": H, "moved": 1, "lost": 1, "routes": [{"items": 1, "version": H, "after": [H]}]}
FAILED = {"failures": [{"item": H, "reason": H}], "next": None}
KEY = {"name": H, "scope": "query", "created": 0.0, "galleries": [H]}
REFUSED = {"GET /v1/galleries/g/items:embeddings": httpx.Response(409, json={"code": "x", "detail": H})}

COMMANDS = [
    ("audit", {"GET /v1/audit": {"audit": [dict.fromkeys(("who", "action", "subject", "why"), H) | {"at": 0.0}]}}),
    ("key create shop --scope query", {"POST /v1/keys": KEY | {"key": H}}),
    ("key list", {"GET /v1/keys": {"keys": [KEY]}}),
    ("key delete shop --yes", {"DELETE /v1/keys/shop": httpx.Response(204)}),
    ("gallery create g", {"POST /v1/galleries": GALLERY}),
    ("version delete v1 --yes", {"DELETE /v1/versions/v1": httpx.Response(204)}),
    ("gallery list", {"GET /v1/galleries": {"galleries": [GALLERY]}}),
    ("gallery show g", {"GET /v1/galleries/g": GALLERY}),
    ("gallery index g auto", {"PATCH /v1/galleries/g": GALLERY}),
    ("gallery delete g --yes", {"DELETE /v1/galleries/g": httpx.Response(204)}),
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
    ("item list g --with-text", {"GET /v1/galleries/g/items": {"items": [ITEM], "next": H}}),
    (
        "item list g --limit 1 --filter {{}}",
        {"GET /v1/galleries/g/items": {"items": [ITEM], "next": H}},
    ),
    (
        "item show g a",
        {"GET /v1/galleries/g/items/a": {**ITEM, "id": "a", "embeddings": [{"version": H, "origin": H}]}},
    ),
    (
        "item update g a --metadata {{}}",
        {
            "PATCH /v1/galleries/g/items": {
                "updated": 0,
                "failed": 1,
                "errors": [dict.fromkeys(("id", "code", "detail", "pointer"), H) | {"index": 0}],
            }
        },
    ),
    ("item delete g a --yes", {"POST /v1/galleries/g/items:delete": {"deleted": 0, "missing": [H]}}),
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
    ("evaluation delete g 1 --yes", {"DELETE /v1/galleries/g/evaluations/1": httpx.Response(204)}),
    ("edge list", {"GET /v1/edges": {"edges": [EDGE]}}),
    ("edge add v2 v1 --kind truncate", {"POST /v1/edges": EDGE}),
    ("edge fit v2 v1 --kind ridge", {"POST /v1/edges:fit": EDGE}),
    (
        "edge check v2 v1 matrix --gallery g",
        {"POST /v1/edges:check": {"advice": H, "nearest": 0.5, "least": 0.4}},
    ),
    (
        "edge remove v2 v1 matrix",
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
"""(command line, answers by "METHOD /path"); {folder}, {vectors} and {version} are the fixture `places`."""
