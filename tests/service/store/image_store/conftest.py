"""Image stores for these tests: in a folder, in memory, and on an S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.store.image_store.blobs import Blobs
from staging.external.s3 import ObjectStore, reachable_object_store


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStore]:
    with reachable_object_store() as running:
        yield running


@pytest.fixture(params=["file", "memory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "s3":
        return Blobs(request.getfixturevalue("s3").bucket(), list, str)
    return Blobs(f"{request.param}://{tmp_path / 'blobs'}", list, str)
