"""An upgrade of a gallery of vectors only, to the end and back: nothing gets out of reach unsaid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staging.api.served import problem
from staging.inputs.builders import make_version

OLD = np.random.default_rng(3).normal(size=(101, 4))
NEW = OLD @ np.random.default_rng(4).normal(size=(4, 5))
"""The same items by both versions: a linear map leads from one to the other."""


@pytest.fixture
def upgraded(served: Any, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Sequence[str]:
    """(gallery, old, new): 100 items by the old version, of which 90 hold an embedding by the new one too."""
    root, tag = tmp_path_factory.mktemp("bare"), len(served.http.get("/versions").json()["versions"])
    old, new = f"old{tag}", f"new{tag}"
    for name, dim in ((old, 4), (new, 5)):
        assert served.register(make_version(root / name, name, dim, encoder=False)).status_code == 201
        if name == old:
            path = served.gallery(old)
            assert send(served, path, old, range(100), note="kept").json()["new"] == 100
    assert send(served, path, new, range(90)).json()["updated"] == 90
    return path, old, new


def send(served: Any, path: str, version: str, numbers: Sequence[int], **metadata: Any) -> Any:
    vectors = OLD if version.startswith("old") else NEW
    about = {"metadata": metadata} if metadata else {}
    items = [{"id": f"i{n}", "embedding": vectors[n].tolist(), **about} for n in numbers]
    return served.http.post(f"{path}/items", json={"version": version, "items": items})


def post(served: Any, path: str, **body: Any) -> Any:
    params = {"dry_run": True} if body.pop("dry_run", False) else {}
    return served.http.post(path, json=body, params=params)


def ask(served: Any, path: str, version: str) -> Any:
    asked = {"embeddings": (OLD if version.startswith("old") else NEW)[:3].tolist(), "version": version, "k": 100}
    answer = post(served, f"{path}/query", **asked).json()
    assert answer["degraded"] == []
    return [[(m["id"], m["score"], m["metadata"]) for m in result["matches"]] for result in answer["results"]]


def upgrade(served: Any, path: str, old: str, new: str) -> None:
    fitted = post(served, "/edges:fit", new=new, old=old, kind="ridge", gallery=path.rpartition("/")[2])
    assert fitted.status_code == 201, fitted.text
    assert post(served, f"{path}/deployments", version=new).status_code == 201


def mix(served: Any, path: str) -> Any:
    return served.http.get(path).json()["mix"]


def ready(served: Any, path: str) -> tuple[str, list[str]]:
    answer, name = served.http.get("/health/ready").json(), f"gallery {path.rpartition('/')[2]}:"
    return answer["status"], [problem for problem in answer["problems"] if problem.startswith(name)]


def test_vectors_of_a_new_version_upgrade_a_gallery_and_a_roll_back_loses_nothing(
    served: Any, upgraded: Sequence[str]
) -> None:
    path, old, new = upgraded
    before = ask(served, path, old)
    assert mix(served, path) == {old: 100}
    refused = problem(post(served, f"{path}/deployments", version=new), 409, "no_route", "/version")
    assert f"{old!r} (10 items)" in refused["detail"]

    upgrade(served, path, old, new)
    assert mix(served, path) == {new: 90, old: 10}
    assert [matches[0][0] for matches in ask(served, path, new)] == ["i0", "i1", "i2"]

    assert post(served, f"{path}/rollback").json()["out_of_reach"] == {}
    assert mix(served, path) == {old: 100}
    assert ask(served, path, old) == before
    assert {matches[2]["note"] for matches in before[0]} == {"kept"}
    assert ready(served, path) == ("ready", [])


def test_a_fit_says_how_to_get_pairs_and_it_is_true(served: Any, upgraded: Sequence[str]) -> None:
    path, old, new = upgraded
    name = path.rpartition("/")[2]
    fit = {"new": new, "old": old, "kind": "procrustes", "gallery": name}
    for number in range(19, 90):
        assert served.http.delete(f"{path}/items/i{number}").status_code == 204

    refused = problem(post(served, "/edges:fit", **fit), 422, "too_few_pairs", "/gallery")
    assert refused["detail"].startswith("19 ")
    assert "backfill" not in refused["detail"]  # neither has an encoder
    assert send(served, path, new, [90]).json()["updated"] == 1

    assert post(served, "/edges:fit", **fit).status_code == 201


def test_a_roll_back_that_loses_reach_says_so_and_needs_force(served: Any, upgraded: Sequence[str]) -> None:
    path, old, new = upgraded
    upgrade(served, path, old, new)
    send(served, path, new, [100])
    before = served.http.get(path).json()

    for rehearsed in (True, False):
        refused = problem(post(served, f"{path}/rollback", dry_run=rehearsed), 409, "reach_lost", "/force")
        assert f"{new!r} (1 items)" in refused["detail"]
    assert served.http.get(path).json() == before

    for rehearsed in (True, False):
        assert ready(served, path) == ("ready", [])
        assert post(served, f"{path}/rollback", dry_run=rehearsed, force=True).json()["out_of_reach"] == {new: 1}
    deployments = served.http.get(f"{path}/deployments").json()["deployments"]
    steps = served.http.get(f"{path}/deployments/{deployments[-1]['id']}").json()["transitions"]
    assert steps[-1]["evidence"]["out_of_reach"] == {new: 1}
    status, (said,) = ready(served, path)
    assert status == "degraded"
    assert said.endswith(f": 1 items of {new} are unreachable: no edge leads from version {old!r} to {new!r}")

    send(served, path, old, [100])
    assert ready(served, path) == ("ready", [])
    assert mix(served, path) == {old: 101}


def test_what_is_out_of_reach_already_is_not_lost_again(served: Any, upgraded: Sequence[str]) -> None:
    path, old, new = upgraded
    upgrade(served, path, old, new)
    send(served, path, new, [100])
    served.remove(f"/edges/{new}/{old}/matrix", force=True, reason="a test")
    assert ready(served, path)[0] == "degraded"

    # Ten items come into reach, and one of the others gets out of it.
    refused = post(served, f"{path}/rollback")

    assert (refused.status_code, f"{new!r} (1 items)" in refused.json()["detail"]) == (409, True)
    served.http.delete(f"{path}/items/i100")
    assert post(served, f"{path}/rollback").json()["out_of_reach"] == {}
    assert ready(served, path) == ("ready", [])


def test_what_neither_version_reaches_is_not_lost_by_going_back(served: Any, tmp_path: Path) -> None:
    first, stray = (make_version(tmp_path / name, name, 4, encoder=False) for name in ("old-first", "old-stray"))
    reached = [(first, "identity"), (stray, "identity")]
    later = make_version(tmp_path / "old-later", "old-later", 4, encoder=False, edges=reached)
    for version in (first, stray, later):
        assert served.register(version).status_code == 201
    path = served.gallery("old-first")
    send(served, path, "old-first", range(3))
    assert post(served, f"{path}/deployments", version="old-later").status_code == 201
    assert send(served, path, "old-stray", [3]).json()["new"] == 1
    served.remove("/edges/old-later/old-stray/identity", force=True, reason="a test")
    assert ready(served, path)[0] == "degraded"

    back = post(served, f"{path}/rollback")

    assert (back.status_code, back.json()["out_of_reach"]) == (201, {})
    assert mix(served, path) == {"old-first": 3, "old-stray": 1}


def test_each_step_looks_at_what_is_reached_when_it_is_taken(served: Any, upgraded: Sequence[str]) -> None:
    path, old, new = upgraded
    problem(post(served, f"{path}/deployments", version=new, until="verified"), 409, "no_route", "/version")
    post(served, "/edges:fit", new=new, old=old, kind="ridge", gallery=path.rpartition("/")[2])
    number = post(served, f"{path}/deployments", version=new, until="verified").json()["id"]
    served.remove(f"/edges/{new}/{old}/matrix", force=True, reason="a test")

    problem(post(served, f"{path}/deployments/{number}/advance", to="current"), 409, "no_route", "/version")

    assert served.http.get(path).json()["current"] == old


def test_ending_a_trial_needs_no_force(served: Any, upgraded: Sequence[str]) -> None:
    path, old, new = upgraded
    post(served, "/edges:fit", new=new, old=old, kind="ridge", gallery=path.rpartition("/")[2])
    post(served, f"{path}/deployments", version=new, until="verified")

    ended = post(served, f"{path}/rollback")

    assert (ended.status_code, ended.json()["out_of_reach"]) == (201, {})
