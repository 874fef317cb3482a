"""Queries over the items of two versions: what is explained, how each mode ranks, what no route reaches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from index.edges.calibration import Calibration
from index.version import Version
from staging.api.served import problem
from staging.inputs.builders import make_version


def test_a_new_version_is_answered_over_old_items_by_its_edge(
    served: Any, pictures: list[bytes], versions: dict[str, Version]
) -> None:
    path = served.filled(pictures[:15], "v1", "v2")
    served.ingest(path, {f"i{n}": picture for n, picture in enumerate(pictures) if n >= 15})

    answer = served.query(path, pictures[17], pictures[3], k=20).json()

    assert (answer["version"], answer["mix"], answer["degraded"]) == ("v2", {"v1": 15, "v2": 5}, [])
    matches = {m["id"]: m for m in answer["results"][0]["matches"]}
    assert len(matches) == 20
    for name, match in matches.items():
        old = int(name[1:]) < 15
        assert (match["version"], match["route"]) == (("v1", ["truncate"]) if old else ("v2", []))
    assert answer["results"][0]["matches"][0]["id"] == "i17"
    assert answer["results"][1]["matches"][0]["id"] == "i3"
    assert {m["score"] for r in answer["results"] for m in r["matches"] if m["score"] > 1.00001} == set()


def test_items_that_embeddings_cannot_reach_are_reported(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery("v1")
    served.ingest(path, {"old": pictures[0]})
    served.http.post(f"{path}/deployments", json={"version": "v2"})
    served.ingest(path, {"new": pictures[0]})
    asked = {"version": "v1", "embeddings": [[1, 2, 3, 4]], "k": 2}

    answer = served.http.post(f"{path}/query", json=asked).json()

    (degraded,) = answer["degraded"]
    assert (degraded["version"], degraded["items"]) == ("v2", 1)
    assert "v1" in degraded["reason"]
    assert [m["id"] for m in answer["results"][0]["matches"]] == ["old"]
    problem(served.http.post(f"{path}/query", json={**asked, "strict": True}), 409, "no_route", "/version")
    problem(
        served.http.post(f"{path}/query", json={**asked, "version": "plain", "embeddings": [[1, 2, 3]]}),
        409,
        "no_route",
    )


@pytest.fixture(scope="module")
def upgraded(served: Any, pictures: list[bytes]) -> str:
    """Ten pictures stored by v1, then ten by v2."""
    path: str = served.gallery()
    for version, numbers in (("v1", range(10)), ("v2", range(10, 20))):
        if version == "v2":
            served.deploy(path, "v2")
        items = [{"id": f"i{n}", "metadata": {}, "image": f"{n}"} for n in numbers]
        assert served.post_items(path, items, [(f"{n}", pictures[n]) for n in numbers]).status_code == 200
    return path


def test_an_answer_explains_each_shard(served: Any, upgraded: str, pictures: list[bytes]) -> None:
    answer = served.query(upgraded, pictures[3], k=20, explain=True).json()

    told = answer["explain"]
    assert (answer["mode"], told["seconds"].keys()) == (
        "raw",
        {"encode", "transform", "filter", "scan", "merge", "fetch"},
    )
    assert told["seconds"]["encode"].keys() == {"v2"}
    assert all(told["seconds"][step] > 0 for step in ("transform", "scan", "merge", "fetch"))
    assert sum(shard["seconds"]["scan"] for shard in told["shards"]) == pytest.approx(told["seconds"]["scan"])
    shown = [{key: shard[key] for key in shard if key != "seconds"} for shard in told["shards"]]
    edge = {"new": "v2", "old": "v1", "kind": "truncate"}
    scores = {"cmc@1": {"value": 0.9, "low": pytest.approx(0.85), "high": pytest.approx(0.95)}}
    scanned = {"exact": 10, "approximate": 0, "effort": 0}
    same = {"queries": ["/images/0"], "origin": "encoded", "items": 10, "encoders": ["v2"], "calibration": None}
    same |= {"scanned": scanned}
    assert shown == [
        {"version": "v1", "route": [{**edge, "scores": scores}], **same},
        {"version": "v2", "route": [], **same},
    ]
    assert "explain" not in served.query(upgraded, pictures[3], k=20).json()


def test_each_mode_ranks_by_its_own_score(
    served: Any, upgraded: str, pictures: list[bytes], versions: dict[str, Version]
) -> None:
    told = problem(served.query(upgraded, pictures[3], k=20, mode="calibrated"), 409, "mode_unavailable", "/mode")
    assert "legal now: raw, rank" in told["detail"]
    fused = served.query(upgraded, pictures[3], k=20, mode="rank").json()
    assert fused["mode"] == "rank"
    assert [m["score"] for m in fused["results"][0]["matches"]] == sorted([1 / (62 + 2 * n) for n in range(10)] * 2)[
        ::-1
    ]

    gallery = served.runtime.replica.find(upgraded.rpartition("/")[2]).gallery
    through = ("v2", "v1", "encoded", (("v2", "v1", "truncate"),))
    maps = {through: (1.0, 0.0), ("v2", "v2", "encoded", ()): (1.0, 9.0)}
    try:
        gallery.apply(
            {},
            calibrations=(
                {key: Calibration(np.array([at]), np.array([0.5]), slope) for key, (slope, at) in maps.items()},
                {},
            ),
        )
        answer = served.query(upgraded, pictures[3], k=20, explain=True, mode="calibrated").json()
        body = {"version": "v2", "embeddings": [[1, 0, 0, 0, 0, 1]], "mode": "raw"}
        raw = served.http.post(f"{upgraded}/query", json=body).json()
    finally:
        gallery.apply({}, calibrations=({}, {}))

    matches = answer["results"][0]["matches"]
    assert answer["mode"] == "calibrated"
    assert [m["version"] for m in matches] == ["v1"] * 10 + ["v2"] * 10
    for match in matches:
        odds = match["raw_score"] - (9 if match["version"] == "v2" else 0)
        assert match["score"] == pytest.approx(1 / (1 + np.exp(-odds)))
    assert answer["explain"]["shards"][1]["calibration"] == {
        "kind": "isotonic",
        "scores": [9.0],
        "probabilities": [0.5],
        "slope": 1.0,
    }
    assert raw["mode"] == "raw"
    assert all(match["score"] == match["raw_score"] for match in raw["results"][0]["matches"])


def test_slerp_is_served_to_images_and_out_of_reach_of_embeddings(
    served: Any, pictures: list[bytes], versions: dict[str, Version], tmp_path: Any
) -> None:
    assert served.register(make_version(tmp_path / "sl", "sl", 6, edges=[(versions["v1"], "slerp")])).status_code == 201
    path = served.gallery()
    items = [{"id": f"i{n}", "metadata": {}, "image": f"{n}"} for n in range(5)]
    assert served.post_items(path, items, [(f"{n}", pictures[n]) for n in range(5)]).status_code == 200
    served.deploy(path, "sl")

    answer = served.query(path, *pictures[:5], k=1, explain=True).json()

    assert [result["matches"][0]["id"] for result in answer["results"]] == [f"i{n}" for n in range(5)]
    assert answer["results"][0]["matches"][0]["route"] == ["slerp"]
    assert answer["explain"]["seconds"]["encode"].keys() == {"sl", "v1"}
    assert answer["explain"]["shards"][0]["encoders"] == ["sl", "v1"]
    body = {"version": "sl", "embeddings": [[1, 0, 0, 0, 0, 1]], "k": 1}
    told = problem(served.http.post(f"{path}/query", json=body), 409, "no_route", "/version")
    assert "need the encoder of 'v1', which cannot embed this query" in told["detail"]
