from __future__ import annotations

from collections import Counter
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
from service.http import gates as routes
from service.store.embeddings import put_embeddings
from service.store.repository import gallery_named
from service.store.tables import embedding, gallery, item
from service.upgrades.gates import sides
from service.upgrades.gates.measuring import measure
from staging import steps
from staging.builders import add_text, make_image, make_version
from staging.steps import refusal


@pytest.fixture(scope="module")
def made(versions: dict[str, Version], tmp_path_factory: Any) -> dict[str, Version]:
    """Versions over `poor`, which sees one component and knows the rest as side-information."""
    root = tmp_path_factory.mktemp("made")
    poor = make_version(root / "poor", "poor", 1, side_dim=62)
    blind = make_version(root / "blind", "blind", 4, encoder=False, edges=[(versions["v1"], "identity")])
    return {
        "poor": poor,
        "wrong": make_version(root / "wrong", "wrong", 4, seed=5, edges=[(versions["v1"], "identity")]),
        "apart": make_version(root / "apart", "apart", 5, seed=9),
        "fct": make_version(root / "fct", "fct", 5, edges=[(poor, "forward")]),
        "chain": make_version(root / "chain", "chain", 6, drift=0.05, edges=[(versions["v2"], "identity")]),
        "blind": blind,
        "sighted": make_version(root / "sighted", "sighted", 4, edges=[(blind, "identity")]),
    }


@pytest.fixture(scope="module", autouse=True)
def registered(served: Any, made: dict[str, Version]) -> None:
    for version in made.values():
        assert served.register(version).status_code == 201


@pytest.fixture(scope="module")
def labelled(served: Any, pictures: list[bytes]) -> Callable[..., str]:
    """A gallery of twenty labelled pictures with this version current."""

    def fill(version: str = "v1") -> str:
        return served.filled(pictures, version, about=lambda n: {"digit": n % 5})

    return fill


