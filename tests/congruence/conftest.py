"""Exports are of small modules, as in tests/training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def exporter_read_once() -> Iterator[None]:
    from staging.inputs.recipes import torchlib_read_once

    with torchlib_read_once():
        yield
