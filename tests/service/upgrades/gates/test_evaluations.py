"""Evaluation sets, and gates that measure on them: metrics, slices, and the calibrations that come of it."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select

from index.encoders.encoder import Encoder
from index.version import Version
from service.registry import stored_contents
from service.store.tables import calibration, evaluation_entry, gate_report
from service.upgrades.gates import samples
from staging.api.served import problem
from staging.api.steps import gate, refusal
from staging.inputs.builders import make_image


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    served.add("far", 5, seed=9)


@pytest.fixture
def path(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures, about=lambda n: {"digit": n % 5})


@pytest.fixture(scope="module")
def vectors(versions: dict[str, Version]) -> dict[str, list[list[float]]]:
    """What v1 and v2 make of the items' pictures."""
    images = [make_image(n % 5, n) for n in range(20)]
    return {v: Encoder(versions[v]).encode(images).vectors.tolist() for v in ("v1", "v2")}


def upload(served: Any, path: str, entries: Any, images: list[bytes], **params: Any) -> Any:
    data = {"entries": entries if isinstance(entries, str) else json.dumps(entries), "name": "set"}
    files = [("images", (f"{n}", image)) for n, image in enumerate(images)]
    return served.http.post(f"{path}/evaluations", data=data, files=files, params=params)


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def labelled(count: int) -> list[dict[str, Any]]:
    return [{"label": n % 5, "metadata": {"half": n < count / 2}, "image": str(n)} for n in range(count)]


def rows(served: Any, table: Any) -> int:
    with served.runtime.database.lookup() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


