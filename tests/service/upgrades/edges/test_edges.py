"""Edges over HTTP: added, fitted, claimed, listed, removed, and followed by other processes."""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from index.errors import NoRoute
from index.version import Version
from service.registry.incoming import INCOMING
from service.runtime import Runtime, running
from service.store.tables import calibration
from staging.builders import image_bytes, make_image
from staging.served import problem
from staging.working import SteppedWorker


@pytest.fixture(scope="module")
def more(served: Any) -> dict[str, Version]:
    """`other` has no edges, `twin` is v1 by another name, `near` almost, `third` leads to v2 and v1, `fct` carries v1.

    `bare` and `bare2` take embeddings only.
    """
    made = [
        served.add("other", 5, seed=9),
        served.add("twin", 4),
        served.add("near", 4, drift=0.05),
        served.add("third", 4, seed=3, edges=[("v2", "matrix", 0.9), ("v1", "matrix", 0.7)]),
        served.add("fct", 4, seed=4, edges=[("v1", "forward")]),
        served.add("bare", 3, encoder=False),
        served.add("bare2", 3, encoder=False),
    ]
    return {version.name: version for version in made}


@pytest.fixture(autouse=True)
def restored(served: Any, more: dict[str, Version]) -> Iterator[None]:
    """Each test finds the edges that were registered, and none else."""
    kept = {key(edge) for edge in edges(served)}
    yield
    for edge in edges(served):
        if key(edge) not in kept:
            assert remove(served, *key(edge), force=True, reason="end of a test").status_code == 200


@pytest.fixture
def worker(served: Any) -> Iterator[SteppedWorker]:
    made = SteppedWorker(served.runtime.settings)
    yield made
    made.close()


@pytest.fixture(scope="module")
def held(served: Any, more: dict[str, Version], many: dict[str, bytes]) -> str:
    """A gallery of 60 labelled items that hold embeddings by v1 and by `other`."""
    path = served.gallery("v1")
    for label in range(5):
        some = {name: image for name, image in many.items() if int(name) % 5 == label}
        assert served.ingest(path, some, label=label).json()["failed"] == 0
    worker = SteppedWorker(served.runtime.settings)
    moved_to(served, worker, path, "other")
    worker.close()
    return str(path)


@pytest.fixture(scope="module")
def many() -> dict[str, bytes]:
    """Sixty images by name; number n is of class n % 5."""
    return {str(number): image_bytes(make_image(number % 5, number)) for number in range(60)}


def moved_to(served: Any, worker: SteppedWorker, path: str, version: str) -> None:
    served.deploy(path, version)
    started = served.http.post(f"{path}/backfills", json={"kind": "reencode"})
    assert started.status_code == 202, started.text
    while served.http.get(f"/backfills/{started.json()['id']}").json()["state"] == "running":
        worker.drain()


def edges(served: Any, **where: str) -> list[dict[str, Any]]:
    return list(served.http.get("/edges", params=where).json()["edges"])


def key(edge: dict[str, Any]) -> tuple[str, str, str]:
    return edge["new"], edge["old"], edge["kind"]


def fit(served: Any, **body: Any) -> Any:
    return served.http.post("/edges:fit", json={"new": "other", "old": "v1", "kind": "procrustes", **body})


def add(served: Any, new: str, old: str, kind: str, **body: Any) -> Any:
    return served.http.post("/edges", json={"new": new, "old": old, "kind": kind, **body})


def send(served: Any, archive: bytes, **fields: str) -> Any:
    return served.http.post("/edges", data=fields, files={"archive": ("edge.zip", archive)})


def remove(served: Any, new: str, old: str, kind: str, **query: Any) -> Any:
    return served.remove(f"/edges/{new}/{old}/{kind}", **query)