def gate(served: Any, path: str, version: str, **fields: Any) -> Any:
    return steps.gate(served, path, version, **{"label": "digit", **fields})


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
        report = gate(served, labelled(), "v2").json()
        old, new = (vectors(versions[name], make_image) for name in ("v1", "v2"))

        assert (report["version"], report["current"], report["route"]) == ("v2", "v1", ["truncate"])
        assert report["old_old"]["value"] == pytest.approx(cmc(old, old, versions["v1"]))
        assert report["new_new"]["value"] == pytest.approx(cmc(new, new, versions["v2"]))
        assert report["new_old"]["value"] == pytest.approx(cmc(new[:, :4], old, versions["v1"]))
        assert (report["items"], report["queries"], report["unreadable"]) == (20, 20, 0)
        assert set(report["latency_ms"]) == {"v1", "v2"}
        assert (report["metric"], report["label"], report["sample"], report["seed"]) == ("cmc@1", "digit", 1000, 0)

    def test_a_chain_of_edges_is_followed(self, served: Any, labelled: Any) -> None:
        report = gate(served, labelled(), "chain").json()

        assert report["route"] == ["identity", "truncate"]
        assert report["new_old"]["value"] > 0.5

    def test_an_item_edge_is_measured_as_its_backfill_would_leave_the_items(
        self, served: Any, labelled: Any, made: dict[str, Version], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = labelled("poor")
        report = gate(served, path, "fct").json()
        monkeypatch.setattr(sides, "MAX_EMBEDDED", 0)
        sampled = gate(served, path, "fct", sample=8).json()
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
        before = gate(served, path, "fct").json()
        keys = select(item.c.id).join(gallery).where(gallery.c.name == path.rpartition("/")[2])
        with served.runtime.database.write() as connection:
            first, second = connection.execute(keys.limit(2)).scalars()
            connection.execute(update(embedding).where(embedding.c.item_id == first).values(side=None))
            connection.execute(update(embedding).where(embedding.c.item_id == second).values(vector=b"damaged"))

        after = gate(served, path, "fct").json()

        assert (after["items"], after["route"]) == (20, ["forward"])
        assert [after[side] for side in ("old_old", "new_old")] == [before[side] for side in ("old_old", "new_old")]

    def test_what_an_edge_made_counts_only_where_there_is_no_image(self, served: Any, labelled: Any) -> None:
        path = labelled()
        encoded = gate(served, path, "v2").json()
        v1 = served.runtime.registry.named("v1").id
        with served.runtime.database.write() as connection:
            gallery_id = gallery_named(connection, path.rpartition("/")[2]).id
            keys = list(connection.execute(select(item.c.id).where(item.c.gallery_id == gallery_id)).scalars())
            alike = np.tile(np.eye(4, dtype=np.float32)[0], (20, 1))
            put_embeddings(connection, gallery_id, v1, "transformed", keys, alike)

        again = gate(served, path, "v2").json()
        with served.runtime.database.write() as connection:
            connection.execute(update(item).where(item.c.id.in_(keys[10:])).values(blob=None))
        bare = gate(served, path, "v2").json()

        assert [again[side] for side in ("old_old", "new_old")] == [encoded[side] for side in ("old_old", "new_old")]
        assert (bare["items"], bare["queries"]) == (20, 10)
        assert bare["old_old"]["value"] < again["old_old"]["value"]

    def test_slerp_is_measured_with_the_queries_of_both_encoders(
        self, served: Any, labelled: Any, versions: dict[str, Version], tmp_path: Path
    ) -> None:
        between = make_version(tmp_path / "between", "between", 6, drift=0.3, edges=[(versions["v1"], "slerp")])
        assert served.register(between).status_code == 201
        report = gate(served, labelled(), "between").json()
        old, new = (vectors(version, make_image) for version in (versions["v1"], between))
        moved = load_transform(between.edges[0], between.card, versions["v1"].card)(new, old)

        assert report["route"] == ["slerp"]
        assert report["new_old"]["value"] == pytest.approx(cmc(moved, old, versions["v1"]))

    def test_by_dual_nothing_gets_better_or_worse(self, served: Any, labelled: Any) -> None:
        report = gate(served, labelled(), "apart").json()

        assert (report["route"], report["verdict"], report["negative_flips"]) == (["dual"], "warn", 0)
        assert report["new_old"] == report["old_old"]

    def test_a_version_that_makes_it_worse_is_refused_and_the_refusal_holds_at_deployment(
        self, served: Any, labelled: Any
    ) -> None:
        path = labelled()
        report = gate(served, path, "wrong").json()

        assert report["verdict"] == "refuse"
        assert report["difference"]["high"] < 0
        assert report["negative_flips"] > 0
        refused = served.http.post(f"{path}/deployments", json={"version": "wrong", "gate": report["id"]})
        assert refusal(refused) == (422, "gate_refused", ["/override"])

    def test_it_is_kept_and_found_again(self, served: Any, labelled: Any) -> None:
        path = labelled()
        report = gate(served, path, "v2", metric="mAP@1.0").json()

        assert report["metric"] == "mAP@1.0"
        assert served.http.get(f"{path}/gates/{report['id']}").json() == report
        assert refusal(served.http.get(f"{path}/gates/{report['id'] + 1}")) == (404, "unknown_gate", [])
        assert served.http.get(f"{labelled()}/gates/{report['id']}").status_code == 404

    def test_the_seed_chooses_the_sample(self, served: Any, labelled: Any) -> None:
        path = labelled()
        first, again, other = (gate(served, path, "v2", sample=10, seed=s, metric="mAP@1.0").json() for s in (1, 1, 2))

        assert (first["queries"], first["items"], first["seed"]) == (10, 20, 1)
        same = {"id": 0, "created": 0, "latency_ms": {}}
        assert {**first, **same} == {**again, **same}
        assert first["old_old"] != other["old_old"]


class TestSample:
    def test_sampled_queries_meet_the_whole_gallery_and_what_is_stored_is_not_embedded_again(
        self,
        served: Any,
        labelled: Any,
        versions: dict[str, Version],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        path, counted = labelled(), Counter[int]()
        whole, encode = gate(served, path, "v2", metric="mAP@1.0").json(), Encoder.encode_arrays
        monkeypatch.setattr(sides, "TIMED", 0)

        def counting(encoder: Encoder, pixels: Any) -> Any:
            made = encode(encoder, pixels)
            counted.update([made.vectors.shape[1]] * len(pixels))
            return made

        monkeypatch.setattr(Encoder, "encode_arrays", counting)
        monkeypatch.setattr(sides, "MAX_EMBEDDED", 0)

        report = gate(served, path, "v2", sample=8, metric="mAP@1.0").json()

        assert (report["queries"], report["items"], report["whole"], report["exhaustive"]) == (8, 20, True, False)
        assert (report["new_new_items"], report["gap_closed"]) == (8, None)
        assert counted == {versions["v2"].card.dim: 8}
        assert (whole["queries"], whole["items"], whole["whole"], whole["exhaustive"]) == (20, 20, True, True)
        assert whole["new_new_items"] == 20
        # Each query ranks all twenty: the mean over drawn ones is near that over all, not that of eight items.
        spread = whole["old_old"]["high"] - whole["old_old"]["low"]
        assert abs(report["old_old"]["value"] - whole["old_old"]["value"]) < spread

    @pytest.mark.parametrize(
        ("pairs", "embedded", "current", "items"), [(80, 8, "v1", 10), (10**8, 8, "v2", 8), (10**8, 12, "v2", 12)]
    )
    def test_what_is_not_affordable_is_sampled_and_said(
        self,
        served: Any,
        labelled: Any,
        monkeypatch: pytest.MonkeyPatch,
        pairs: int,
        embedded: int,
        current: str,
        items: int,
    ) -> None:
        """Too many pairs to compare; or a current version that has embedded none of the items itself."""
        path = labelled()
        served.deploy(path, "v2")
        new = "chain" if current == "v2" else "v2"
        if current == "v1":
            served.http.post(f"{path}/rollback")
        monkeypatch.setattr(sides, "MAX_PAIRS", pairs)
        monkeypatch.setattr(sides, "MAX_EMBEDDED", embedded)

        report = gate(served, path, new, sample=8).json()

        assert (report["current"], report["items"], report["whole"]) == (current, items, False)
        assert report["new_new_items"] == embedded

    def test_slices_are_those_of_the_queries(self, served: Any, pictures: list[bytes]) -> None:
        path = served.filled(pictures, about=lambda n: {"digit": n % 5, "half": n // 10})

        report = gate(served, path, "v2", sample=15, slice="half").json()

        assert (report["items"], sum(part["queries"] for part in report["slices"])) == (20, 15)

    def test_what_one_version_cannot_embed_is_left_out_where_both_rank_the_items(
        self, served: Any, labelled: Any, pictures: list[bytes]
    ) -> None:
        path = labelled()
        supplied = [{"id": "old", "metadata": {"digit": 1}, "embedding": [1, 0, 0, 0]}]
        assert served.http.post(f"{path}/items", json={"items": supplied}).json()["failed"] == 0
        served.deploy(path, "v2")
        supplied = [{"id": "new", "metadata": {"digit": 1}, "embedding": [1, 0, 0, 0, 0, 0]}]
        assert served.http.post(f"{path}/items", json={"items": supplied}).json()["failed"] == 0
        served.http.post(f"{path}/rollback")

        reports = [gate(served, path, "v2", label=label).json() for label in (None, "digit")]

        assert [(report["items"], report["unreadable"]) for report in reports] == [(20, 0), (21, 0)]

    def test_images_are_items_but_no_queries_of_a_version_that_embeds_texts(
        self, served: Any, pictures: list[bytes], tmp_path: Path
    ) -> None:
        words = {"north": np.eye(4)[0], "east": np.eye(4)[1]}
        both = add_text(make_version(tmp_path / "both", "both", 4), words)
        told = add_text(make_version(tmp_path / "told", "told", 4, encoder=False, edges=[(both, "identity")]), words)
        for version in (both, told):
            assert served.register(version).status_code == 201
        path = served.filled(pictures, "both", about=lambda n: {"digit": n % 5})
        texts = [{"id": f"t{n}", "text": "north", "metadata": {"digit": 0}} for n in range(3)]
        assert served.http.post(f"{path}/items", json={"items": texts}).json()["failed"] == 0

        report = gate(served, path, "told").json()

        assert (report["queries"], report["items"], report["new_new_items"]) == (3, 23, 3)

    def test_where_a_version_has_no_encoder_items_with_images_are_measured_by_their_embeddings(
        self, served: Any, labelled: Any
    ) -> None:
        path = labelled()
        held = [{"id": f"i{n}", "embedding": [1.0, n, 0, 0]} for n in range(12)]
        sent = served.http.put(f"{path}/items:embeddings", json={"version": "blind", "items": held})
        assert sent.json()["failed"] == 0

        reports = [gate(served, path, "blind", label=label).json() for label in (None, "digit")]
        served.deploy(path, "blind", override="only its gates are of interest")
        back = [gate(served, path, "sighted", label=label).json() for label in (None, "digit")]

        # Eight items hold no embedding by it: they are on the gallery side of queries that need no own ranking.
        assert [(report["queries"], report["items"]) for report in reports] == [(12, 12), (12, 20)]
        assert [(report["queries"], report["items"]) for report in back] == [(12, 12), (12, 12)]

    def test_items_without_image_or_label_deleted_and_unreadable_ones_are_left_out(
        self, served: Any, labelled: Any, pictures: list[bytes]
    ) -> None:
        path = labelled()
        served.ingest(path, {"unlabelled": pictures[0]})
        served.http.post(
            f"{path}/items", json={"items": [{"id": "e", "metadata": {"digit": 1}, "embedding": [1, 0, 0, 0]}]}
        )
        served.http.delete(f"{path}/items/i0")
        with served.runtime.database.write() as connection:
            one = select(item.c.blob, item.c.id).where(item.c.external_id == "i1").order_by(item.c.id.desc())
            blob, key = connection.execute(one).first()
            connection.execute(update(item).where(item.c.id == key).values(blob="gone"))
        served.runtime.blobs.remove([blob])

        report = gate(served, path, "v2").json()

        # What holds an embedding by v1 is found, whether or not it has an image that can ask.
        assert (report["queries"], report["items"], report["unreadable"], report["unlabelled"]) == (18, 20, 1, 1)

    @pytest.mark.parametrize("labels", [[1, "1", True, 1, "1", True], [1, 2, {"n": [0]}, 1.0, 2.0, {"n": [-0.0]}]])
    def test_labels_of_any_json_type_are_told_apart_by_value(
        self, served: Any, pictures: list[bytes], labels: list[Any]
    ) -> None:
        path = served.gallery("v1")
        items = [{"id": str(n), "metadata": {"digit": label}, "image": str(n)} for n, label in enumerate(labels)]
        served.post_items(path, items, [(str(n), pictures[n % 3]) for n in range(6)])

        report = gate(served, path, "v2").json()

        assert (report["queries"], report["old_old"]["value"]) == (6, 1.0)

    def test_labels_that_nobody_shares_are_refused(self, served: Any, labelled: Any, pictures: list[bytes]) -> None:
        path = labelled()
        items = [{"id": str(n), "metadata": {"name": n}, "image": str(n)} for n in range(3)]
        served.post_items(path, items, [(str(n), pictures[n]) for n in range(3)])

        assert refusal(gate(served, path, "v2", label="name")) == (422, "invalid_argument", ["/label"])
        assert refusal(gate(served, path, "v2", label="colour")) == (422, "invalid_argument", ["/label"])
        assert refusal(gate(served, served.gallery("v1"), "v2", label=None)) == (422, "invalid_argument", ["/label"])

    def test_when_no_image_can_be_read_the_label_is_refused(self, served: Any, labelled: Any) -> None:
        path = labelled()
        with served.runtime.database.write() as connection:
            mine = select(item.c.id).order_by(item.c.id.desc()).limit(20)
            connection.execute(update(item).where(item.c.id.in_(mine)).values(blob="gone"))

        assert refusal(gate(served, path, "v2")) == (422, "invalid_argument", ["/label"])
        assert refusal(gate(served, path, "v2", label=None)) == (422, "invalid_argument", ["/label"])


class TestRefused:
    def test_there_must_be_a_current_version_to_compare_with(self, served: Any) -> None:
        assert refusal(gate(served, served.gallery(None), "v2"))[:2] == (409, "no_current_version")

    def test_a_version_without_an_encoder_needs_embeddings(self, served: Any, labelled: Any) -> None:
        refused = gate(served, labelled(), "blind")

        assert refusal(refused)[:2] == (409, "no_encoder")
        needed = "two items with an embedding by 'blind' and metadata field 'digit'; the gallery has 0"
        assert refused.json()["detail"] == f"version 'blind' has no encoder: a measurement requires {needed}"

    def test_the_current_version_is_not_compared_with_itself(self, served: Any, labelled: Any) -> None:
        assert refusal(gate(served, labelled(), "v1")) == (422, "invalid_argument", ["/version"])

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
        assert refusal(gate(served, labelled(), "v2", **fields)) == (422, "invalid_request", [pointer])

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
        assert refusal(gate(served, path, "v2", **fields)) == (422, "invalid_argument", [pointer])
        assert gate(served, path, "v2", **{**fields, pointer[1:]: default}).status_code == 201

    def test_an_unknown_version_or_gallery_is_not_found(self, served: Any, labelled: Any) -> None:
        assert refusal(gate(served, labelled(), "v9"))[:2] == (404, "unknown_version")
        assert refusal(gate(served, "/galleries/nowhere", "v2"))[:2] == (404, "unknown_gallery")

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