class TestSets:
    def test_images_are_kept_measured_on_and_deleted(self, served: Any, path: str, pictures: list[bytes]) -> None:
        made = upload(served, path, labelled(20), pictures)

        assert made.status_code == 201
        number = made.json()["id"]
        assert {k: made.json()[k] for k in ("name", "kind", "size", "labelled", "versions")} == {
            "name": "set",
            "kind": "images",
            "size": 20,
            "labelled": 20,
            "versions": [],
        }
        assert served.http.get(f"{path}/evaluations/{number}").json() == made.json()
        assert served.http.get(f"{path}/evaluations").json()["evaluations"] == [made.json()]
        on_set, on_items = gate(served, path, evaluation=number).json(), gate(served, path, label="digit").json()
        assert (on_set["evaluation"], on_set["items"], on_set["labelled"]) == (number, 20, True)
        assert on_set["unreadable"] == 0
        assert on_set["old_old"]["value"] == pytest.approx(on_items["old_old"]["value"])
        assert set(on_set["latency_ms"]) == {"v1", "v2"}
        assert on_set["latency_ms"]["v1"]["p50"] <= on_set["latency_ms"]["v1"]["p99"]

        assert served.remove(f"{path}/evaluations/{number}").status_code == 204
        assert refusal(gate(served, path, evaluation=number)) == (404, "unknown_evaluation", [])
        assert served.http.get(f"{path}/gates/{on_set['id']}").json()["evaluation"] == number

    def test_latencies_are_those_of_the_two_versions(self, served: Any, path: str, pictures: list[bytes]) -> None:
        served.deploy(path, "v2")
        number = upload(served, path, labelled(20), pictures).json()["id"]

        assert set(gate(served, path, "far", evaluation=number).json()["latency_ms"]) == {"v2", "far"}

    def test_embeddings_are_measured_like_the_images_they_came_from(
        self, served: Any, path: str, pictures: list[bytes], vectors: Any
    ) -> None:
        entries = [{key: e[key] for key in ("label", "metadata")} for e in labelled(20)]

        made = served.http.post(f"{path}/evaluations", json={"entries": entries, "embeddings": vectors})
        by_embeddings = gate(served, path, evaluation=made.json()["id"], metric="mAP@1.0").json()
        by_images = gate(served, path, label="digit", metric="mAP@1.0").json()

        assert (made.status_code, made.json()["versions"]) == (201, ["v1", "v2"])
        for field in ("old_old", "new_old", "new_new"):
            assert by_embeddings[field]["value"] == pytest.approx(by_images[field]["value"])
        assert by_embeddings["latency_ms"] == {}
        refused = gate(served, path, "far", evaluation=made.json()["id"])
        assert refusal(refused) == (422, "invalid_argument", ["/evaluation"])
        assert "'far'" in refused.json()["detail"]

    @pytest.mark.parametrize("kind", ["images", "embeddings"])
    def test_a_metadata_field_can_be_the_label(
        self, served: Any, path: str, pictures: list[bytes], vectors: Any, kind: str
    ) -> None:
        own = [{"label": 0, "metadata": {"of": {"digit": n % 5}}, "image": str(n)} for n in range(20)]
        entries = [{key: e[key] for key in ("label", "metadata")} for e in own]
        made = (
            upload(served, path, own, pictures)
            if kind == "images"
            else served.http.post(f"{path}/evaluations", json={"entries": entries, "embeddings": vectors})
        )

        report = gate(served, path, evaluation=made.json()["id"], label="of.digit", metric="mAP@1.0").json()

        expected = gate(served, path, label="digit", metric="mAP@1.0").json()
        assert (report["label"], report["evaluation"]) == ("of.digit", made.json()["id"])
        assert report["old_old"]["value"] == pytest.approx(expected["old_old"]["value"])

    def test_labels_beyond_64_bits_are_told_apart(self, served: Any, path: str, pictures: list[bytes]) -> None:
        large = [{**entry, "label": 2**64 + entry["label"]} for entry in labelled(20)]
        sets = [upload(served, path, entries, pictures).json()["id"] for entries in (large, labelled(20))]

        beyond, within = (gate(served, path, evaluation=number).json() for number in sets)

        assert (beyond["old_old"], beyond["new_old"]) == (within["old_old"], within["new_old"])
        with served.runtime.database.lookup() as connection:
            assert [entry.label for entry in samples.read_entries(connection, sets[0], None)][:2] == [
                "18446744073709551616",
                "18446744073709551617",
            ]

    def test_one_that_is_deleted_while_a_gate_reads_it_gets_no_report_on_what_was_left(
        self, served: Any, path: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        number, whole = upload(served, path, labelled(20), pictures).json()["id"], stored_contents.embed

        def slow(*given: Any) -> Any:
            served.remove(f"{path}/evaluations/{number}")
            return whole(*given)

        monkeypatch.setattr(samples, "BATCH", 10)
        monkeypatch.setattr(samples, "embed_inputs", slow)

        assert refusal(gate(served, path, evaluation=number)) == (404, "unknown_evaluation", [])
        assert served.http.get(f"{path}/gates").json() == {"gates": []}

    def test_a_rehearsal_stores_nothing(self, served: Any, path: str, pictures: list[bytes]) -> None:
        before = [rows(served, table) for table in (evaluation_entry, gate_report, calibration)]

        set_, report = (
            upload(served, path, labelled(20), pictures, dry_run=True),
            gate(served, path, label="digit", params={"dry_run": True}),
        )

        assert (set_.status_code, set_.json()["id"], set_.json()["size"]) == (200, None, 20)
        assert (report.status_code, report.json()["id"]) == (200, None)
        assert before == [rows(served, table) for table in (evaluation_entry, gate_report, calibration)]

    @pytest.mark.parametrize(
        ("entries", "pointer"),
        [
            ("[", "/entries"),
            ([], "/entries"),
            ([{"label": 1, "image": "0"}], "/entries"),
            ([{"image": "0"}, {"image": "9"}], "/entries/1/image"),
            ([{"image": "0"}, {"image": ["1"]}], "/entries/1/image"),
            ([{"image": "0"}, {"image": "2"}], "/entries/1/image"),
            ([{"image": "0"}, {"image": "1", "metadata": 3}], "/entries/1/metadata"),
            ([{"image": "0"}, {"image": "1", "id": 3}], "/entries/1/id"),
            ([{"image": "0"}, 3], "/entries/1"),
            ('[{"image": "0", "label": 1e999}, {"image": "1"}]', "/entries/0/label"),
            ([{"image": "0"}, {"image": "1", "label": deep(33)}], "/entries/1/label"),
            ([{"image": "0"}, {"image": "1", "metadata": {"a": deep(32)}}], "/entries/1/metadata"),
            ([{"image": "0"}, {"image": "1", "metadata": {"a": "x" * (64 << 10)}}], "/entries/1/metadata"),
        ],
    )
    def test_a_bad_entry_is_named_and_refuses_the_set(
        self, served: Any, path: str, pictures: list[bytes], entries: Any, pointer: str
    ) -> None:

        refused = upload(served, path, entries, [*pictures[:2], b"no image"])

        assert refused.status_code == 422, refused.text
        assert [error["pointer"] for error in refused.json()["errors"]] == [pointer]
        assert served.http.get(f"{path}/evaluations").json() == {"evaluations": []}

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({"embeddings": {"v1": [[1, 0, 0, 0]] * 2}}, "/entries"),
            ({"entries": [{}, {}]}, "/embeddings"),
            ({"entries": [{}, {}], "embeddings": {}}, "/embeddings"),
            ({"entries": [{}, {}], "embeddings": {"v9": []}}, "/embeddings"),
            ({"entries": [{}, {}], "embeddings": {"v1": [[1, 0, 0, 0]]}}, "/embeddings/v1"),
            ({"entries": [{}, {}], "embeddings": {"v1": [[1, 0, 0, 0], [1]]}}, "/embeddings/v1/1"),
            ({"entries": [{}, {}], "embeddings": {"v1": [[1, 0, 0, 0], [0, 0, 0, 0]]}}, "/embeddings/v1/1"),
            ({"entries": [{}, {}], "embeddings": {"v1": [[1, 0, 0, 0]] * 2}, "name": "x" * 200}, "/name"),
            ({"entries": [{}, {}], "embeddings": {"v1": [[1, 0, 0, 0]] * 2}, "names": ""}, "/names"),
        ],
    )
    def test_bad_embeddings_are_named(self, served: Any, path: str, body: dict[str, Any], pointer: str) -> None:
        refused = served.http.post(f"{path}/evaluations", json=body)

        assert refused.status_code in {404, 422}, refused.text
        assert [error["pointer"] for error in refused.json()["errors"]] == [pointer]

    def test_two_files_of_one_name_refuse_the_set(self, served: Any, path: str, pictures: list[bytes]) -> None:
        data = {"entries": json.dumps([{"label": 1, "image": "a"}, {"label": 2, "image": "a"}])}
        files = [("images", ("a", picture)) for picture in pictures[:2]]

        refused = served.http.post(f"{path}/evaluations", data=data, files=files)

        assert refusal(refused) == (422, "invalid_body", ["/images"])
        assert served.http.get(f"{path}/evaluations").json() == {"evaluations": []}

    def test_a_rehearsed_deletion_says_what_would_go(self, served: Any, path: str, pictures: list[bytes]) -> None:
        made = upload(served, path, labelled(4), pictures[:4]).json()

        rehearsed = served.remove(f"{path}/evaluations/{made['id']}", dry_run="true")

        assert (rehearsed.status_code, rehearsed.json()) == (200, made)
        assert served.http.get(f"{path}/evaluations").json()["evaluations"] == [made]


