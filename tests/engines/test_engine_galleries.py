"""A gallery whose vectors lie in pgvector or Milvus, through a real server, beside one that lies in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.engines.pgvector import PgvectorEngine
from index.engines.remote import EngineUnavailable
from service.replica import engine_writer
from service.settings import Settings
from staging.builders import make_version
from staging.served import Served, problem, serving
from staging.waiting import until

COUNT = 60
VECTORS = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)


@pytest.fixture(params=["pgvector", "milvus"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(request: pytest.FixtureRequest, kind: str) -> dict[str, str]:
    """The setting that says where galleries may lie."""
    if kind == "milvus":
        return {"milvus_uri": request.getfixturevalue("milvus_server").uri}
    return {"pgvector_url": request.getfixturevalue("url")}


@pytest.fixture
def url(server: Any) -> Iterator[str]:
    made = server.create()
    try:
        with closing(PgvectorEngine(made)) as engine:
            engine.check()
    except EngineUnavailable as error:
        pytest.skip(error.message)
    yield made
    server.drop(made)


@pytest.fixture
def elsewhere(place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(engine_writer, "PAUSE_SECONDS", 0.02)
    return Settings(data=tmp_path / "data", **place)


@pytest.fixture
def served(elsewhere: Settings, tmp_path: Path) -> Iterator[Served]:
    with serving(elsewhere) as running:
        v1 = make_version(tmp_path / "v1", "v1", 4, encoder=False)
        v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")], encoder=False)
        for version in (v1, v2):
            assert running.register(version).status_code == 201
        yield running


def gallery(served: Served, name: str, kind: str) -> str:
    made = served.http.post("/galleries", json={"name": name, "index": {"kind": kind}})
    assert made.status_code == 201, made.text
    served.deploy(f"/galleries/{name}", "v1")
    return f"/galleries/{name}"


def padded(rows: np.ndarray) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, 2)), constant_values=0.1)


def put(served: Served, path: str, numbers: Any, version: str = "v1", dim: int = 4, **fields: Any) -> None:
    rows = VECTORS if dim == 4 else padded(VECTORS)
    items = [
        {"id": f"i{n}", "metadata": {"even": n % 2 == 0}, "embedding": rows[n].tolist(), **fields} for n in numbers
    ]
    stored = served.http.post(f"{path}/items", json={"version": version, "items": items})
    assert stored.status_code == 200, stored.text
    assert stored.json()["failed"] == 0, stored.text


def ask(served: Served, path: str, **options: Any) -> list[Any]:
    body = {"version": "v1", "embeddings": QUERIES.tolist(), "k": 7, **options}
    answer = served.http.post(f"{path}/query", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return [told["degraded"], *([(m["id"], m["score"]) for m in result["matches"]] for result in told["results"])]


def lies(served: Served, path: str) -> dict[tuple[str, str], tuple[int, int]]:
    """By version and origin what lies here and there."""
    live = served.runtime.replica.find(path.rpartition("/")[2])
    shards = live.gallery.remote.shards()
    return {place: (one.head.held(), one.there.held()) for place, one in shards.items()}


def both(served: Served, kind: str) -> tuple[str, str]:
    return gallery(served, "there", kind), gallery(served, "here", "exact")


def test_a_gallery_in_an_engine_lives_as_one_in_memory(served: Served, kind: str) -> None:
    paths = both(served, kind)

    def alike(*versions: str) -> None:
        for version in versions or ("v1",):
            asked = {"version": version, "embeddings": (QUERIES if version == "v1" else padded(QUERIES)).tolist()}
            for more in ({}, {"filter": {"field": "even", "eq": True}}, {"exact": True}):
                there, here = (ask(served, path, **asked, **more) for path in paths)
                assert there == here

    for path in paths:
        put(served, path, range(40))
    alike()
    until(lambda: lies(served, paths[0]) == {("v1", "supplied"): (0, 40)})
    alike()
    for path in paths:
        put(served, path, range(30, COUNT))
        put(served, path, [3], embedding=[1, 2, 3, 4])
        assert served.http.delete(f"{path}/items/i7").status_code == 204
    alike()
    until(lambda: lies(served, paths[0]) == {("v1", "supplied"): (0, COUNT - 1)})
    alike()

    for path in paths:
        served.deploy(path, "v2")
        put(served, path, range(20, 40), "v2", 6)
    alike("v1", "v2")
    until(lambda: {held for held, _ in lies(served, paths[0]).values()} == {0})
    assert len(lies(served, paths[0])) == 2
    alike("v1", "v2")
    for path in paths:
        served.deploy(path, "v1")
    alike("v1", "v2")


def test_a_start_finds_what_is_there_and_reads_no_vector(elsewhere: Settings, served: Served, kind: str) -> None:
    path = gallery(served, "g", kind)
    put(served, path, range(COUNT))
    until(lambda: lies(served, path) == {("v1", "supplied"): (0, COUNT)})
    before = ask(served, path)
    with serving(elsewhere) as again:
        assert ask(again, path) == before
        assert lies(again, path) == {("v1", "supplied"): (0, COUNT)}


def test_it_moves_there_and_back_while_it_serves(served: Served, kind: str) -> None:
    path = gallery(served, "g", "auto")
    put(served, path, range(COUNT))
    before = ask(served, path)
    assert served.http.patch(path, json={"index": {"kind": kind}}).status_code == 200
    assert ask(served, path) == before
    until(lambda: lies(served, path) == {("v1", "supplied"): (0, COUNT)})
    assert ask(served, path) == before
    assert served.http.get(path).json()["indexed"] == COUNT
    assert served.http.patch(path, json={"index": {"kind": "exact"}}).status_code == 200
    assert ask(served, path) == before
    until(lambda: not lies(served, path))
    assert ask(served, path) == before


@pytest.mark.parametrize(
    ("kind", "setting", "nobody"),
    [
        ("pgvector", "pgvector_url", "postgresql://nobody@127.0.0.1:1/none"),
        ("milvus", "milvus_uri", "http://127.0.0.1:1"),
    ],
)
def test_a_service_without_the_engine_refuses_it_by_one_error(
    tmp_path: Path, kind: str, setting: str, nobody: str
) -> None:
    asked = {"name": "g", "index": {"kind": kind}}
    with serving(Settings(data=tmp_path / "data")) as running:
        told = problem(running.http.post("/galleries", json=asked), 422, "invalid_argument", "/index/kind")
        assert f"REGRAFT_{setting.upper()}" in told["detail"]
    with serving(Settings(data=tmp_path / "data", **{setting: nobody})) as running:
        problem(running.http.post("/galleries", json=asked), 503, "engine_unavailable")
