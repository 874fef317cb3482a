"""Edges fitted on stored items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.evaluation.domain import fit_domain
from index.incoming import INCOMING
from service.store.galleries.random_items import RandomItems
from staging.api.edges import edges, fit, fit_file, key, moved_to, npz, routes, zipped
from staging.api.served import problem
from staging.inputs.builders import image_bytes, make_image, make_version
from staging.states.working import SteppedWorker


class TestFit:
    @pytest.mark.parametrize("kind", ["procrustes", "ridge", "low_rank", "slerp", "auto"])
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
        served_as = "slerp" if edge["made"]["fit"] == "slerp" else "matrix"
        assert key(edge) == ("other", "v1", served_as)
        assert (edge["origin"], edge["support"]) == ("fitted", 48)
        assert edge["warning"].startswith("48 pairs: fewer than 4000")
        assert set(edge["files"]) == {"edge.json", "edge.npz", "domain.npz"}
        assert set(edge["calibration"]) == {"edge", "own", "mode"}
        for score in edge["scores"].values():
            assert 0 <= score["low"] <= score["value"] <= score["high"] <= 1
        assert edge["scores"]["cmc@1"]["value"] > 0.5
        assert (edge["made"]["held"], edge["made"]["fitted"], edge["made"]["queries"]) == (60, 48, 12)
        assert edge["made"]["old_old"]["cmc@1"]["value"] > 0.9
        curve = edge["made"]["curve"]
        assert [point["pairs"] for point in curve] == [12, 24, 48]
        assert curve[-1]["cmc@1"] == edge["scores"]["cmc@1"]
        assert len(edge["made"]["advice"]) == (3 if kind == "auto" else 2)
        if kind == "auto":
            tried = edge["made"]["tried"]
            assert set(tried) == {"procrustes", "ridge", "low_rank", "slerp"}
            assert tried[edge["made"]["fit"]]["cmc@1"]["value"] == max(t["cmc@1"]["value"] for t in tried.values())
            assert edge["made"]["left_out"] == {}
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
        assert refused["detail"].startswith(f"0 items of gallery '{empty}' have embeddings by both 'other' and 'v1'")
        assert "reencode backfill" in refused["detail"]
        refused = problem(fit(served, label="colour"), 422, "too_few_pairs", "/label")
        assert "0 of them with metadata field 'colour'; a fit requires 20" in refused["detail"]
        assert edges(served, new="other") == []

    def test_a_label_that_all_items_share_is_refused(
        self, served: Any, worker: SteppedWorker, many: dict[str, bytes]
    ) -> None:
        path = served.gallery("v1")
        served.ingest(path, many, kind="shoe")
        moved_to(served, worker, path, "other")

        refused = problem(fit(served, gallery=path.rpartition("/")[2], label="kind"), 422, "invalid_argument", "/label")

        assert "the 60 items with metadata field 'kind' hold labels of only one class, " in refused["detail"]

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


def test_a_label_that_no_item_has_is_looked_for_in_few_passes(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = served.gallery("v1")
    pictures = [image_bytes(make_image(n % 5, n)) for n in range(50)]
    assert served.ingest(path, {str(n): picture for n, picture in enumerate(pictures)}).json()["failed"] == 0
    passes, first = [], RandomItems.first

    def counted(items: RandomItems, count: int) -> list[int]:
        passes.append(count)
        return first(items, count)

    monkeypatch.setattr(RandomItems, "first", counted)

    problem(fit(served, gallery=path.rpartition("/")[2], label="typo", embed=1), 422, "too_few_pairs")

    assert 0 < len(passes) <= 8


def drawn(count: int = 100, **change: Any) -> dict[str, Any]:
    """Pairs of `other` (5 numbers) and v1 (4), of which None leaves an array out."""
    new = np.random.default_rng(0).standard_normal((count, 5))
    arrays = {"new": new, "old": new[:, :4].astype("<f4"), "labels": np.arange(count) % 7, **change}
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize("labels", [None, np.arange(100) % 7, np.array(["a", "beta"] * 50)])
def test_pairs_of_a_file_are_fitted_on_and_measured_as_stored_ones_are(served: Any, labels: Any) -> None:
    fitted = fit_file(served, drawn(labels=labels), kind="auto", seed="3", options="{}")

    assert fitted.status_code == 201, fitted.text
    edge = fitted.json()
    made = edge["made"]
    assert (edge["support"], made["held"], made["queries"], made["source"], made["seed"]) == (80, 100, 20, "file", 3)
    assert (edge["calibration"] is None) is (labels is None)
    assert "slerp" in made["left_out" if labels is None else "tried"]
    problem(fit_file(served, drawn(), kind="auto"), 409, "edge_exists", "/kind")
    assert fit_file(served, drawn(), replace="true", options='{"strength": 0.5}').json()["made"]["fit"] == "ridge"


NAN = np.full((100, 4), np.nan)
BAD_FILES: list[tuple[Any, dict[str, str], str]] = [
    (b"no archive", {}, "/pairs"),
    (npz(**drawn())[:-40], {}, "/pairs"),
    (npz(**drawn())[:200] + bytes(9) + npz(**drawn())[209:], {}, "/pairs"),
    (zipped({"new.npy": b"x", "old.npy": b""}), {}, "/pairs/new"),
    (drawn(new=None), {}, "/pairs/new"),
    (drawn(old=None), {}, "/pairs/old"),
    (drawn(more=np.eye(2)), {}, "/pairs"),
    (drawn(new=np.ones((100, 6))), {}, "/pairs"),
    (drawn(old=np.ones((99, 4))), {}, "/pairs"),
    (drawn(19), {}, "/pairs"),
    (drawn(old=NAN), {}, "/pairs/old/0"),
    (drawn(new=np.zeros((100, 5))), {}, "/pairs/new/0"),
    (drawn(new=np.ones(100)), {}, "/pairs/new"),
    (drawn(labels=np.arange(99)), {}, "/pairs/labels"),
    (drawn(labels=np.arange(100)), {}, "/pairs/labels"),
    (drawn(labels=np.arange(100) / 3), {}, "/pairs/labels"),
    (drawn(labels=np.array([{}] * 100, object)), {}, "/pairs/labels"),
    (drawn(), {"gallery": "g"}, "/gallery"),
    (drawn(), {"seed": "x"}, "/seed"),
    (drawn(), {"seed": "-1"}, "/seed"),
    (drawn(), {"replace": '"true"'}, "/replace"),
    (drawn(), {"kind": "magic"}, "/kind"),
    (drawn(labels=None), {"kind": "slerp"}, "/kind"),
]


@pytest.mark.parametrize(("file", "fields", "pointer"), BAD_FILES)
def test_a_bad_file_of_pairs_is_refused_by_name(served: Any, file: Any, fields: dict[str, str], pointer: str) -> None:
    refused = fit_file(served, file, **fields)

    assert refused.status_code in {400, 422}, refused.text
    assert problem(refused, refused.status_code, refused.json()["code"], pointer)
    assert edges(served, new="other") == []


def test_more_pairs_than_are_allowed_are_refused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = npz(**drawn(40_000, new=np.zeros((40_000, 5))))
    problem(fit_file(served, small), 413, "body_too_large", "/pairs")
    monkeypatch.setattr("service.upgrades.edges.fitting.MAX_PAIRS", 99)
    assert "at most 99" in problem(fit_file(served, drawn()), 422, "invalid_argument", "/pairs")["detail"]


BAD_FITS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"new": "nobody"}, 404, "unknown_version", ""),
    ({"new": "v1"}, 422, "invalid_argument", "/old"),
    ({"gallery": "nowhere"}, 404, "unknown_gallery", ""),
    ({"kind": "magic"}, 422, "invalid_request", "/kind"),
    ({"kind": "slerp"}, 422, "invalid_argument", "/kind"),
    ({"kind": "slerp", "label": "label", "sample": 10_001}, 422, "invalid_argument", "/sample"),
    ({"kind": "auto", "options": {"rank": 3}}, 422, "invalid_argument", "/options/rank"),
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


def test_a_fit_of_a_version_whose_name_another_one_got_meanwhile_is_refused(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (make_version(tmp_path / str(n), "trained", 5, seed=n, encoder=False) for n in (1, 2))
    assert served.register(first).status_code == 201

    def fit_and_retrain(*args: Any) -> Any:
        assert served.remove("/versions/trained").status_code == 204
        assert served.register(second).status_code == 201
        return fit_domain(*args)

    with monkeypatch.context() as patch:
        patch.setattr("service.upgrades.edges.fitting.fit_domain", fit_and_retrain)
        refused = fit_file(served, drawn(), new="trained")

    problem(refused, 409, "deleted_meanwhile")
    assert edges(served, new="trained") == []
    assert fit_file(served, drawn(), new="trained").status_code == 201
    assert served.remove("/versions/trained").status_code == 204
