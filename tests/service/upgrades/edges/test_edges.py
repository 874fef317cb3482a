"""Edges over HTTP: listed, claimed and added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from index.incoming import INCOMING
from index.version import Version
from service.upgrades.edges import changes
from staging.api.edges import EYE, add, bare_edge, edges, fit, hold, key, remove, routes, send, zipped
from staging.api.served import problem


class TestList:
    def test_edges_that_came_with_a_version_are_listed_with_their_evidence(self, served: Any) -> None:
        (edge,) = edges(served, new="v2")

        assert edge.pop("created") > 1_700_000_000
        assert edge.pop("old_encoder")
        assert edge == {
            "new": "v2",
            "old": "v1",
            "kind": "truncate",
            "direction": "query",
            "origin": "registered",
            "scores": {"cmc@1": {"value": 0.9, "low": pytest.approx(0.85), "high": pytest.approx(0.95)}},
            "support": 0,
            "calibration": None,
            "made": {},
            "files": {},
            "warning": None,
            "problem": None,
        }
        assert {e["new"] for e in edges(served, old="v1")} == {"v2", "third", "fct"}
        assert [key(e) for e in edges(served, new="third", old="v2")] == [("third", "v2", "matrix")]

    def test_one_is_shown_by_its_key(self, served: Any) -> None:
        shown = served.http.get("/edges/v2/v1/truncate")

        assert shown.json() == edges(served, new="v2")[0]
        detail = problem(served.http.get("/edges/v2/v1/matrix"), 404, "unknown_edge")["detail"]
        assert "existing kinds: truncate" in detail
        problem(served.http.get("/edges", params={"new": "nobody"}), 404, "unknown_version")


class TestClaim:
    def test_the_same_model_by_another_name_is_accepted_on_its_probes(
        self, served: Any, many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, {"a": many["0"], "b": many["1"]})

        claimed = add(served, "twin", "v1", "identity")

        assert claimed.status_code == 201, claimed.text
        edge = claimed.json()
        assert (edge["origin"], edge["scores"]) == ("claimed", {})
        assert edge["made"]["probes"]["images"] == 2
        assert edge["made"]["probes"]["distance"] < 1e-5
        served.http.post(f"{path}/deployments", json={"version": "twin"})
        assert routes(served, path, many["0"], k=2) == {("identity",)}

    def test_items_that_hold_both_or_can_be_encoded_by_both_are_compared(
        self, served: Any, many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, many)
        gallery = path.rpartition("/")[2]

        short = problem(
            add(served, "twin", "v1", "identity", verify={"gallery": gallery, "items": 61}),
            422,
            "nothing_to_verify_on",
            "/verify/items",
        )
        edge = add(served, "twin", "v1", "identity", verify={"gallery": gallery, "items": 30}).json()

        assert f"gallery '{gallery}' has 60 items" in short["detail"]
        assert edge["made"]["items"]["images"] == 30
        assert edge["made"]["items"]["distance"] < 1e-5
        assert edge["scores"]["cmc@1"]["value"] == 1.0

    def test_held_embeddings_serve_where_there_is_no_encoder(self, served: Any, more: dict[str, Version]) -> None:
        problem(add(served, "bare2", "bare", "identity"), 422, "nothing_to_verify_on", "/verify/gallery")
        path = served.gallery("bare")
        gallery = path.rpartition("/")[2]
        given = np.random.default_rng(0).normal(size=(6, 3))
        items = [{"id": str(n), "embedding": row.tolist()} for n, row in enumerate(given)]
        assert served.http.post(f"{path}/items", json={"items": items}).json()["failed"] == 0
        hold(served, "bare2", given)
        other = served.gallery("bare")
        assert served.http.post(f"{other}/items", json={"items": items}).json()["failed"] == 0
        spoilt = given.copy()
        spoilt[4] += 0.1
        hold(served, "bare2", spoilt, other)

        refused = problem(
            add(served, "bare2", "bare", "identity", verify={"gallery": other.rpartition("/")[2], "items": 6}),
            422,
            "not_identical",
            "/kind",
        )
        accepted = add(served, "bare2", "bare", "identity", verify={"gallery": gallery, "items": 6})

        assert "on '4'" in refused["detail"]
        assert accepted.status_code == 201
        assert set(accepted.json()["made"]) == {"tolerance", "items"}

    def test_another_model_is_refused_with_the_worst_image(self, served: Any, many: dict[str, bytes]) -> None:
        path = served.gallery("v1")
        served.ingest(path, many)
        gallery = path.rpartition("/")[2]

        by_probe = problem(add(served, "near", "v1", "identity"), 422, "not_identical", "/kind")
        by_items = problem(
            add(served, "near", "v1", "identity", verify={"gallery": gallery, "items": 60}), 422, "not_identical"
        )

        assert "on 'probe of " in by_probe["detail"]
        assert "at most 0.01 is legal" in by_items["detail"]
        assert edges(served, new="near") == []


class TestAdd:
    def test_the_folder_of_an_edge_is_added_and_served(
        self, served: Any, more: dict[str, Version], many: dict[str, bytes]
    ) -> None:
        path = served.gallery("bare")
        shift = np.eye(3)[[1, 2, 0]]
        items = [{"id": str(n), "embedding": row} for n, row in enumerate(np.eye(3).tolist())]
        served.http.post(f"{path}/items", json={"items": items})
        problem(served.http.post(f"{path}/deployments", json={"version": "bare2"}), 409, "no_route")

        added = send(served, bare_edge(shift), new="bare2", old="bare")

        assert added.status_code == 201, added.text
        assert (added.json()["origin"], added.json()["kind"]) == ("added", "matrix")
        served.deploy(path, "bare2")
        body = {"version": "bare2", "embeddings": np.eye(3).tolist(), "k": 1}
        found = [r["matches"][0]["id"] for r in served.http.post(f"{path}/query", json=body).json()["results"]]
        assert found == ["1", "2", "0"]
        problem(send(served, bare_edge(shift), new="bare2", old="bare"), 409, "edge_exists", "/kind")

        assert send(served, bare_edge(np.eye(3)), new="bare2", old="bare", replace="true").status_code == 201
        found = [r["matches"][0]["id"] for r in served.http.post(f"{path}/query", json=body).json()["results"]]
        assert found == ["0", "1", "2"]
        kept = served.runtime.settings.edges / "bare2" / "bare" / "matrix"
        assert len(list(kept.iterdir())) == 1

    def test_a_kind_without_files_is_added_as_json_unmeasured(self, served: Any, more: dict[str, Version]) -> None:
        added = add(served, "other", "near", "truncate")

        assert added.status_code == 201
        assert (added.json()["origin"], added.json()["scores"]) == ("added", {})
        assert "no measured scores" in added.json()["warning"]
        assert "verify it on items of a gallery" in added.json()["warning"]

    def test_a_truncation_is_measured_on_items_and_refused_if_it_finds_nothing(
        self, served: Any, more: dict[str, Version]
    ) -> None:
        given = np.random.default_rng(0).normal(size=(40, 3))
        items = [{"id": f"{n:02}", "embedding": row.tolist()} for n, row in enumerate(given)]
        related, unrelated = served.gallery("bare"), served.gallery("bare")
        for path, rows in ((related, given), (unrelated, given[::-1])):
            assert served.http.post(f"{path}/items", json={"items": items}).json()["failed"] == 0
            hold(served, "bare2", rows, path)

        for kind in ("truncate", "zero_pad"):
            asked = {"gallery": unrelated.rpartition("/")[2], "items": 40}
            refused = problem(add(served, "bare2", "bare", kind, verify=asked), 422, "finds_nothing", "/kind")
            assert "0% of the queries of 'bare2' find their own item" in refused["detail"]
            asked = {"gallery": related.rpartition("/")[2], "items": 40}
            made = add(served, "bare2", "bare", kind, verify=asked).json()
            assert (made["origin"], made["scores"]["cmc@1"]["value"], made["warning"]) == ("added", 1.0, None)
            assert made["made"]["items"]["images"] == 40

    def test_one_item_measures_nothing(self, served: Any, held: str) -> None:
        verify = {"gallery": held.rpartition("/")[2], "items": 1}

        problem(add(served, "other", "v1", "truncate", verify=verify), 422, "invalid_argument", "/verify/items")

    @pytest.mark.parametrize(("new", "told"), [("other", True), ("twin", False)])
    def test_versions_whose_probes_have_little_in_common_are_warned_of(
        self, served: Any, more: dict[str, Version], new: str, told: bool
    ) -> None:
        warning = add(served, new, "v1", "truncate").json()["warning"]

        assert ("have a cosine of" in warning) == told

    def test_one_that_is_removed_before_it_is_answered_was_added_all_the_same(
        self, served: Any, more: dict[str, Version], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refresh = changes._refresh

        def beside(*given: Any) -> None:
            monkeypatch.setattr(changes, "_refresh", refresh)
            remove(served, "other", "near", "truncate")
            refresh(*given)

        monkeypatch.setattr(changes, "_refresh", beside)

        added = add(served, "other", "near", "truncate")

        assert (added.status_code, added.json()["created"] > 0) == (201, True)
        assert [edge for edge in edges(served, new="other") if edge["kind"] == "truncate"] == []

    def test_several_edges_join_two_versions_and_the_best_measured_is_taken(
        self, served: Any, held: str, many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, {"a": many["0"]})
        served.http.post(f"{path}/deployments", json={"version": "other"})
        assert add(served, "other", "v1", "truncate").status_code == 201
        assert routes(served, path, many["0"], k=1) == {("truncate",)}

        assert fit(served, label="label").status_code == 201

        assert routes(served, path, many["0"], k=1) == {("matrix",)}
        assert remove(served, "other", "v1", "matrix").status_code == 200
        assert routes(served, path, many["0"], k=1) == {("truncate",)}


BAD_JSON: list[tuple[dict[str, Any], int, str, str]] = [
    ({"kind": "matrix"}, 422, "invalid_request", "/kind"),
    ({"kind": "dual"}, 422, "invalid_request", "/kind"),
    ({"new": "nobody"}, 404, "unknown_version", ""),
    ({"old": "nobody"}, 404, "unknown_version", ""),
    ({"old": "twin"}, 422, "invalid_argument", "/old"),
    ({"old": 3}, 422, "invalid_request", "/old"),
    ({"old": "v2"}, 422, "invalid_version_folder", "/edges/v2"),
    ({"old": "plain"}, 422, "invalid_version_folder", "/edges/plain"),
    ({"verify": {"items": 0}}, 422, "invalid_request", "/verify/items"),
    ({"verify": {"gallery": "nowhere"}}, 404, "unknown_gallery", ""),
    ({"kind": "truncate", "verify": {"gallery": "nowhere"}}, 404, "unknown_gallery", ""),
    ({"colour": 1}, 422, "invalid_request", "/colour"),
    ({"replace": "yes"}, 422, "invalid_request", "/replace"),
]


@pytest.mark.parametrize(("body", "status", "code", "pointer"), BAD_JSON)
def test_a_bad_edge_is_refused_by_name(served: Any, body: dict[str, Any], status: int, code: str, pointer: str) -> None:
    problem(add(served, **{"new": "twin", "old": "v1", "kind": "identity", **body}), status, code, pointer or None)

    assert edges(served, new="twin") == []


def test_a_body_that_is_no_edge_at_all_is_refused(served: Any) -> None:
    typed = {"content-type": "application/json"}
    problem(served.http.post("/edges", content=b"{", headers=typed), 422, "invalid_body")
    problem(served.http.post("/edges", content=b"[]", headers=typed), 422, "invalid_request")
    problem(
        served.http.post("/edges", content=b"x", headers={"content-type": "text/plain"}), 415, "unsupported_media_type"
    )


BAD_ARCHIVES: list[tuple[Callable[[], bytes], dict[str, str], int, str, str]] = [
    (lambda: bare_edge(EYE), {"new": ""}, 422, "invalid_body", "/new"),
    (lambda: bare_edge(EYE), {"old": "nobody"}, 404, "unknown_version", ""),
    (lambda: bare_edge(EYE), {"old": "bare2"}, 422, "invalid_argument", "/old"),
    (lambda: bare_edge(EYE), {"replace": "maybe"}, 422, "invalid_body", "/replace"),
    (lambda: bare_edge(EYE), {"colour": "red"}, 422, "invalid_body", "/colour"),
    (lambda: b"no zip", {}, 422, "invalid_version_folder", ""),
    (lambda: bare_edge(np.eye(4)), {}, 422, "invalid_version_folder", "/edges/bare/edge.npz"),
    (lambda: bare_edge(EYE, kind="magic"), {}, 422, "invalid_version_folder", "/kind"),
    (lambda: bare_edge(EYE, kind="onnx"), {}, 422, "invalid_version_folder", "/edge.onnx"),
    (lambda: bare_edge(EYE, scores={"cmc@1": 0.5}), {}, 422, "invalid_version_folder", "/scores/cmc@1"),
    (lambda: bare_edge(EYE, calibration={}), {}, 422, "invalid_version_folder", "/edges/bare/calibration"),
    (lambda: bare_edge(EYE, colour="red"), {}, 422, "invalid_version_folder", "/colour"),
    (lambda: bare_edge(np.full((3, 3), np.nan)), {}, 422, "invalid_version_folder", "/edges/bare/edge.npz"),
    (lambda: zipped({"edge.npz": b""}), {}, 422, "invalid_version_folder", "/edge.json"),
    (lambda: zipped({"../edge.json": b"{}"}), {}, 422, "invalid_version_folder", ""),
    (lambda: zipped({"edge.json": b'{"kind": "truncate"}', "x": b""}), {}, 422, "invalid_version_folder", "/x"),
    (lambda: zipped({"edge.json": b'{"kind": "identity"}'}), {}, 422, "invalid_argument", "/archive"),
]


@pytest.mark.parametrize(("archive", "fields", "status", "code", "pointer"), BAD_ARCHIVES)
def test_a_bad_archive_is_refused_by_file_and_field(
    served: Any, archive: Callable[[], bytes], fields: dict[str, str], status: int, code: str, pointer: str
) -> None:
    given = {"new": "bare2", "old": "bare", **fields}
    sent = {name: value for name, value in given.items() if value}

    problem(send(served, archive(), **sent), status, code, pointer or None)

    assert edges(served, new="bare2") == []
    assert list(served.runtime.settings.edges.glob(f"{INCOMING}*")) == []
