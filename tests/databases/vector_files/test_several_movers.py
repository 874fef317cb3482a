"""Several processes that could move vectors: one does, and a lost lease moves nothing twice."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from service.store.galleries.gallery import insert_gallery
from service.store.galleries.items import rows_of
from service.store.image_store.blobs import Blobs
from service.store.leases.jobs import acquire_job
from service.store.offloading import moves, offloader
from service.store.vectors.files import files
from staging.states.vector_site import DIM, IDS, V1, Site


def test_who_lost_the_lease_while_he_wrote_a_file_moves_nothing_twice(site: Site, small: pytest.MonkeyPatch) -> None:
    site.fill()
    put, other = Blobs.put, site.mover()

    def while_another_moves(self: Blobs, key: str, content: bytes) -> None:
        small.setattr(Blobs, "put", put)
        put(self, key, content)
        other.look()

    small.setattr(Blobs, "put", while_another_moves)
    site.mover().look()
    site.check([1])
    site.mover().look()
    assert list(site.there().values()) == ["kept"] * 3
    assert site.far() == 40


def test_an_upload_that_takes_longer_than_the_lease_is_dropped_by_nobody(site: Site, small: pytest.MonkeyPatch) -> None:
    small.setattr(offloader, "LEASE_SECONDS", 0.8)
    site.fill()
    put, other = Blobs.put, site.mover()

    def slow_put(self: Blobs, key: str, content: bytes) -> None:
        put(self, key, content)
        time.sleep(1.2)
        with small.context() as patch:
            patch.setattr(Blobs, "put", put)
            other.look()

    small.setattr(Blobs, "put", slow_put)
    site.mover().look()

    assert list(site.there().values()) == ["kept"] * 3
    assert site.far() == 40


@pytest.mark.parametrize(
    ("yes", "states", "far"), [(0, [], 0), (1, ["writing"], 0), (2, ["kept"], 5), (3, ["kept"], 10)]
)
def test_who_may_not_go_on_uploads_nothing_more_and_moves_no_further_block(
    site: Site, small: pytest.MonkeyPatch, yes: int, states: list[str], far: int
) -> None:
    site.fill()
    with site.database.read() as connection:
        found = rows_of(connection, 1, IDS)
    answers = [True] * yes

    moves.offload(
        site.database,
        site.blobs,
        (1, V1),
        [row.id for row in found][:16],
        max(row.seq for row in found),
        4,
        lambda: bool(answers) and answers.pop(),
    )

    assert (list(site.there().values()), site.far()) == (states, far)
    site.check([1])


def test_a_file_that_rows_came_to_speak_of_while_another_process_looked_for_lost_ones_stays(
    site: Site, small: pytest.MonkeyPatch
) -> None:
    site.fill()
    put, look = Blobs.put, files
    seen, moved = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        found = look(*args)
        seen.set()
        moved.wait(60)
        return found

    other = threading.Thread(target=lambda: moves.sweep(site.database, site.blobs))

    def while_another_looks(self: Blobs, key: str, content: bytes) -> None:
        small.setattr(Blobs, "put", put)
        put(self, key, content)
        small.setattr(moves, "files", slow)
        other.start()
        seen.wait(60)
        small.setattr(moves, "files", look)

    small.setattr(Blobs, "put", while_another_looks)
    site.mover().look()
    moved.set()
    other.join()
    assert list(site.there().values()) == ["kept"] * 3
    site.check([1])


def test_one_process_moves_vectors(site: Site, small: pytest.MonkeyPatch) -> None:
    small.setattr(offloader, "LEASE_SECONDS", 60.0)
    with site.database.write() as connection:
        insert_gallery(connection, "g")
    first, second = site.mover(), site.mover()
    first.look()
    site.write(1, IDS, np.ones((len(IDS), DIM), np.float32))
    for _ in range(2):
        second.look()
    assert site.far() == 0
    for _ in range(2):  # what was there at the look before has settled
        first.look()
    assert site.far() == 40


def test_vectors_that_could_not_be_moved_for_want_of_the_lease_are_moved_once_it_is_back(
    site: Site, small: pytest.MonkeyPatch
) -> None:
    site.fill()
    mover, answers = site.mover(), [True, True, False]
    small.setattr(offloader, "acquire_job", lambda *given: answers.pop(0) if answers else acquire_job(*given))
    for _ in range(2):
        mover.look()
    assert site.far() == 40
