"""Evaluation sets whose entries name the items that are right for them: gates and curves on them, on vectors too."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from index.encoders.encoder import Encoder
from index.version import Version
from staging.api.steps import gate, refusal
from staging.inputs.builders import add_text, image_bytes, make_image, make_version

RIGHT = [["i0", "i5", "gone"], ["i1"], ["i2", "i7", "i12"], ["i3", "i9"], ["gone"]]
"""What is named as right for five queries; nothing of it follows from what a picture shows."""
ASKED = [make_image(n, 100 + n) for n in range(5)]


@pytest.fixture
def path(served: Any, pictures: list[bytes]) -> str:
    """Twenty items; `gone` was one, and a gallery beside it has items of the same ids."""
    mine: str = served.filled(pictures, about=lambda n: {"digit": n % 5})
    served.ingest(mine, {"gone": pictures[0]})
    assert served.http.delete(f"{mine}/items/gone").status_code == 204
    served.filled(pictures)
    return mine


@pytest.fixture(scope="module")
def embedded(versions: dict[str, Version]) -> dict[str, Any]:
    """By version what it makes of the items and of the queries."""
    items = [make_image(n % 5, n) for n in range(20)]
    return {v: tuple(Encoder(versions[v]).encode(x).vectors for x in (items, ASKED)) for v in ("v1", "v2")}


def add(served: Any, path: str, entries: Any, **body: Any) -> Any:
    return served.http.post(f"{path}/evaluations", json={"entries": entries, **body})


def entries() -> list[dict[str, Any]]:
    return [{"relevant": named, "metadata": {"odd": n % 2}} for n, named in enumerate(RIGHT)]


def naive(queries: Any, items: Any, metric: str, named: Any = RIGHT) -> float:
    """The metric by plain loops, over the queries that have something right to find."""
    values = []
    for query, ids in zip(queries, named, strict=True):
        right = {int(one[1:]) for one in ids if one != "gone"}
        ranking = sorted(range(len(items)), key=lambda n: -float(query @ items[n]))
        hits = [n in right for n in ranking]
        if not right:
            continue
        if metric == "mAP@1.0":
            values.append(np.mean([sum(hits[: r + 1]) / (r + 1) for r, hit in enumerate(hits) if hit]))
        elif metric.startswith("recall"):
            values.append(sum(hits[: int(metric[7:])]) / len(right))
        else:
            values.append(any(hits[: int(metric[4:])]))
    return float(np.mean(values))


@pytest.mark.parametrize(
    ("metric", "asked"),
    [
        ("cmc@1", {}),
        ("cmc@5", {"metric": "cmc@5"}),
        ("mAP@1.0", {"metric": "mAP@1.0"}),
        ("recall@3", {"metric": "recall@k", "k": 3}),
        ("recall@20", {"metric": "recall@k", "k": 21}),
    ],
)
@pytest.mark.parametrize("kind", ["images", "embeddings"])
def test_a_gate_asks_the_gallery_for_what_the_entries_name(
    served: Any, path: str, embedded: Any, kind: str, metric: str, asked: Any
) -> None:
    if kind == "images":
        listed = [{**entry, "image": str(n)} for n, entry in enumerate(entries())]
        files = [("images", (str(n), image_bytes(image))) for n, image in enumerate(ASKED)]
        made = served.http.post(f"{path}/evaluations", data={"entries": json.dumps(listed)}, files=files)
    else:
        made = add(served, path, entries(), embeddings={v: e[1].tolist() for v, e in embedded.items()})
    assert (made.status_code, made.json()["relevant"], made.json()["kind"]) == (201, 5, kind)

    report = gate(served, path, evaluation=made.json()["id"], **asked).json()

    (old_items, old), (new_items, new) = embedded["v1"], embedded["v2"]
    cut = new[:, :4] / np.linalg.norm(new[:, :4], axis=1, keepdims=True)
    expected = {"old_old": (old, old_items), "new_old": (cut, old_items), "new_new": (new, new_items)}
    assert {name: report[name]["value"] for name in expected} == {
        name: pytest.approx(naive(*sides, metric)) for name, sides in expected.items()
    }
    assert (report["metric"], report["queries"], report["items"], report["relevant_missing"]) == (metric, 4, 20, 1)
    assert (report["whole"], report["exhaustive"]) == (True, True)
    assert sorted(report["latency_ms"]) == (["v1", "v2"] if kind == "images" else [])
    assert report["calibrations"] > 0
    shown = served.http.get(f"{path}/gates/{report['id']}/page")
    assert shown.status_code == 200


def test_a_fall_names_the_entry_that_asked_and_the_item_it_found(served: Any) -> None:
    path, old, new = served.gallery("v1"), np.eye(4), np.eye(6)
    items = [{"id": name, "embedding": row.tolist()} for name, row in zip("ab", old[:2], strict=True)]
    assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200
    asking = {"v1": old[[0, 1]].tolist(), "v2": new[[0, 0]].tolist()}
    number = add(served, path, [{"relevant": ["a"]}, {"relevant": ["b"]}], embeddings=asking).json()["id"]

    report = gate(served, path, evaluation=number).json()

    (fall,) = report["flips"]
    assert (fall["query"]["id"], fall["wrong"]["id"], fall["rank"]) == ("1", "a", 2)


def test_vectors_alone_are_enough_for_a_gate_and_a_curve(served: Any, embedded: Any) -> None:
    path = served.gallery("v1")
    items = [{"id": f"i{n}", "embedding": row.tolist()} for n, row in enumerate(embedded["v1"][0])]
    assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200
    number = add(served, path, entries(), embeddings={v: e[1].tolist() for v, e in embedded.items()}).json()["id"]

    report = gate(served, path, evaluation=number, metric="mAP@1.0").json()
    served.deploy(path, "v2")
    curve = {"evaluation": number, "metric": "mAP@1.0"}
    started = served.backfill(path, kind="supplied", curve=curve)
    second = [{"id": f"i{n}", "embedding": row.tolist()} for n, row in enumerate(embedded["v2"][0])]
    served.http.put(f"{path}/items:embeddings", json={"version": "v2", "items": second})

    (old_items, old), (new_items, new) = embedded["v1"], embedded["v2"]
    cut = new[:, :4] / np.linalg.norm(new[:, :4], axis=1, keepdims=True)
    assert (report["old_old"]["value"], report["new_new"]) == (pytest.approx(naive(old, old_items, "mAP@1.0")), None)
    assert report["new_new_items"] == 0
    deadline = time.monotonic() + 60
    while (shown := served.http.get(f"/backfills/{started}").json()["curve"])["state"] == "measuring":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first, last = shown["points"][0], shown["points"][-1]
    assert (shown["state"], first["queries"]) == ("complete", 4)
    assert first["value"] == pytest.approx(naive(cut, old_items, "mAP@1.0"), abs=1e-6)
    assert last["value"] == pytest.approx(naive(new, new_items, "mAP@1.0"), abs=1e-6)


def test_a_version_without_encoder_is_measured_on_items_with_images(served: Any, path: str, embedded: Any) -> None:
    served.add("outside", 4, encoder=False, edges=[("v1", "identity")])
    old_items, old = embedded["v1"]
    number = add(served, path, entries(), embeddings={"v1": old.tolist(), "outside": old.tolist()}).json()["id"]

    report = gate(served, path, "outside", evaluation=number).json()

    assert report["old_old"]["value"] == report["new_old"]["value"] == pytest.approx(naive(old, old_items, "cmc@1"))
    assert (report["new_new"], report["new_new_items"]) == (None, 0)


def test_new_new_is_unknown_where_the_new_version_has_embedded_nothing_to_find(served: Any, embedded: Any) -> None:
    path = served.gallery("v1")
    old_items, new_items = embedded["v1"][0], embedded["v2"][0]
    items = [{"id": f"i{n}", "embedding": row.tolist()} for n, row in enumerate(old_items)]
    assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200
    number = add(served, path, entries(), embeddings={v: e[1].tolist() for v, e in embedded.items()}).json()["id"]
    found = []
    for numbers in ((18, 19), (0, 1)):
        second = [{"id": f"i{n}", "embedding": new_items[n].tolist()} for n in numbers]
        put = served.http.put(f"{path}/items:embeddings", json={"version": "v2", "items": second})
        assert put.status_code == 200, put.text
        report = gate(served, path, evaluation=number).json()
        found.append((report["new_new_items"], report["new_new"] is None))

    assert found == [(2, True), (4, False)]


def test_one_query_with_something_to_find_chooses_no_merge_mode(served: Any, path: str, embedded: Any) -> None:
    rows = {v: e[1][:2].tolist() for v, e in embedded.items()}
    number = add(served, path, [{"relevant": ["i1"]}, {"relevant": ["gone"]}], embeddings=rows).json()["id"]

    report = gate(served, path, evaluation=number).json()

    assert (report["queries"], report["merge"]) == (1, None)


def test_texts_ask_as_queries(served: Any, tmp_path: Any) -> None:
    words = {"north": np.eye(4)[0], "east": np.eye(4)[1], "sun": np.eye(4)[2]}
    old = make_version(tmp_path / "told", "told", 4, encoder=False)
    new = make_version(tmp_path / "tnew", "tnew", 4, encoder=False, edges=[(old, "identity")])
    for version in (old, new):
        assert served.register(add_text(version, words)).status_code == 201
    path = served.gallery("told")
    items = [{"id": word, "text": word} for word in words]
    assert served.http.post(f"{path}/items", json={"items": items}).json()["stored"] == 3

    asked = [{"text": "north", "relevant": ["north"]}, {"text": "sun", "relevant": ["east"]}]
    made = add(served, path, asked)
    report = gate(served, path, "tnew", evaluation=made.json()["id"], metric="mAP@1.0").json()

    assert (made.json()["kind"], made.json()["size"]) == ("texts", 2)
    assert (report["old_old"]["value"], report["items"]) == (pytest.approx(report["new_old"]["value"]), 3)
    assert served.remove(f"{path}/evaluations/{made.json()['id']}").status_code == 204


@pytest.mark.parametrize(
    ("listed", "pointer"),
    [
        ([{"relevant": ["a"]}, {"label": 1}], "/entries/1/relevant"),
        ([{"relevant": ["a"]}, {"relevant": []}], "/entries/1/relevant"),
        ([{"relevant": ["a"]}, {"relevant": "a"}], "/entries/1/relevant"),
        ([{"relevant": ["a"]}, {"relevant": [3]}], "/entries/1/relevant"),
        ([{"relevant": ["a"]}, {"relevant": ["a"] * 1001}], "/entries/1/relevant"),
        ([{"relevant": ["a"]}, {"relevant": ["a"], "label": 1}], "/entries/1/label"),
        ([{"text": "a"}, {"text": " "}], "/entries/1/text"),
        ([{"text": "a"}, {"label": 1}], "/entries/1/text"),
    ],
)
def test_what_is_wrong_with_an_entry_is_named(served: Any, path: str, listed: Any, pointer: str) -> None:
    body = {} if "text" in listed[0] else {"embeddings": {"v1": [[1.0, 0, 0, 0]] * 2}}

    assert refusal(add(served, path, listed, **body))[2] == [pointer]


def test_what_such_a_set_cannot_measure_is_refused(served: Any, path: str, embedded: Any) -> None:
    rows = {v: e[1].tolist() for v, e in embedded.items()}
    number = add(served, path, entries(), embeddings=rows).json()["id"]
    nothing = add(served, path, [{"relevant": ["gone"]}] * 5, embeddings=rows).json()["id"]

    assert refusal(gate(served, path, evaluation=number, label="digit"))[2] == ["/label"]
    assert refusal(gate(served, path, evaluation=number, metric="TAR@FAR"))[2] == ["/metric"]
    assert refusal(gate(served, path, evaluation=nothing))[2] == ["/evaluation"]
    empty = served.gallery("v1")
    unmatched = add(served, empty, entries(), embeddings=rows).json()["id"]
    assert refusal(gate(served, empty, evaluation=unmatched)) == (422, "invalid_argument", ["/evaluation"])
    served.deploy(path, "v2")
    for curve, pointer in (
        ({"evaluation": number, "label": "digit"}, "/curve/label"),
        ({"evaluation": nothing}, "/curve/evaluation"),
    ):
        started = served.http.post(f"{path}/backfills", json={"kind": "reencode", "curve": curve})
        assert refusal(started)[2] == [pointer]