def zipped(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def folder_of(version: Version, old: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (version.folder / "edges" / old).iterdir()}


def bare_edge(weight: np.ndarray, **fields: Any) -> bytes:
    """The archive of a matrix edge between two versions of 3 numbers."""
    stream = io.BytesIO()
    np.savez(stream, weight=weight.astype(np.float32))
    score = {"value": 0.8, "low": 0.7, "high": 0.9}
    return zipped({"edge.json": json.dumps({"kind": "matrix", "scores": {"cmc@1": score}, **fields}).encode(),
                   "edge.npz": stream.getvalue()})  # fmt: skip


def routes(served: Any, path: str, image: bytes, **fields: Any) -> set[tuple[str, ...]]:
    """How the items that a query finds were reached."""
    answer = served.query(path, image, **fields).json()
    return {tuple(match["route"]) for match in answer["results"][0]["matches"]}


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


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
        assert "there are: truncate" in detail
        problem(served.http.get("/edges", params={"new": "nobody"}), 404, "unknown_version")


class TestFit:
    @pytest.mark.parametrize("kind", ["procrustes", "ridge", "low_rank", "slerp"])
    def test_a_fitted_edge_is_measured_calibrated_and_served(
        self, served: Any, held: str, many: dict[str, bytes], kind: str
    ) -> None:
        asking = served.gallery("v1")
        served.ingest(asking, {"a": many["0"], "b": many["1"]})
        served.http.post(f"{asking}/deployments", json={"version": "other"})
        assert routes(served, asking, many["0"], k=2) == {("dual",)}
        options = {"rank": 3} if kind == "low_rank" else {}

        fitted = fit(served, kind=kind, gallery=held.rpartition("/")[2], label="label", options=options)

        assert fitted.status_code == 201, fitted.text
        edge = fitted.json()
        served_as = "slerp" if kind == "slerp" else "matrix"
        assert key(edge) == ("other", "v1", served_as)
        assert (edge["origin"], edge["support"]) == ("fitted", 48)
        assert edge["warning"].startswith("48 pairs: fewer than 4000")
        assert set(edge["files"]) == {"edge.json", "edge.npz"}
        assert set(edge["calibration"]) == {"edge", "own", "mode"}
        for score in edge["scores"].values():
            assert 0 <= score["low"] <= score["value"] <= score["high"] <= 1
        assert edge["scores"]["cmc@1"]["value"] > 0.5
        assert (edge["made"]["held"], edge["made"]["fitted"], edge["made"]["queries"]) == (60, 48, 12)
        assert edge["made"]["old_old"]["cmc@1"]["value"] > 0.9
        assert routes(served, asking, many["0"], k=2) == {(served_as,)}
        assert edge == served.http.get(f"/edges/other/v1/{served_as}").json()
        assert key(edge) in {("other", e["old"], e["kind"]) for e in served.http.get("/versions/other").json()["edges"]}

    def test_without_a_label_an_item_must_find_itself(self, served: Any, held: str) -> None:
        edge = fit(served, kind="ridge", options={"strength": 1e-4}).json()

        assert edge["calibration"] is None
        assert edge["made"]["old_old"] is None
        assert edge["made"]["queries"] == edge["made"]["held"] // 5
        assert edge["made"]["options"] == {"strength": 1e-4}

    def test_the_same_seed_fits_the_same_edge(self, served: Any, held: str) -> None:
        gallery = held.rpartition("/")[2]
        first = fit(served, gallery=gallery, sample=30, seed=4).json()
        again = fit(served, gallery=gallery, sample=30, seed=4, replace=True).json()
        another = fit(served, gallery=gallery, sample=30, seed=5, replace=True).json()

        assert first["scores"] == again["scores"]
        assert first["files"] == again["files"]
        assert another["files"]["edge.npz"] != first["files"]["edge.npz"]
        assert len(list((served.runtime.settings.edges / "other" / "v1" / "matrix").iterdir())) == 1

    def test_too_few_pairs_are_refused_with_how_many_there_are_and_how_to_get_more(
        self, served: Any, held: str, pictures: list[bytes]
    ) -> None:
        empty = served.gallery("v1").rpartition("/")[2]
        refused = problem(fit(served, gallery=empty), 422, "too_few_pairs", "/gallery")
        assert refused["detail"].startswith(f"0 items of gallery '{empty}' hold embeddings by both 'other' and 'v1'")
        assert "reencode backfill" in refused["detail"]
        refused = problem(fit(served, label="colour"), 422, "too_few_pairs", "/label")
        assert "0 of them with metadata field 'colour'; a fit needs 20" in refused["detail"]
        assert edges(served, new="other") == []

    def test_what_a_forward_edge_made_is_no_evidence(
        self, served: Any, worker: SteppedWorker, many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, many)
        served.http.post(f"{path}/deployments", json={"version": "fct"})
        started = served.http.post(f"{path}/backfills", json={"kind": "transform"}).json()
        while served.http.get(f"/backfills/{started['id']}").json()["state"] == "running":
            worker.drain()

        problem(fit(served, new="fct", gallery=path.rpartition("/")[2]), 422, "too_few_pairs")


BAD_FITS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"new": "nobody"}, 404, "unknown_version", ""),
    ({"new": "v1"}, 422, "invalid_argument", "/old"),
    ({"gallery": "nowhere"}, 404, "unknown_gallery", ""),
    ({"kind": "magic"}, 422, "invalid_request", "/kind"),
    ({"kind": "slerp"}, 422, "invalid_argument", "/kind"),
    ({"kind": "slerp", "label": "label", "sample": 10_001}, 422, "invalid_argument", "/sample"),
    ({"options": {"rank": 3}}, 422, "invalid_argument", "/options/rank"),
    ({"kind": "low_rank", "options": {"rank": 2.5}}, 422, "invalid_argument", "/options/rank"),
    ({"kind": "low_rank", "options": {"rank": 99}}, 422, "invalid_argument", "/options/rank"),
    ({"kind": "ridge", "options": {"strength": 0}}, 422, "invalid_argument", "/options/strength"),
    ({"kind": "ridge", "options": {"strength": "much"}}, 422, "invalid_request", "/options/strength"),
    ({"sample": 3}, 422, "invalid_request", "/sample"),
    ({"label": ""}, 422, "invalid_request", "/label"),
    ({"seed": -1}, 422, "invalid_request", "/seed"),
    ({"colour": 1}, 422, "invalid_request", "/colour"),
]


