"""A gallery whose vectors lie in pgvector or Milvus, through a real server, beside one that lies in memory."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.engines.digest import digests
from index.engines.pgvector.engine import PgvectorEngine
from index.engines.remote.base import Collection, Engine, EngineUnavailable
from service.doctor.examination import Doctor
from service.replica import engine_writer
from service.settings import Settings
from service.store.database.connections import Database
from service.upgrades.tombstones import TombstonePurger
from staging.api.served import Served, problem, serving
from staging.inputs.builders import make_version
from staging.waiting import until

COUNT = 60
VECTORS = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)


@pytest.fixture(params=["pgvector", pytest.param("milvus", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(request: pytest.FixtureRequest, kind: str) -> dict[str, str]:
    """The setting that says where galleries may lie."""
    if kind == "milvus":
        return {"milvus_uri": request.getfixturevalue("milvus_server").uri}
    return {"pgvector_url": request.getfixturevalue("url")}


@pytest.fixture
def running_engine(request: pytest.FixtureRequest, kind: str) -> Any:
    """Its server, to freeze, stop and start."""
    return request.getfixturevalue("milvus_server" if kind == "milvus" else "server")


@pytest.fixture
def engine_there(request: pytest.FixtureRequest, kind: str) -> Iterator[Engine]:
    """Another client of it."""
    if kind == "milvus":
        yield request.getfixturevalue("milvus")
        return
    with closing(PgvectorEngine(request.getfixturevalue("url"))) as engine:
        yield engine


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
    monkeypatch.setattr("service.store.galleries.change_feed.FEED_BLOCK", 7)
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
    loaded = served.runtime.replica.find(path.rpartition("/")[2])
    shards = loaded.gallery.remote.shards()
    return {place: (one.head.row_count(), one.remote_rows.row_count()) for place, one in shards.items()}


def collection(served: Served, name: str) -> Collection:
    """Of the vectors by v1."""
    return served.runtime.replica.find(name).gallery.remote.shards()["v1", "supplied"].collection


def gallery_there(served: Served, kind: str, count: int = COUNT) -> str:
    """A gallery of so many items, all of which lie in the engine."""
    path = gallery(served, "g", kind)
    put(served, path, range(count))
    until(lambda: lies(served, path) == {("v1", "supplied"): (0, count)})
    return path


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
    until(lambda: collection(served, "there").count() == COUNT - 1)
    alike()
    for path in paths:
        patches = [{"id": f"i{n}", "metadata": {"even": n % 3 == 0}} for n in range(20, 50)]
        assert served.http.patch(f"{path}/items", json={"items": patches}).json()["updated"] == len(patches)
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
    path = gallery_there(served, kind)
    before = ask(served, path)
    with serving(elsewhere) as again:
        assert ask(again, path) == before
        assert lies(again, path) == {("v1", "supplied"): (0, COUNT)}


def test_an_engine_that_was_not_written_to_until_rows_of_deleted_items_went_loses_them_too(
    running_engine: Any, elsewhere: Settings, served: Served, kind: str
) -> None:
    path = gallery_there(served, kind)
    running_engine.stop(signal.SIGKILL)
    try:
        assert served.http.post(f"{path}/items:delete", json={"ids": [f"i{n}" for n in range(9)]}).status_code == 200
        for _ in range(2):
            TombstonePurger(served.runtime.database, settle_seconds=0.0).look()
        put(served, path, range(3))
    finally:
        running_engine.start()
    until(lambda: lies(served, path) == {("v1", "supplied"): (0, COUNT - 6)})
    until(lambda: collection(served, "g").count() == COUNT - 6)


def problems(served: Served) -> list[str]:
    """What readiness lists."""
    return list(served.http.get("/health/ready").json()["problems"])


def test_a_start_without_the_engine_takes_writes_and_answers_when_it_is_back(
    running_engine: Any, elsewhere: Settings, served: Served, kind: str
) -> None:
    path = gallery_there(served, kind, 40)
    running_engine.stop(signal.SIGKILL)
    try:
        with serving(elsewhere) as again:
            body = {"version": "v1", "embeddings": QUERIES.tolist(), "k": 7}
            assert again.http.get(path).json()["items"] == 40
            put(again, path, range(40, COUNT))
            problem(again.http.post(f"{path}/query", json=body), 503, "engine_unavailable")
            assert sum(head for head, _ in lies(again, path).values()) == COUNT - 40
            until(lambda: ["gallery g: " in problem and "\n" not in problem for problem in problems(again)] == [True])
            running_engine.start()
            until(lambda: lies(again, path) == {("v1", "supplied"): (0, COUNT)})
            until(lambda: problems(again) == [])
            assert ask(again, path) == ask(served, path)
    finally:
        running_engine.stop(signal.SIGKILL)
        running_engine.start()


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


def test_while_the_engine_hangs_queries_say_so_at_once_writes_go_on_and_nothing_is_lost(
    running_engine: Any, served: Served, kind: str
) -> None:
    paths = both(served, kind)
    for path in paths:
        put(served, path, range(40))
    until(lambda: lies(served, paths[0]) == {("v1", "supplied"): (0, 40)})
    served.deploy(paths[0], "v2")
    body = {"version": "v2", "embeddings": padded(QUERIES).tolist(), "k": 7}
    until(lambda: [one["lag"] for one in served.http.get(paths[0]).json()["collections"]] == [0])
    running_engine.freeze()
    try:
        times = []
        for _ in range(3):
            started = time.monotonic()
            problem(served.http.post(f"{paths[0]}/query", json=body), 503, "engine_unavailable")
            times.append(time.monotonic() - started)
        assert max(times) < 4.5
        assert min(times) < 0.5
        put(served, paths[0], range(50, COUNT), "v2", 6)
        told = served.http.post(f"{paths[0]}/query", json=body)
        assert told.status_code == 200, told.text
        assert [(d["version"], d["items"]) for d in told.json()["degraded"]] == [("v1", 40)]
        assert {m["id"] for m in told.json()["results"][0]["matches"]} <= {f"i{n}" for n in range(50, COUNT)}
        problem(served.http.post(f"{paths[0]}/query", json={**body, "strict": True}), 503, "engine_unavailable")
        collections = {one["version"]: one for one in served.http.get(paths[0]).json()["collections"]}
        assert collections["v1"] == {"version": "v1", "origin": "supplied", "lag": 10, "here": 0}
        assert collections["v2"]["here"] == 10
        lags = served.http.get(str(served.http.base_url).replace("/v1/", "/metrics")).text
        assert 'regraft_engine_lag{gallery="there",origin="supplied",version="v1"} 10.0' in lags
    finally:
        running_engine.thaw()
    served.deploy(paths[1], "v2")
    put(served, paths[1], range(50, COUNT), "v2", 6)
    until(lambda: lies(served, paths[0]) == {("v1", "supplied"): (0, 40), ("v2", "supplied"): (0, 10)})
    there, here = (ask(served, path, **body) for path in paths)
    assert there == here


def test_an_engine_that_is_killed_again_and_again_loses_nothing(running_engine: Any, served: Served, kind: str) -> None:
    paths = both(served, kind)
    for start in range(0, COUNT, 20):
        for path in paths:
            put(served, path, range(start, start + 20))
        running_engine.stop(signal.SIGKILL)
        time.sleep(0.1)
        running_engine.start()
    until(lambda: lies(served, paths[0]) == {("v1", "supplied"): (0, COUNT)})
    there, here = (ask(served, path) for path in paths)
    assert there == here


def test_rows_that_an_engine_lost_are_found_out_and_written_again(
    engine_there: Engine, served: Served, kind: str
) -> None:
    path = gallery_there(served, kind)
    before = ask(served, path)
    (name,) = {loaded.engine_name for loaded in served.runtime.replica.all()}
    engine_there.drop(name, ("v1", "supplied"))
    # A look comes sooner where something is written.
    served.http.patch(path, json={"index": {"kind": kind, "recall": 0.9}})
    until(lambda: lies(served, path) == {("v1", "supplied"): (0, COUNT)} and ask(served, path) == before)


def test_what_is_retired_deleted_or_moved_leaves_the_engine(
    engine_there: Engine, served: Served, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_writer, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(engine_writer, "LEASE_SECONDS", 0.1)
    gone, moved = gallery(served, "gone", kind), gallery(served, "moved", kind)
    for path in (gone, moved):
        put(served, path, range(5))
        until(lambda: lies(served, path) == {("v1", "supplied"): (0, 5)})  # noqa: B023
    names = {loaded.name: loaded.engine_name for loaded in served.runtime.replica.all()}
    assert served.remove(gone).status_code == 204
    assert served.http.patch(moved, json={"index": {"kind": "auto"}}).status_code == 200
    until(lambda: not engine_there.places(names["gone"]) and not engine_there.places(names["moved"]))
    assert len(ask(served, moved)[1]) == 5


def test_the_doctor_compares_the_engine_with_the_database_and_mends_it(
    running_engine: Any, elsewhere: Settings, served: Served, kind: str
) -> None:
    path = gallery_there(served, kind)
    before = ask(served, path)
    shard = served.runtime.replica.find("g").gallery.remote.shards()["v1", "supplied"]
    collection, keys = shard.collection, shard.remote_rows.keys_R.copy()
    kept, rows = collection.fetch(keys[3:4])
    collection.delete(keys[:4], np.full(4, 1_000))
    collection.upsert(kept._replace(digests_N=digests(rows + 1)), rows + 1)
    collection.upsert(kept._replace(keys_N=np.array([10_000])), rows)

    def examined(fix: bool = False) -> dict[str, tuple[int, int]]:
        with closing(Database(elsewhere.database_url)) as database:
            found = Doctor(elsewhere, database).examine(fix=fix)
        return {one.code: (one.count, one.fixed) for one in found if one.code.startswith("engine")}

    assert examined() == {"engine_rows_missing": (4, 0), "engine_rows_unknown": (1, 0)}
    assert examined(fix=True) == {"engine_rows_missing": (4, 4), "engine_rows_unknown": (1, 1)}
    assert examined() == {}
    assert ask(served, path) == before
    running_engine.stop(signal.SIGKILL)
    try:
        assert examined() == {"engine_away": (1, 0)}
    finally:
        running_engine.start()


def test_a_service_on_postgresql_needs_no_other_setting(url: str, tmp_path: Path) -> None:
    with serving(Settings(data=tmp_path / "data", database_url=url)) as served:
        assert served.register(make_version(tmp_path / "v1", "v1", 4, encoder=False)).status_code == 201
        path = gallery(served, "g", "pgvector")
        put(served, path, range(20))
        until(lambda: lies(served, path) == {("v1", "supplied"): (0, 20)})
        assert len(ask(served, path)[1]) == 7
