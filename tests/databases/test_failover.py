"""A failover of PostgreSQL to a standby that lacks the last writes, on whose feed numbers others follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import text

from service.replica import snapshots
from service.replica.loaded import LoadedGallery
from service.store.blob_references import open_blobs
from service.store.database import connections
from service.store.galleries.embeddings import embeddings_by_id
from service.store.galleries.snapshots import snapshots_of
from service.store.offloading.offloader import Offloader
from service.store.vectors.codec import to_bytes
from service.store.vectors.files import files
from staging.external.postgres import Server
from staging.inputs.builders import make_version
from staging.states.replicated import ReplicatedWorld
from staging.states.settling import settled_at_once

LOST, KEPT = {"lost1": [0.0, 1.0], "lost2": [0.6, 0.8]}, {f"kept{n}": [1.0, n] for n in range(4)}


@pytest.fixture
def world(own_server: Server, tmp_path: Path) -> Iterator[ReplicatedWorld]:
    made = ReplicatedWorld(tmp_path / "data", make_version, own_server.create())
    with closing(made.database):
        yield made


def told(loaded: LoadedGallery) -> tuple[list[list[int]], dict[int, str]]:
    """The keys of the nearest items to two queries, and the ids of these items."""
    queries = np.array([[1, 0], [0, 1]], np.float32)
    found = loaded.gallery.search("v1", lambda _: queries, 10, encoders=frozenset())
    return found.keys_QK.tolist(), {key: one.id for key, one in found.items.items()}


@pytest.fixture
def outlived(own_server: Server, world: ReplicatedWorld) -> LoadedGallery:
    """A gallery in memory with two lost items, on whose feed numbers another process has stored others since."""
    g = world.create()
    world.store(g, 1, a=[1, 0], b=[1, 0])
    own_server.back_up()
    world.store(g, 1, **LOST)
    loaded = world.replica.find("g")
    assert loaded.gallery.items_by_version() == {"v1": 4}
    own_server.fail_over()
    world.store(g, 1, **KEPT)
    return loaded


def test_changes_that_follow_on_lost_ones_are_served_instead_of_them(
    world: ReplicatedWorld, outlived: LoadedGallery
) -> None:
    world.replica._poll()

    assert world.replica.find("g") is not outlived
    assert told(world.replica.find("g")) == told(world.new_replica().find("g"))
    assert world.replica.find("g").gallery.items_by_version() == {"v1": 6}
    kept = world.replica.find("g")
    world.replica._poll()
    assert world.replica.find("g") is kept


def test_no_snapshot_of_lost_changes_counts(world: ReplicatedWorld, outlived: LoadedGallery) -> None:
    snapshots._write(world.database, outlived)

    with world.database.lookup() as connection:
        assert snapshots_of(connection, outlived.id) == []


def test_vectors_are_read_from_the_file_that_has_the_number_of_a_lost_one(
    own_server: Server, world: ReplicatedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled_at_once(monkeypatch)
    blobs = open_blobs(world.database, world.settings.blobs_url)
    g = world.create()

    def stored_and_moved(vectors: dict[str, list[float]]) -> dict[int, str]:
        """The keys of the files by number, after these vectors have been read from one."""
        world.store(g, 1, **vectors)
        Offloader(world.database, blobs, "objects").look()
        with world.database.read() as connection:
            read = embeddings_by_id(connection, g, list(vectors))
            assert {name: [row.vector for row in rows] for name, rows in read.items()} == {
                name: [to_bytes(np.asarray(vector, np.float32))] for name, vector in vectors.items()
            }
            return {file.id: file.key for file in files(connection)}

    own_server.back_up()
    lost = stored_and_moved(LOST)
    own_server.fail_over()
    kept = stored_and_moved(KEPT)

    assert lost.keys() == kept.keys()
    assert lost != kept


def test_a_server_that_does_not_tell_its_timeline_is_not_asked_again(
    world: ReplicatedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As services that are like PostgreSQL: galleries are reloaded only if their feed is found to be shorter."""
    assert world.database.timeline() == "00000001"
    monkeypatch.setattr(connections, "TIMELINE", text("select no_such_function()"))
    assert world.database.timeline() is None
    monkeypatch.undo()
    assert world.database.timeline() is None
