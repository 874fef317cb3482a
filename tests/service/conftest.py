"""A real server on a free port, and the versions and galleries the tests speak about."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from index.version import Version
from service.settings import Settings
from staging.api.served import Served, serving
from staging.inputs.builders import image_bytes, make_image, make_version
from staging.logged import log_as_before
from staging.shortcuts import short_starts


@pytest.fixture(scope="module", autouse=True)
def _short_starts() -> Iterator[None]:
    with short_starts(), log_as_before():  # some run a whole worker here, which sets the log up
        yield


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Version]:
    """v1 (dim 4), v2 truncating to it (dim 6), and `plain`, which takes embeddings only and has no edges."""
    root = tmp_path_factory.mktemp("versions")
    v1 = make_version(root / "v1", "v1", 4)
    v2 = make_version(root / "v2", "v2", 6, edges=[(v1, "truncate")])
    plain = make_version(root / "plain", "plain", 3, space={"kind": "l2"}, encoder=False)
    return {version.name: version for version in (v1, v2, plain)}


@pytest.fixture(scope="session")
def data_of_versions(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version]) -> Path:
    """A data folder in which every version is registered."""
    data = tmp_path_factory.mktemp("registered") / "data"
    with short_starts(), serving(Settings(data=data)) as running:
        for version in versions.values():
            assert running.register(version).status_code == 201
    return data


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version], data_of_versions: Path
) -> Iterator[Served]:
    """One server for the tests of a file, with every version registered; each test makes its own gallery."""
    data = tmp_path_factory.mktemp("served") / "data"
    shutil.copytree(data_of_versions, data)
    with serving(Settings(data=data, max_batch=100, max_body_bytes=1 << 20)) as running:
        running.versions.update(versions)
        yield running


@pytest.fixture(scope="session")
def pictures() -> list[bytes]:
    """Twenty PNG files of five classes: number n is of class n % 5."""
    return [image_bytes(make_image(number % 5, number)) for number in range(20)]


@pytest.fixture
def alone(served: Any) -> Iterator[None]:
    """What a test leaves running must not occupy the workers of the next."""
    yield
    served.cancel_backfills()


@pytest.fixture
def keyed_alone(keyed: Any) -> Iterator[None]:
    """What a test leaves running must not occupy the workers of the next."""
    yield
    keyed.cancel_backfills()
