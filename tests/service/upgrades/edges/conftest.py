"""Versions, items and edges to speak about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from index.version import Version
from staging.api.edges import edges, key, moved_to, remove
from staging.inputs.builders import image_bytes, make_image
from staging.states.working import SteppedWorker


@pytest.fixture(scope="module")
def more(served: Any) -> dict[str, Version]:
    """`other` has no edges, `twin` is v1 by another name, `near` almost, `third` leads to v2 and v1, `fct` carries v1.

    `bare` and `bare2` take embeddings only.
    """
    made = [
        served.add("other", 5, seed=9),
        served.add("twin", 4),
        served.add("near", 4, drift=0.05),
        served.add("third", 4, seed=3, edges=[("v2", "matrix", 0.9), ("v1", "matrix", 0.7)]),
        served.add("fct", 4, seed=4, edges=[("v1", "forward")]),
        served.add("bare", 3, encoder=False),
        served.add("bare2", 3, encoder=False),
    ]
    return {version.name: version for version in made}


@pytest.fixture(autouse=True)
def restored(served: Any, more: dict[str, Version]) -> Iterator[None]:
    """Each test finds the edges that were registered, and none else."""
    kept = {key(edge) for edge in edges(served)}
    yield
    for edge in edges(served):
        if key(edge) not in kept:
            assert remove(served, *key(edge), force=True, reason="end of a test").status_code == 200


@pytest.fixture
def worker(served: Any) -> Iterator[SteppedWorker]:
    made = SteppedWorker(served.runtime.settings)
    yield made
    made.close()


@pytest.fixture(scope="module")
def held(served: Any, more: dict[str, Version], many: dict[str, bytes]) -> str:
    """A gallery of 60 labelled items that hold embeddings by v1 and by `other`."""
    path = served.gallery("v1")
    for label in range(5):
        some = {name: image for name, image in many.items() if int(name) % 5 == label}
        assert served.ingest(path, some, label=label).json()["failed"] == 0
    worker = SteppedWorker(served.runtime.settings)
    moved_to(served, worker, path, "other")
    worker.close()
    return str(path)


@pytest.fixture(scope="module")
def many() -> dict[str, bytes]:
    """Sixty images by name; number n is of class n % 5."""
    return {str(number): image_bytes(make_image(number % 5, number)) for number in range(60)}