@pytest.mark.parametrize(("body", "status", "code", "pointer"), BAD_FITS)
def test_a_bad_fit_is_refused_by_name(
    served: Any, held: str, body: dict[str, Any], status: int, code: str, pointer: str
) -> None:
    problem(fit(served, **body), status, code, pointer or None)

    assert edges(served, new="other") == []
    assert list(served.runtime.settings.edges.glob(f"{INCOMING}*")) == []


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


def hold(served: Any, version: str, vectors: np.ndarray, path: str | None = None) -> None:
    """Give the items of the newest gallery, or of `path`, embeddings by a second version."""
    from sqlalchemy import insert, select

    from service.store.tables import embedding, gallery, item

    runtime: Runtime = served.runtime
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("<f4")
    with runtime.database.write() as connection:
        newest = select(gallery.c.id).order_by(gallery.c.id.desc()).limit(1)
        named = select(gallery.c.id).where(gallery.c.name == (path or "").rpartition("/")[2])
        chosen = connection.execute(named if path else newest).scalar_one()
        rows = connection.execute(select(item.c.id, item.c.external_id).where(item.c.gallery_id == chosen)).all()
        same = {"version_id": runtime.registry.named(version).id, "origin": "supplied", "side": None}
        connection.execute(
            insert(embedding),
            [{**same, "item_id": row.id, "vector": unit[int(row.external_id)].tobytes()} for row in rows],
        )


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
        assert added.json()["warning"].startswith("nothing is measured")

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
    ({"kind": "truncate", "verify": {}}, 422, "invalid_argument", "/verify"),
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


EYE = np.eye(3)
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


def routes_with_maps(served: Any) -> list[list[list[str]]]:
    """The routes for which gates have fitted score maps."""
    with served.runtime.database.lookup() as connection:
        return list(connection.execute(select(calibration.c.route).order_by(calibration.c.id)).scalars())


