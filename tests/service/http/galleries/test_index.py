"""A gallery's index over HTTP: chosen, changed while it serves, built beside queries, and seen in `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.engines.config import IndexConfig, IndexKind
from index.engines.memory import approximate, segment, segments
from index.version import Version
from service.settings import Settings
from service.store.galleries.gallery import gallery_named, set_index
from staging.api.served import problem, serving
from staging.states.small_shards import index_few
from staging.waiting import until


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    index_few(monkeypatch, 60)
    monkeypatch.setattr(approximate, "NODE_COST", 0)
    monkeypatch.setattr(segments, "SEAL_ROWS", 60)


def ask(served: Any, path: str, query: list[float], **options: Any) -> dict[str, Any]:
    answer = served.http.post(f"{path}/query", json={"version": "v1", "embeddings": [query], "k": 20, **options})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def ids(body: dict[str, Any]) -> list[str]:
    return [match["id"] for match in body["results"][0]["matches"]]


def scanned(body: dict[str, Any]) -> dict[str, int]:
    (shard,) = body["explain"]["shards"]
    found: dict[str, int] = shard["scanned"]
    return found


def test_a_large_gallery_is_indexed_while_it_serves_and_answers_as_an_exact_scan(served: Any) -> None:
    path = served.gallery("v1")
    assert served.http.patch(path, json={"index": {"kind": "hnsw", "recall": 0.999}}).status_code == 200
    vectors = np.random.default_rng(0).normal(size=(80, 4))
    items = [{"id": f"i{n}", "embedding": row.tolist()} for n, row in enumerate(vectors)]
    most = served.runtime.settings.max_batch
    for start in range(0, len(items), most):
        assert (
            served.http.post(f"{path}/items", json={"version": "v1", "items": items[start : start + most]}).status_code
            == 200
        )
    until(lambda: served.http.get(path).json()["indexed"] == 80)

    asked = vectors[7].tolist()
    found, right = ask(served, path, asked, explain=True), ask(served, path, asked, exact=True, explain=True)
    assert scanned(found)["approximate"] + scanned(found)["exact"] == scanned(right)["exact"] == 80
    assert scanned(found)["effort"] > 0
    assert ids(found) == ids(right)
    assert ids(found)[0] == "i7"

    easy, hard = (ask(served, path, asked, recall=aim, explain=True) for aim in (0.8, 0.9999))
    assert (ids(easy)[0], ids(hard)) == ("i7", ids(right))
    assert 0 < scanned(easy)["effort"] <= scanned(found)["effort"]
    assert scanned(hard)["exact"] == 80
    wrong = {"version": "v1", "embeddings": [asked], "recall": 1}
    problem(served.http.post(f"{path}/query", json=wrong), 422, "invalid_body", "/recall")

    assert served.http.delete(f"{path}/items/i7").status_code == 204
    assert "i7" not in ids(ask(served, path, asked))

    changed = served.http.patch(path, json={"index": {"kind": "ivf", "storage": "float16"}}).json()
    assert changed["index"] == {"kind": "ivf", "storage": "float16", "recall": 0.99}
    until(lambda: served.http.get(path).json()["indexed"] == 79)


def test_another_start_finds_the_index_that_was_built(tmp_path: Path, versions: dict[str, Version]) -> None:
    vectors = np.random.default_rng(0).normal(size=(80, 4))
    with serving(Settings(data=tmp_path)) as first:
        assert first.register(versions["v1"]).status_code == 201
        path = first.gallery("v1")
        items = [{"id": f"i{n}", "embedding": row.tolist()} for n, row in enumerate(vectors)]
        assert first.http.post(f"{path}/items", json={"version": "v1", "items": items}).status_code == 200
        until(lambda: first.http.get(path).json()["indexed"] == 80)
        answer = ids(ask(first, path, vectors[7].tolist()))

    with pytest.MonkeyPatch.context() as patch, serving(Settings(data=tmp_path)) as second:
        patch.setattr(segment.Segment, "build_index", lambda *_: pytest.fail("an index was built again"))
        assert second.http.get(path).json()["indexed"] == 80
        assert ids(ask(second, path, vectors[7].tolist())) == answer
        assert second.remove(path).status_code == 204
        until(lambda: not list((tmp_path / "indexes").iterdir()))


def test_an_index_that_there_is_not_is_refused_by_field(served: Any) -> None:
    path = served.gallery("v1")
    for index, pointer in (
        ({"kind": "lsh"}, "/index/kind"),
        ({"recall": 1.5}, "/index/recall"),
        ({"m": 3}, "/index/m"),
    ):
        problem(served.http.patch(path, json={"index": index}), 422, "invalid_request", pointer)
    assert served.http.get(path).json()["index"]["kind"] == "auto"


def test_readiness_and_a_start_name_a_gallery_whose_engine_the_process_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Settings(data=tmp_path)) as running:
        path = running.gallery(None)
        name = path.rpartition("/")[2]
        assert running.http.get("/health/ready").json()["problems"] == []
        with running.runtime.database.write() as connection:  # as a process that has the engine does
            set_index(connection, gallery_named(connection, name).id, IndexConfig(kind=IndexKind.PGVECTOR))

        ready = running.http.get("/health/ready")

        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
        (why,) = ready.json()["problems"]
        assert name in why
        assert "REGRAFT_PGVECTOR_URL" in why
    with serving(Settings(data=tmp_path)) as running:
        until(lambda: why in caplog.text)
        assert running.http.patch(path, json={"index": {"kind": "auto"}}).status_code == 200
        assert running.http.get("/health/ready").json()["problems"] == []


def test_a_dry_run_changes_no_index(served: Any) -> None:
    path = served.gallery("v1")

    said = served.http.patch(path, params={"dry_run": True}, json={"index": {"kind": "exact"}})

    assert said.json()["index"]["kind"] == "exact"
    assert served.http.get(path).json()["index"]["kind"] == "auto"
