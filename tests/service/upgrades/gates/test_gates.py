from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from index.edges.transform import load_transform
from index.encoders.encoder import Encoder
from index.evaluation.metrics import retrieval
from index.space import space_from_json
from index.version import Version
from service.http.upgrades import gates as routes
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import gallery_named
from service.store.tables import embedding, gallery, item
from service.upgrades.gates import sides
from service.upgrades.gates.measuring import measure
from staging.api.steps import gate, gate_by_digit, refusal
from staging.inputs.builders import add_text, make_image, make_version


def vectors(version: Version, make_image: Callable[..., Any]) -> np.ndarray:
    return Encoder(version).encode([make_image(n % 5, n) for n in range(20)]).vectors


def cmc(queries: np.ndarray, items: np.ndarray, space: Version) -> float:
    """CMC@1 by hand over the twenty pictures, each left out of its own ranking."""
    ranked = retrieval(
        queries,
        [n % 5 for n in range(20)],
        items,
        [n % 5 for n in range(20)],
        space_from_json(dict(space.card.space)),
        remove_self=range(20),
    )
    return ranked.cmc(1)


class TestReport:
    def test_new_old_goes_by_the_query_edge(self, served: Any, labelled: Any, versions: dict[str, Version]) -> None:
        report = gate_by_digit(served, labelled(), "v2").json()
        old, new = (vectors(versions[name], make_image) for name in ("v1", "v2"))

        assert (report["version"], report["current"], report["route"]) == ("v2", "v1", ["truncate"])
        assert report["old_old"]["value"] == pytest.approx(cmc(old, old, versions["v1"]))
        assert report["new_new"]["value"] == pytest.approx(cmc(new, new, versions["v2"]))
        assert report["new_old"]["value"] == pytest.approx(cmc(new[:, :4], old, versions["v1"]))
        assert (report["items"], report["queries"], report["unreadable"]) == (20, 20, 0)
        assert set(report["latency_ms"]) == {"v1", "v2"}
        assert (report["metric"], report["label"], report["sample"], report["seed"]) == ("cmc@1", "digit", 1000, 0)

    def test_a_chain_of_edges_is_followed(self, served: Any, labelled: Any) -> None:
        report = gate_by_digit(served, labelled(), "chain").json()

        assert report["route"] == ["identity", "truncate"]
        assert report["new_old"]["value"] > 0.5

    def test_an_item_edge_is_measured_as_its_backfill_would_leave_the_items(
        self, served: Any, labelled: Any, made: dict[str, Version], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = labelled("poor")
        report = gate_by_digit(served, path, "fct").json()
        monkeypatch.setattr(sides, "MAX_EMBEDDED", 0)
        sampled = gate_by_digit(served, path, "fct", sample=8).json()
        forward = load_transform(made["fct"].edges[0], made["fct"].card, made["poor"].card)
        given = Encoder(made["poor"]).encode([make_image(n % 5, n) for n in range(20)])
        moved = forward(given.vectors, given.side)

        assert report["route"] == ["forward"]
        expected = cmc(vectors(made["fct"], make_image), moved, made["fct"])
        assert report["new_old"]["value"] == pytest.approx(expected)
        assert report["new_old"]["value"] > report["old_old"]["value"]
        assert report["verdict"] == "pass"
        old_old, new_old, new_new = (report[side]["value"] for side in ("old_old", "new_old", "new_new"))
        assert report["gap_closed"] == pytest.approx((new_old - old_old) / (new_new - old_old))
        # M(new/new) over the items that the new version embeds says nothing of the gap over all.
        assert (sampled["new_new_items"], sampled["gap_closed"]) == (8, None)
        assert report["calibrations"] == 3

    def test_what_is_stored_without_side_information_or_damaged_is_computed_again(
        self, served: Any, labelled: Any
    ) -> None:
        path = labelled("poor")
        before = gate_by_digit(served, path, "fct").json()
        keys = select(item.c.id).join(gallery).where(gallery.c.name == path.rpartition("/")[2])
        with served.runtime.database.write() as connection:
            first, second = connection.execute(keys.limit(2)).scalars()
            connection.execute(update(embedding).where(embedding.c.item_id == first).values(side=None))
            connection.execute(update(embedding).where(embedding.c.item_id == second).values(vector=b"damaged"))

        after = gate_by_digit(served, path, "fct").json()

        assert (after["items"], after["route"]) == (20, ["forward"])
        assert [after[side] for side in ("old_old", "new_old")] == [before[side] for side in ("old_old", "new_old")]

    @pytest.mark.parametrize(("version", "route", "items"), [("fct", ["forward"], 20), ("two_edges", ["truncate"], 21)])
    def test_an_item_without_side_information_hinders_none(
        self, served: Any, labelled: Any, made: dict[str, Version], version: str, route: list[str], items: int
    ) -> None:
        path = labelled("poor")
        row = {"id": "supplied", "embedding": [1.0], "metadata": {"digit": 1}}
        assert served.http.post(f"{path}/items", json={"items": [row]}).json()["stored"] == 1

        report = gate_by_digit(served, path, version)

        assert report.status_code == 201, report.text
        assert (report.json()["route"], report.json()["items"]) == (route, items)

    def test_what_no_side_information_is_known_of_is_measured_by_the_route_that_serves_it(
        self, served: Any, pictures: list[bytes], tmp_path: Path
    ) -> None:
        words = {"north": np.eye(4)[0], "east": np.eye(4)[1]}
        old = add_text(make_version(tmp_path / "tells", "tells", 4, side_dim=3), words)
        new = make_version(tmp_path / "mover", "mover", 5, edges=[(old, "forward")])
        assert [served.register(version).status_code for version in (old, new)] == [201, 201]
        path = served.filled(pictures[:6], "tells", about=lambda n: {"digit": n % 2})
        text = {"id": "text", "text": "north", "metadata": {"digit": 0}}
        assert served.http.post(f"{path}/items", json={"items": [text]}).json()["stored"] == 1
        embeddings = {"tells": np.eye(4).tolist(), "mover": np.eye(5)[:4].tolist()}
        body = {"entries": [{"label": n % 2} for n in range(4)], "embeddings": embeddings}
        number = served.http.post(f"{path}/evaluations", json=body).json()["id"]

        over_items, over_set = gate_by_digit(served, path, "mover"), gate(served, path, "mover", evaluation=number)

        assert [one.status_code for one in (over_items, over_set)] == [201, 201], over_items.text + over_set.text
        assert (over_items.json()["route"], over_items.json()["items"]) == (["forward"], 6)
        assert (over_set.json()["route"], over_set.json()["items"]) == (["dual"], 4)

    def test_a_damaged_third_version_hinders_none(
        self, served: Any, made: dict[str, Version], pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = served.filled(pictures, "v1", "v2", about=lambda n: {"digit": n % 5})
        third = served.runtime.registry.named("v1")
        with monkeypatch.context() as patch:
            patch.setattr(third, "problem", "encoder.onnx changed")
            third.drop_idle(False, 0)

            assert gate_by_digit(served, path, "chain").status_code == 201

    def test_tar_is_measured_if_the_new_version_has_embedded_no_pair_of_one_label(
        self, served: Any, made: dict[str, Version]
    ) -> None:
        path, options = served.gallery("blind"), {"label": "person", "metric": "TAR@FAR"}
        rows = np.repeat(np.random.default_rng(0).normal(size=(15, 4)), 2, axis=0)
        items = [
            {"id": str(n), "metadata": {"person": n // 2}, "embedding": row} for n, row in enumerate(rows.tolist())
        ]
        served.http.post(f"{path}/items", json={"items": items})
        supplied = [{"id": item["id"], "embedding": item["embedding"]} for item in items]

        def report(some: Any) -> Any:
            put = served.http.put(f"{path}/items:embeddings", json={"version": "blind2", "items": some})
            assert put.json()["stored"] == len(some)
            return served.http.post(f"{path}/gates", json={"version": "blind2", **options}).json()

        of_each_one, of_all = report(supplied[::2]), report(supplied)

        assert of_each_one["new_new"] is None
        assert of_each_one["old_old"]["value"] == of_all["old_old"]["value"] == of_all["new_new"]["value"] == 1

    def test_what_an_edge_made_counts_only_where_there_is_no_image(self, served: Any, labelled: Any) -> None:
        path = labelled()
        encoded = gate_by_digit(served, path, "v2").json()
        v1 = served.runtime.registry.named("v1").id
        with served.runtime.database.write() as connection:
            gallery_id = gallery_named(connection, path.rpartition("/")[2]).id
            keys = list(connection.execute(select(item.c.id).where(item.c.gallery_id == gallery_id)).scalars())
            alike = np.tile(np.eye(4, dtype=np.float32)[0], (20, 1))
            put_embeddings(connection, gallery_id, v1, "transformed", keys, alike)

        again = gate_by_digit(served, path, "v2").json()
        with served.runtime.database.write() as connection:
            connection.execute(update(item).where(item.c.id.in_(keys[10:])).values(blob=None))
        bare = gate_by_digit(served, path, "v2").json()

        assert [again[side] for side in ("old_old", "new_old")] == [encoded[side] for side in ("old_old", "new_old")]
        assert (bare["items"], bare["queries"]) == (20, 10)
        assert bare["old_old"]["value"] < again["old_old"]["value"]

    def test_slerp_is_measured_with_the_queries_of_both_encoders(
        self, served: Any, labelled: Any, versions: dict[str, Version], tmp_path: Path
    ) -> None:
        between = make_version(tmp_path / "between", "between", 6, drift=0.3, edges=[(versions["v1"], "slerp")])
        assert served.register(between).status_code == 201
        report = gate_by_digit(served, labelled(), "between").json()
        old, new = (vectors(version, make_image) for version in (versions["v1"], between))
        moved = load_transform(between.edges[0], between.card, versions["v1"].card)(new, old)

        assert report["route"] == ["slerp"]
        assert report["new_old"]["value"] == pytest.approx(cmc(moved, old, versions["v1"]))

    def test_by_dual_nothing_gets_better_or_worse(self, served: Any, labelled: Any) -> None:
        report = gate_by_digit(served, labelled(), "apart").json()

        assert (report["route"], report["verdict"], report["negative_flips"]) == (["dual"], "warn", 0)
        assert report["new_old"] == report["old_old"]

    def test_a_version_that_makes_it_worse_is_refused_and_the_refusal_holds_at_deployment(
        self, served: Any, labelled: Any
    ) -> None:
        path = labelled()
        report = gate_by_digit(served, path, "wrong").json()

        assert report["verdict"] == "refuse"
        assert report["difference"]["high"] < 0
        assert report["negative_flips"] > 0
        refused = served.http.post(f"{path}/deployments", json={"version": "wrong", "gate": report["id"]})
        assert refusal(refused) == (422, "gate_refused", ["/override"])

    def test_it_is_kept_and_found_again(self, served: Any, labelled: Any) -> None:
        path = labelled()
        report = gate_by_digit(served, path, "v2", metric="mAP@1.0").json()

        assert report["metric"] == "mAP@1.0"
        assert served.http.get(f"{path}/gates/{report['id']}").json() == report
        assert refusal(served.http.get(f"{path}/gates/{report['id'] + 1}")) == (404, "unknown_gate", [])
        assert served.http.get(f"{labelled()}/gates/{report['id']}").status_code == 404

    def test_the_seed_chooses_the_sample(self, served: Any, labelled: Any) -> None:
        path = labelled()
        first, again, other = (
            gate_by_digit(served, path, "v2", sample=10, seed=s, metric="mAP@1.0").json() for s in (1, 1, 2)
        )

        assert (first["queries"], first["items"], first["seed"]) == (10, 20, 1)
        same = {"id": 0, "created": 0, "latency_ms": {}}
        assert {**first, **same} == {**again, **same}
        assert first["old_old"] != other["old_old"]

    def test_gates_are_listed(self, served: Any, labelled: Any) -> None:
        path = labelled()
        made = [gate_by_digit(served, path, "v2", seed=seed).json() for seed in (1, 2)]

        assert served.http.get(f"{path}/gates").json()["gates"] == made


class TestRefused:
    def test_there_must_be_a_current_version_to_compare_with(self, served: Any) -> None:
        assert refusal(gate_by_digit(served, served.gallery(None), "v2"))[:2] == (409, "no_current_version")

    def test_a_version_without_an_encoder_needs_embeddings(self, served: Any, labelled: Any) -> None:
        refused = gate_by_digit(served, labelled(), "blind")

        assert refusal(refused)[:2] == (409, "no_encoder")
        needed = "two items with an embedding by 'blind' and metadata field 'digit'; the gallery has 0"
        assert refused.json()["detail"] == f"version 'blind' has no encoder: a measurement requires {needed}"

    def test_the_current_version_is_not_compared_with_itself(self, served: Any, labelled: Any) -> None:
        assert refusal(gate_by_digit(served, labelled(), "v1")) == (422, "invalid_argument", ["/version"])

    @pytest.mark.parametrize(
        ("fields", "pointer"),
        [
            ({"metric": "recall"}, "/metric"),
            ({"sample": 1}, "/sample"),
            ({"sample": 10**9}, "/sample"),
            ({"seed": -1}, "/seed"),
            ({"label": ""}, "/label"),
            ({"extra": 1}, "/extra"),
        ],
    )
    def test_an_illegal_field_is_named(self, served: Any, labelled: Any, fields: dict[str, Any], pointer: str) -> None:
        assert refusal(gate_by_digit(served, labelled(), "v2", **fields)) == (422, "invalid_request", [pointer])

    @pytest.mark.parametrize(
        ("fields", "pointer"),
        [
            ({"k": 5}, "/k"),
            ({"far": 0.1, "metric": "mAP@1.0"}, "/far"),
            ({"k": 5, "metric": "TAR@FAR"}, "/k"),
            ({"far": 0.1, "label": None}, "/far"),
        ],
    )
    def test_an_option_that_the_metric_does_not_use_is_refused_unless_it_has_its_default(
        self, served: Any, labelled: Any, fields: dict[str, Any], pointer: str
    ) -> None:
        path, default = labelled(), {"/k": 10, "/far": 0.01}[pointer]
        assert refusal(gate_by_digit(served, path, "v2", **fields)) == (422, "invalid_argument", [pointer])
        assert gate_by_digit(served, path, "v2", **{**fields, pointer[1:]: default}).status_code == 201

    def test_an_unknown_version_or_gallery_is_not_found(self, served: Any, labelled: Any) -> None:
        assert refusal(gate_by_digit(served, labelled(), "v9"))[:2] == (404, "unknown_version")
        assert refusal(gate_by_digit(served, "/galleries/nowhere", "v2"))[:2] == (404, "unknown_gallery")

    @pytest.mark.parametrize("dry_run", [False, True])
    def test_a_gallery_that_was_made_anew_meanwhile_gets_no_report_of_the_old_one(
        self, served: Any, labelled: Any, monkeypatch: pytest.MonkeyPatch, dry_run: bool
    ) -> None:
        path = labelled()

        def slow(*given: Any) -> Any:
            report = measure(*given)
            assert served.remove(path).status_code == 204
            assert served.http.post("/galleries", json={"name": path.rpartition("/")[2]}).status_code == 201
            return report

        monkeypatch.setattr(routes, "measure", slow)

        answer = served.http.post(
            f"{path}/gates", json={"version": "v2", "label": "digit"}, params={"dry_run": dry_run}
        )

        assert refusal(answer)[:2] == (404, "unknown_gallery")
        assert served.http.get(f"{path}/gates").json() == {"gates": []}