class TestRemove:
    @pytest.fixture
    def needing(self, served: Any) -> str:
        """A gallery whose items are reached along one added edge only."""
        send(served, bare_edge(EYE), new="bare2", old="bare")
        path = served.gallery("bare")
        items = [{"id": str(n), "embedding": row} for n, row in enumerate(EYE.tolist())]
        served.http.post(f"{path}/items", json={"items": items})
        served.deploy(path, "bare2")
        return str(path)

    def test_one_that_items_need_is_kept_unless_forced_with_a_reason_and_then_answers_are_degraded(
        self, served: Any, needing: str
    ) -> None:
        body = {"version": "bare2", "embeddings": [[0, 1, 0]], "k": 1}
        gallery = needing.rpartition("/")[2]
        refused = problem(remove(served, "bare2", "bare", "matrix"), 409, "edge_needed", "/force")
        assert f"'{gallery}' (3 items)" in refused["detail"]
        problem(remove(served, "bare2", "bare", "matrix", force=True), 422, "invalid_argument", "/reason")
        served.http.post(f"{needing}/items", json={"items": [{"id": "new", "embedding": [1, 1, 1]}]})
        assert served.http.post(f"{needing}/query", json=body).json()["degraded"] == []

        removed = remove(served, "bare2", "bare", "matrix", force=True, reason="measured on the wrong data")

        assert removed.json()["removed"] is True
        (dependent,) = (d for d in removed.json()["dependents"] if d["gallery"] == gallery)
        assert dependent["lost"] == 3
        answer = served.http.post(f"{needing}/query", json=body).json()
        assert [m["id"] for m in answer["results"][0]["matches"]] == ["new"]
        assert [(d["version"], d["items"]) for d in answer["degraded"]] == [("bare", 3)]
        problem(served.http.post(f"{needing}/query", json={**body, "strict": True}), 409, "no_route")
        assert not list((served.runtime.settings.edges / "bare2" / "bare" / "matrix").iterdir())

    def test_a_dry_run_says_what_would_happen_and_changes_nothing(self, served: Any, needing: str) -> None:
        before = edges(served)

        told = remove(served, "bare2", "bare", "matrix", dry_run=True).json()

        assert told["removed"] is False
        assert told["blocked_by"] == []
        assert told["dependents"][-1] == {
            "gallery": needing.rpartition("/")[2],
            "version": "bare2",
            "routes": [{"version": "bare", "items": 3, "before": ["matrix"], "after": None}],
            "moved": 0,
            "lost": 3,
        }
        assert before == edges(served)

    def test_items_move_to_another_embedding_they_hold_and_back_when_the_edge_returns(
        self, served: Any, worker: SteppedWorker, more: dict[str, Version], many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, {"a": many["0"], "b": many["1"]})
        moved_to(served, worker, path, "v2")
        served.http.post(f"{path}/deployments", json={"version": "third"})
        assert served.http.get(path).json()["mix"] == {"v2": 2}

        told = remove(served, "third", "v2", "matrix", dry_run=True).json()
        assert served.http.get(path).json()["mix"] == {"v2": 2}
        removed = remove(served, "third", "v2", "matrix")

        assert removed.status_code == 200, removed.text
        assert told["dependents"] == removed.json()["dependents"]
        (dependent,) = (d for d in removed.json()["dependents"] if d["gallery"] == path.rpartition("/")[2])
        assert (dependent["moved"], dependent["lost"]) == (2, 0)
        assert dependent["routes"] == [{"version": "v2", "items": 2, "before": ["matrix"], "after": ["dual"]}]
        assert served.http.get(path).json()["mix"] == {"v1": 2}
        assert routes(served, path, many["0"], k=2) == {("matrix",)}

        back = send(served, zipped(folder_of(more["third"], "v2")), new="third", old="v2")

        assert back.status_code == 201, back.text
        assert served.http.get(path).json()["mix"] == {"v2": 2}

    @pytest.mark.parametrize("state", ["running", "paused"])
    def test_a_transform_that_is_not_over_keeps_its_item_edge_from_being_replaced(
        self, served: Any, more: dict[str, Version], many: dict[str, bytes], state: str
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, {"a": many["0"]})
        served.http.post(f"{path}/deployments", json={"version": "fct"})
        number = served.http.post(f"{path}/backfills", json={"kind": "transform"}).json()["id"]
        if state == "paused":
            served.http.post(f"/backfills/{number}/pause")
        again = zipped(folder_of(more["fct"], "v1"))
        before = edges(served)

        refused = problem(send(served, again, new="fct", old="v1", replace="true"), 409, "edge_in_use")

        assert f"backfill {number}" in refused["detail"]
        assert edges(served) == before
        assert served.http.post(f"/backfills/{number}/cancel").status_code == 200
        assert send(served, again, new="fct", old="v1", replace="true").status_code == 201

    def test_a_running_transform_keeps_its_item_edge_even_from_force(
        self, served: Any, more: dict[str, Version], many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, {"a": many["0"]})
        served.http.post(f"{path}/deployments", json={"version": "fct"})
        number = served.http.post(f"{path}/backfills", json={"kind": "transform"}).json()["id"]

        assert remove(served, "fct", "v1", "forward", dry_run=True).json()["blocked_by"] == [number]
        problem(remove(served, "fct", "v1", "forward", force=True, reason="now"), 409, "edge_in_use")

        assert served.http.post(f"/backfills/{number}/cancel").status_code == 200
        assert remove(served, "fct", "v1", "forward").status_code == 200
        problem(served.http.post(f"{path}/backfills", json={"kind": "transform"}), 409, "no_route")
        assert send(served, zipped(folder_of(more["fct"], "v1")), new="fct", old="v1").status_code == 201

    def test_maps_fitted_for_routes_along_it_go_with_it(
        self, served: Any, more: dict[str, Version], versions: dict[str, Version], many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        for label in range(5):
            some = {name: image for name, image in many.items() if int(name) % 5 == label}
            served.ingest(path, some, label=label)
        gate = served.http.post(f"{path}/gates", json={"version": "v2", "label": "label"})
        assert gate.status_code == 201, gate.text
        fitted = routes_with_maps(served)
        assert [["v2", "v1", "truncate"]] in fitted

        assert remove(served, "v2", "v1", "truncate").status_code == 200

        left = routes_with_maps(served)
        assert [route for route in fitted if ["v2", "v1", "truncate"] not in route] == left
        assert send(served, zipped(folder_of(versions["v2"], "v1")), new="v2", old="v1").status_code == 201

    def test_what_is_not_there_cannot_be_removed(self, served: Any) -> None:
        problem(remove(served, "v2", "v1", "magic"), 404, "unknown_edge")
        problem(remove(served, "v2", "nobody", "truncate"), 404, "unknown_edge")


class TestOtherProcesses:
    def test_they_follow_edges_that_come_change_and_go_without_a_restart(
        self, served: Any, many: dict[str, bytes], more: dict[str, Version]
    ) -> None:
        path = served.gallery("bare")
        items = [{"id": str(n), "embedding": row} for n, row in enumerate(EYE.tolist())]
        served.http.post(f"{path}/items", json={"items": items})
        with running(served.runtime.settings) as other:
            gallery = other.replica.find(path.rpartition("/")[2]).gallery

            def first() -> int | None:
                """Which item is nearest to the first axis; None: no route leads there."""
                try:
                    found = gallery.search("bare2", lambda _: np.eye(3, dtype=np.float32)[:1], 3).keys_QK[0]
                except NoRoute:
                    return None
                return sorted(found).index(found[0])

            assert first() is None
            send(served, bare_edge(EYE[[1, 2, 0]]), new="bare2", old="bare")
            wait_for(lambda: first() == 1)
            send(served, bare_edge(EYE), new="bare2", old="bare", replace="true")
            wait_for(lambda: first() == 0)
            gone = remove(served, "bare2", "bare", "matrix", force=True, reason="galleries of other tests need it")
            assert gone.status_code == 200
            wait_for(lambda: first() is None)

    def test_an_edge_whose_file_was_changed_is_listed_and_not_used(self, served: Any, more: dict[str, Version]) -> None:
        send(served, bare_edge(EYE), new="bare2", old="bare")
        (file,) = (served.runtime.settings.edges / "bare2" / "bare" / "matrix").glob("*/edge.npz")
        file.write_bytes(file.read_bytes()[:-1] + b"x")

        with running(served.runtime.settings) as other:
            declared = other.registry.edge(("bare2", "bare", "matrix"))
            assert declared is not None
            assert declared.problem == "edge.npz is not the file that was accepted"
            assert other.registry.route("bare2", "bare") is None
