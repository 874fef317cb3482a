"""Random writes, and a process killed at every point of moving vectors into files and back."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from service.store.galleries.gallery import insert_gallery
from service.store.image_store.blobs import Blobs
from service.store.offloading import moves, offloader
from staging.states.vector_site import DIM, GALLERIES, IDS, Site, written_meanwhile


class Killed(BaseException):
    """Nothing after it is done: as kill -9 leaves the database and the store."""


def killed_in(patch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
    work: Callable[..., Any] = getattr(owner, name)

    def dying(*args: Any, **named: Any) -> Any:
        if after:
            work(*args, **named)
        raise Killed

    patch.setattr(owner, name, dying)


READ = [(moves, "read_from_database"), (Blobs, "put"), (moves, "read_vectors")]


POINTS = [
    (moves, "begin_file", False),
    (Blobs, "put", False),  # its row is there, and it is not
    (Blobs, "put", True),  # it is there, and no row speaks of it
    (moves, "_put_locations", True),  # within the transaction that takes vectors out
    (offloader, "set_counted", True),  # rows speak of it, and are counted
    (moves, "_put_vectors", True),
    (moves, "drop_file", True),
    (Blobs, "remove", False),  # before the sweep of a file, and behind it
    (Blobs, "remove", True),
    (moves, "forget_file", True),
]


@pytest.mark.parametrize(
    ("seed", "steps"), [(1, 12), *(pytest.param(seed, 80, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_every_vector_is_there_bit_by_bit_whatever_is_written_and_killed(
    site: Site, small: pytest.MonkeyPatch, seed: int, steps: int
) -> None:
    random, numbers = Random(seed), np.random.default_rng(seed)
    with site.database.write() as connection:
        galleries = [insert_gallery(connection, name) for name in GALLERIES]
    mover, most = site.mover(), 0

    def write() -> None:
        gallery, ids = random.choice(galleries), random.sample(IDS, random.randint(1, 20))
        vectors = numbers.normal(size=(len(ids), DIM)).astype(np.float32)
        random.choice((site.write, site.write, site.add, site.delete))(gallery, ids, vectors)

    for _ in range(steps):
        write()
        with pytest.MonkeyPatch.context() as patch:
            written_meanwhile(patch, *random.choice(READ), write)
            for _ in range(random.randint(0, 2)):
                mover.look()
        if random.random() < 0.5:
            owner, name, after = random.choice(POINTS)
            with pytest.MonkeyPatch.context() as patch:
                killed_in(patch, owner, name, after=after)
                try:
                    mover.look()
                except Killed:
                    mover = site.mover(random.choice(("objects", "objects", "sql")))
        if random.random() < 0.3:
            site.check(galleries)
        most = max(most, site.far())
    site.check(galleries)
    assert most >= 12

    for _ in range(3):  # what was left over is swept, and nothing else
        site.mover().look()
    assert set(site.there().values()) == {"kept"}
    assert {key for key, _ in site.blobs.all_vector_files()} == set(site.there())
    site.check(galleries)

    mover = site.mover("sql")
    for _ in range(2):
        mover.look()
    assert (site.far(), site.there(), list(site.blobs.all_vector_files())) == (0, {}, [])
    site.check(galleries)
