"""A server with both keys, and galleries with a backfill in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from index.version import Version
from service.settings import Settings
from staging.api.served import serving
from staging.api.work import KEY, WORKER_KEY
from staging.inputs.builders import make_version


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version]) -> Iterator[Any]:
    """A server with both keys; `fct` has an item edge from `sided`, which keeps side-information."""
    root = tmp_path_factory.mktemp("remote")
    sided = make_version(root / "sided", "sided", 3, side_dim=4)
    fct = make_version(root / "fct", "fct", 5, edges=[(sided, "forward")])
    settings = Settings(data=root / "data", api_key=KEY, worker_key=WORKER_KEY)
    with serving(settings, authorization=f"Bearer {KEY}") as running:
        for version in (versions["v1"], versions["v2"], sided, fct):
            assert running.register(version).status_code == 201
        yield running


@pytest.fixture
def filled(keyed: Any, pictures: list[bytes]) -> Callable[..., tuple[str, int]]:
    def fill(old: str = "v1", new: str = "v2", **fields: Any) -> tuple[str, int]:
        path = keyed.filled(pictures, old, new)
        return path, keyed.backfill(path, **{"chunk_size": 6, **fields})

    return fill