class TestLeftOut:
    """Entries without a label, beside others that have one."""

    def test_they_are_left_out_and_counted_where_labels_decide(
        self, served: Any, path: str, pictures: list[bytes]
    ) -> None:
        entries = [{**entry, **({"label": None} if n in (3, 11) else {})} for n, entry in enumerate(labelled(20))]
        number = upload(served, path, entries, pictures).json()["id"]

        report = gate(served, path, evaluation=number).json()

        assert (report["metric"], report["labelled"]) == ("cmc@1", True)
        assert (report["items"], report["unlabelled"]) == (18, 2)
        assert "2 without a label" in served.http.get(f"{path}/gates/{report['id']}/page").text
        rest = [n for n in range(20) if n not in (3, 11)]
        alone = upload(
            served,
            path,
            [{**labelled(20)[n], "image": str(m)} for m, n in enumerate(rest)],
            [pictures[n] for n in rest],
        ).json()["id"]
        same = gate(served, path, evaluation=alone).json()
        assert (same["old_old"], same["new_old"]) == (report["old_old"], report["new_old"])

    def test_embeddings_stay_with_their_entries(self, served: Any, path: str, vectors: Any) -> None:
        entries = [{"label": None if n < 3 else n % 5} for n in range(20)]
        number = served.http.post(f"{path}/evaluations", json={"entries": entries, "embeddings": vectors}).json()["id"]
        rest = {v: rows[3:] for v, rows in vectors.items()}
        alone = served.http.post(f"{path}/evaluations", json={"entries": entries[3:], "embeddings": rest}).json()["id"]

        found, expected = (gate(served, path, evaluation=n, metric="mAP@1.0").json() for n in (number, alone))

        assert (found["items"], found["unlabelled"]) == (17, 3)
        assert (found["old_old"], found["new_old"]) == (expected["old_old"], expected["new_old"])

    def test_recall_needs_no_labels_and_takes_all(self, served: Any, path: str, pictures: list[bytes]) -> None:
        entries = [{**entry, "label": None if n == 0 else 1} for n, entry in enumerate(labelled(20))]
        number = upload(served, path, entries, pictures).json()["id"]

        report = gate(served, path, evaluation=number, metric="recall@k").json()

        assert (report["items"], report["unlabelled"], report["labelled"]) == (20, 0, False)


