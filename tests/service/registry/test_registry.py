from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from sqlalchemy.exc import OperationalError

import service.registry.encoders.modalities
from index.encoders.encoder import Encoder
from index.errors import NoEncoder
from index.execution import Execution
from index.version import Version
from index.version_folder.folder import card_sha256, edge_files
from service.errors import UnknownVersion, VersionBroken
from service.registry.edge_records import EdgeOrigin, EdgeRecord, insert_edge
from service.registry.fetched_folders import edge_key, version_key
from service.registry.registry import Registry
from service.registry.version_records import insert_version
from service.settings import Settings
from service.store.database.connections import Database
from service.store.database.migration import upgrade
from service.store.image_store.folders import FolderStore
from staging.inputs.builders import make_version


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = Settings(data=tmp_path / "data")
    upgrade(made)
    return made


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    opened = Database(settings.database_url)
    yield opened
    opened.close()


@pytest.fixture
def add(settings: Settings, database: Database) -> Callable[..., Version]:
    """Register a version as another process would."""

    def register(name: str, *old: tuple[int, Version, str], **options: Any) -> Version:
        made = make_version(settings.versions / name, name, 4, edges=[(v, kind) for _, v, kind in old], **options)
        with database.write() as connection:
            insert_version(connection, made, [number for number, _, _ in old])
        return made

    return register


def test_versions_that_others_register_are_found_by_name_and_by_number(
    settings: Settings, database: Database, add: Callable[..., Version]
) -> None:
    registry = Registry(database, settings)
    v1 = add("v1")
    assert registry.named("v1").version == v1
    add("v2", (1, v1, "identity"))

    assert registry.by_id(2).name == "v2"
    assert [r.name for r in registry.all()] == ["v1", "v2"]
    assert registry.named("v1") is registry.by_id(1)


def test_a_version_is_found_by_its_name_only_once_its_edges_are_known(
    settings: Settings, database: Database, add: Callable[..., Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread that looks meanwhile must not take a version without its edges for a whole one."""
    registry = Registry(database, settings)
    v1 = add("v1")
    registry.sync()
    add("v2", (1, v1, "identity"))
    follow, seen = Registry._follow_edges, []

    def watched(self: Registry, ids: Any) -> None:
        follow(self, ids)
        seen.append("v2" in self._by_name)

    monkeypatch.setattr(Registry, "_follow_edges", watched)

    assert registry.named("v2").name == "v2"
    assert seen == [False]
    assert [edge.edge.key for edge in registry.edges()] == [("v2", "v1", "identity")]


def test_an_unknown_name_is_answered_with_the_known_ones(
    settings: Settings, database: Database, add: Callable[..., Version]
) -> None:
    add("v1")

    with pytest.raises(UnknownVersion, match=r"'v7' is not registered \(registered: v1\)"):
        Registry(database, settings).named("v7")


@pytest.mark.parametrize("missing", ["version", "edge"])
def test_what_a_store_did_not_give_is_asked_for_again_once_it_answers(
    settings: Settings, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    far = settings.model_copy(update={"blobs_url": f"memory://{tmp_path}"})
    v1 = make_version(far.versions / "v1", "v1", 4)
    v2 = make_version(far.versions / "v2", "v2", 4, edges=[(v1, "matrix")])
    with database.write() as connection:
        insert_version(connection, v1, [])
        insert_version(connection, replace(v2, edges=()), [])
        files = edge_files(v2.card, "v1")
        insert_edge(connection, 2, 1, EdgeRecord(v2.edges[0], EdgeOrigin.FITTED, files=files), "fitted")
    shutil.copytree(v2.folder / "edges" / "v1", far.edges / "fitted")
    away, key = {"version": (v2.folder, version_key(card_sha256(v2.folder))), "edge": (far.edges / "fitted", "")}[
        missing
    ]
    FolderStore(far.blobs_url, lambda: None).put(away, key or edge_key("fitted"))
    shutil.rmtree(away)

    def no_answer(*_: Any, **__: Any) -> None:
        raise ConnectionError

    def database_away(_: Database) -> None:
        raise OperationalError("", {}, Exception())

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", no_answer)
        registry = Registry(database, far)
        registry.sync()
        registry.retry_unreached()
    with monkeypatch.context() as patch:
        patch.setattr(Database, "lookup", database_away)
        registry.retry_unreached()  # the network brings back neither
    problems = (registry.named("v2").problem, registry.edges()[0].problem)
    assert bool(problems[missing == "edge"])

    registry.retry_unreached()

    assert (registry.named("v2").problem, registry.edges()[0].problem) == ("", "")
    assert registry.route("v2", "v1")


def test_a_version_recovers_beside_others_that_were_registered_since(
    settings: Settings, database: Database, add: Callable[..., Version]
) -> None:
    """A worker syncs only when it meets an unknown version: it does not know the ends of all edges."""
    v1 = add("v1")
    lost = v1.folder.rename(v1.folder.with_name(".lost"))
    registry = Registry(database, settings)
    assert registry.named("v1").problem
    add("v2", (1, replace(v1, folder=lost), "identity"))
    lost.rename(v1.folder)

    registry.retry(registry.named("v1"))

    assert registry.named("v1").problem == ""
    registry.sync_edges()
    assert [edge.edge.key for edge in registry.edges()] == [("v2", "v1", "identity")]


def test_routes_go_by_edges_and_by_old_encoders(
    settings: Settings, database: Database, add: Callable[..., Version]
) -> None:
    v1 = add("v1")
    v2 = add("v2", (1, v1, "identity"))
    add("v3", (2, v2, "truncate"))
    add("other", encoder=False)
    registry = Registry(database, settings)
    registry.sync()

    def kinds(new: str, old: str) -> tuple[str, ...] | None:
        route = registry.route(new, old)
        return None if route is None else route.kinds

    assert kinds("v3", "v1") == ("truncate", "identity")
    assert kinds("v1", "v1") == ()
    assert kinds("v1", "v3") == ("dual",)
    assert kinds("v1", "other") is None
    assert registry.encoders() == {"v1", "v2", "v3"}


def test_an_encoder_is_loaded_once_and_when_it_is_needed(
    settings: Settings, database: Database, add: Callable[..., Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    add("v1")
    add("bare", encoder=False)
    loads: list[str] = []

    def counting(version: Version, execution: Execution) -> Encoder:
        loads.append(version.name)
        return Encoder(version, execution)

    monkeypatch.setattr(service.registry.encoders.modalities, "Encoder", counting)
    registry = Registry(database, settings)
    registry.sync()
    assert loads == []

    threads = [threading.Thread(target=lambda: registry.named("v1").encoder(), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert loads == ["v1"]
    with pytest.raises(NoEncoder):
        registry.named("bare").encoder()


def test_a_folder_that_changed_is_set_aside_and_named(
    settings: Settings, database: Database, add: Callable[..., Version]
) -> None:
    made, _ = add("v1"), add("v2")
    (made.folder / "encoder.onnx").write_bytes(b"other")
    registry = Registry(database, settings)

    registry.sync()

    assert ("encoder.onnx" in registry.named("v1").problem, registry.named("v2").problem) == (True, "")
    assert registry.encoders() == {"v2"}
    with pytest.raises(VersionBroken, match=r"'v1' .* encoder\.onnx"):
        registry.named("v1").encoder()
