"""A gallery is found by its name, also where it is written, replaced or deleted meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from service.errors import UnknownGallery
from service.replica import replica
from service.replica.load_progress import LoadProgress
from service.store.galleries.deletion import delete_gallery
from service.store.galleries.gallery import gallery_named
from staging.inputs.builders import make_version
from staging.states.replicated import ReplicatedWorld as World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, make_version)
    yield made
    made.database.close()


def test_where_clients_write_through_other_processes_a_gallery_is_found_with_what_those_stored(world: World) -> None:
    shared, alone = world.new_replica(shared=True), world.replica
    g = world.create()
    world.store(g, 1, a=[1, 0])
    assert len(shared.find("g").gallery.keys()) == len(alone.find("g").gallery.keys()) == 1

    world.store(g, 1, b=[0, 1])

    assert (len(shared.find("g").gallery.keys()), len(alone.find("g").gallery.keys())) == (2, 1)


def test_a_gallery_is_looked_up_again_only_after_something_was_written(world: World) -> None:
    g = world.create()
    loaded = world.replica.find("g")
    assert world.replica.find_cached("g") is loaded
    world.store(g, 1, a=[1, 0])
    assert world.replica.find_cached("g") is None
    assert world.replica.find("g") is world.replica.find_cached("g") is loaded


def test_a_gallery_that_is_replaced_during_its_lookup_is_looked_up_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = world.create()
    world.replica.find("g")

    def late(connection: Connection, name: str) -> Any:
        row = gallery_named(connection, name)
        with world.database.write() as other:
            delete_gallery(other, g)
        world.create()
        return row

    world.create("h")
    monkeypatch.setattr(replica, "gallery_named", late)
    assert world.replica.find("g").id == g
    monkeypatch.undo()
    assert world.replica.find("g").id > g


def test_a_gallery_that_is_deleted_while_it_is_loaded_is_not_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = world.create()

    def begun(name: str) -> LoadProgress:
        with world.database.write() as connection:
            delete_gallery(connection, g)
        return LoadProgress(name)

    monkeypatch.setattr(replica, "LoadProgress", begun)
    with pytest.raises(UnknownGallery):
        world.replica.find("g")
    assert (world.replica.all(), world.replica.loading()) == ([], [])


def test_a_gallery_of_a_name_used_before_is_another_one(world: World) -> None:
    g = world.create("g")
    world.store(g, 1, a=[1, 0])
    world.replica._poll()
    assert world.replica.find("g").gallery.items_by_version() == {"v1": 1}

    with world.database.write() as connection:
        delete_gallery(connection, g)
    with pytest.raises(UnknownGallery):
        world.replica.find("g")
    again = world.create("g")

    assert again != g
    assert world.replica.find("g").gallery.items_by_version() == {}
    world.replica._poll()
    assert [loaded.id for loaded in world.replica.all()] == [again]