class TestMetrics:
    def test_without_labels_recall_is_measured_against_the_new_versions_own_ranking(
        self, served: Any, path: str, vectors: Any
    ) -> None:
        report = gate(served, path, k=3).json()
        old, new = (np.array(vectors[v]) for v in ("v1", "v2"))

        def first(queries: np.ndarray, items: np.ndarray) -> list[set[int]]:
            scores = queries @ items.T
            np.fill_diagonal(scores, -np.inf)
            return [set(row) for row in np.argsort(-scores, axis=1)[:, :3].tolist()]

        cut = new[:, :4] / np.linalg.norm(new[:, :4], axis=1, keepdims=True)
        truth = first(new, new)
        assert (report["metric"], report["labelled"], report["new_new"]["value"]) == ("recall@3", False, 1.0)
        for field, found in (("old_old", first(old, old)), ("new_old", first(cut, old))):
            expected = np.mean([len(a & b) / 3 for a, b in zip(found, truth, strict=True)])
            assert report[field]["value"] == pytest.approx(expected)

    def test_tar_is_measured_and_named_with_its_far(self, served: Any, path: str) -> None:
        report = gate(served, path, label="digit", metric="TAR@FAR", far=0.05).json()

        assert report["metric"] == "TAR@FAR=0.05"
        assert 0 < report["old_old"]["value"] <= 1

    def test_options_that_a_set_does_not_use_are_refused(self, served: Any, path: str, pictures: list[bytes]) -> None:
        number = upload(served, path, labelled(20), pictures).json()["id"]

        for fields, pointer in (({"sample": 5}, "/sample"), ({"k": 5}, "/k"), ({"far": 0.1}, "/far")):
            problem(gate(served, path, evaluation=number, **fields), 422, "invalid_argument", pointer)
        assert gate(served, path, evaluation=number, metric="recall@k", k=5).json()["metric"] == "recall@5"

    def test_slices_are_worst_first(self, served: Any, path: str, pictures: list[bytes]) -> None:
        number = upload(served, path, labelled(20), pictures).json()["id"]

        report = gate(served, path, evaluation=number, slice="half", metric="mAP@1.0").json()

        assert sorted(one["value"] for one in report["slices"]) == ["false", "true"]
        assert [one["queries"] for one in report["slices"]] == [10, 10]
        differences = [one["difference"]["value"] for one in report["slices"]]
        assert differences == sorted(differences)
        assert np.mean(differences) == pytest.approx(report["difference"]["value"])

    def test_a_metric_that_needs_labels_says_so(self, served: Any, path: str, pictures: list[bytes]) -> None:
        unlabelled = upload(served, path, [{"image": "0"}, {"image": "1"}, {"image": "2", "label": 3}], pictures[:3])
        number = unlabelled.json()["id"]

        assert unlabelled.json()["labelled"] == 1
        assert refusal(gate(served, path, evaluation=number, metric="cmc@1")) == (422, "invalid_argument", ["/metric"])
        assert gate(served, path, evaluation=number).json()["metric"] == "recall@2"
        assert refusal(gate(served, path, evaluation=number, label="digit"))[2] == ["/label"]

    def test_labels_and_slices_may_lie_deeper(self, served: Any, pictures: list[bytes]) -> None:
        path = served.gallery("v1")
        items = [
            {"id": str(n), "metadata": {"of": {"class": n % 5, "half": n < 10}}, "image": str(n)} for n in range(20)
        ]
        served.post_items(path, items, [(str(n), picture) for n, picture in enumerate(pictures)])

        report = gate(served, path, label="of.class", slice="of.half").json()

        assert report["queries"] == 20
        assert {one["value"] for one in report["slices"]} == {"true", "false"}

    def test_a_slice_that_no_entry_has_is_refused(self, served: Any, path: str, pictures: list[bytes]) -> None:
        number = upload(served, path, labelled(20), pictures).json()["id"]

        for fields in ({"label": "digit"}, {"evaluation": number}):
            refused = gate(served, path, slice="colour", **fields)
            assert refusal(refused) == (422, "invalid_argument", ["/slice"])
            assert "'colour'" in refused.json()["detail"]


def test_one_long_label_does_not_make_room_for_all_labels_of_its_length(
    served: Any, path: str, pictures: list[bytes]
) -> None:
    served.ingest(path, {"long": pictures[0], "longer": pictures[1]}, digit="x" * 60_000)
    gate(served, path, "v2", label="digit")  # opens what stays open

    tracemalloc.start()
    report = gate(served, path, "v2", label="digit").json()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert report["items"] == 22
    assert peak < 22 * 60_000 * 4  # bytes of an array of as many texts of this length
