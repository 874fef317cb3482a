"""`regraft edge`: what is listed, fitted, added and removed."""

from __future__ import annotations

import json

from staging.inputs.builders import make_version

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
    code, output, _ = run("edge", "list", "--old", "v1")

    assert code == 0
    assert service.requests[0].url.query == b"old=v1"
    assert "fitted" in output
    assert "90.0% [85.0%, 95.0%]" in output
    assert "edge.npz is damaged" in output


def test_the_two_fits_name_each_other(run, service, tmp_path):
    assert "regraft fit-edge OLD NEW" in run("edge", "fit", "--help")[1]
    assert "regraft edge fit NEW OLD" in " ".join(run("fit-edge", "--help")[1].split())
    code, _, said = run("edge", "fit", "v2", "v1", "--kind", "mlp")
    assert (code, "`regraft fit-edge OLD NEW --kind mlp`" in said) == (1, True)
    code, _, said = run("fit-edge", "v1", "v2", "--kind", "ridge", "--pairs", "x.npz")
    assert (code, "v1 is not a version folder" in said, "`regraft edge fit NEW OLD`" in said) == (1, True, True)
    assert service.requests == []


def test_a_fit_sends_its_options_and_says_what_is_uncertain(run, service):
    service.answers["POST /v1/edges:fit"] = EDGE
    code, output, errors = run("edge", "fit", "v2", "v1", "--kind", "low_rank", "--set", "rank=8", "--label", "x")

    assert code == 0
    sent = json.loads(service.requests[0].content)
    assert (sent["kind"], sent["options"], sent["label"], sent["sample"]) == ("low_rank", {"rank": 8.0}, "x", 5000)
    assert "fitted v2 -> v1, matrix" in output
    assert "warning: 48 pairs" in errors
    code, _, errors = run("edge", "fit", "v2", "v1", "--kind", "ridge", "--set", "strength")
    assert (code, "NAME=NUMBER" in errors) == (1, True)


def test_a_fit_of_the_best_kind_tells_what_each_reached_and_what_to_make_of_it(run, service):
    measured = {"cmc@1": {"value": 0.7, "low": 0.6, "high": 0.8}}
    made = {"tried": {"ridge": measured}, "left_out": {"low_rank": "rank"}, "advice": ["More pairs would hardly help."]}
    service.answers["POST /v1/edges:fit"] = {**EDGE, "made": made}
    code, output, _ = run("edge", "fit", "v2", "v1", "--kind", "auto")

    assert code == 0
    assert "tried ridge: cmc@1 70.0% [60.0%, 80.0%]" in output
    assert "left out low_rank: rank" in output
    assert "More pairs would hardly help." in output


def test_a_fit_on_a_file_of_pairs_sends_the_file_and_nothing_of_stored_items(run, service, tmp_path):
    service.answers["POST /v1/edges:fit"] = EDGE
    (pairs := tmp_path / "pairs.npz").write_bytes(b"arrays")
    asked = ("edge", "fit", "v2", "v1", "--kind", "ridge", "--set", "strength=0.5", "--pairs", pairs)

    assert run(*asked)[0] == 0
    sent = service.requests[0].content
    assert b'name="pairs"; filename="pairs.npz"' in sent
    assert b'{"strength":0.5}' in sent
    assert b"sample" not in sent
    code, _, errors = run(*asked, "--gallery", "g")
    assert (code, "--pairs" in errors, len(service.requests)) == (1, True, 1)


def test_an_edge_is_added_from_its_folder_or_by_its_kind(run, service, tmp_path):
    service.answers["POST /v1/edges"] = {**EDGE, "made": {"items": {"images": 5, "distance": 2e-7}}}
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 4, edges=[(v1, "matrix")])

    assert run("edge", "add", "v2", "v1", v2.folder / "edges" / "v1")[0] == 0
    code, output, _ = run("edge", "add", "v2", "v1", "--kind", "identity", "--gallery", "g", "--items", "5")
    assert code == 0
    assert b"edge.npz" in service.requests[0].content
    assert json.loads(service.requests[1].content)["verify"] == {"gallery": "g", "items": 5, "seed": 0}
    assert "5 items compared, at most 2e-07 apart" in output
    code, _, errors = run("edge", "add", "v2", "v1")
    assert (code, "either a folder or --kind" in errors) == (1, True)


def test_removing_an_edge_says_what_depends_on_it(run, service):
    routes = [{"version": "v1", "items": 3, "before": ["matrix"], "after": None}]
    dependent = {"gallery": "g", "version": "v2", "routes": routes, "moved": 0, "lost": 3}
    service.answers["DELETE /v1/edges/v2/v1/matrix"] = {"edge": EDGE, "dependents": [dependent], "blocked_by": [7]}
    code, output, _ = run("edge", "remove", "v2", "v1", "matrix", "--dry-run")

    assert code == 0
    assert dict(service.requests[0].url.params) == {
        "confirm": "matrix",
        "dry_run": "true",
        "force": "false",
        "reason": "",
    }
    assert "g: 3 items of v1 then use nothing" in output
    assert "3 become unreachable" in output
    assert "backfill 7 uses it" in output
    assert "would remove v2 -> v1, matrix" in output


def test_a_check_of_queries_says_what_it_means(run, service, tmp_path):
    (tmp_path / "q.npy").write_bytes(b"rows")
    found = {"queries": 9, "share": 0.5, "low": 0.2, "high": 0.8, "expected": 0.01, "nearest": 0.4, "least": 0.6}
    service.answers["POST /v1/edges:check"] = {**found, "advice": "Do not trust it."}

    code, shown, _ = run("edge", "check", "v2", "v1", "matrix", "--vectors", tmp_path / "q.npy")

    assert (code, shown.startswith("Do not trust it.\n"), "below 0.600" in shown) == (0, True, True)
    assert b"rows" in service.requests[0].content
    assert run("edge", "check", "v2", "v1", "matrix", "--gallery", "g")[0] == 0
    assert json.loads(service.requests[1].content)["gallery"] == "g"
    assert run("edge", "check", "v2", "v1", "matrix")[0] == 1
