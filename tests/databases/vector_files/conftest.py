"""Databases whose vectors are moved into files of a few vectors, at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from service.registry.version_records import insert_version
from service.settings import Settings
from service.store.database.migration import upgrade
from staging.inputs.builders import make_version
from staging.states.settling import settled_at_once
from staging.states.vector_site import DIM, Site


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A few vectors are a file, everything has settled, and nothing waits."""
    settled_at_once(monkeypatch, FILE_ROWS=16, SCANNED=12, BLOCK=5)
    settled_at_once(monkeypatch, LEAST_ROWS=4, COUNTED_SECONDS=0.0, LEASE_SECONDS=0.0, PAUSE_SECONDS=0.0)
    monkeypatch.setattr("service.store.vectors.reader.GROUP", 4)
    monkeypatch.setattr("service.store.vectors.parquet.GROUP", 4)
    return monkeypatch


@pytest.fixture
def site(settings: Settings, tmp_path: Path) -> Iterator[Site]:
    upgrade(settings)
    made = Site(settings)
    with closing(made.database):
        with made.database.write() as connection:
            for name in ("v1", "v2"):
                insert_version(connection, make_version(tmp_path / name, name, DIM, encoder=False), [])
        yield made


@pytest.fixture
def moved(site: Site, small: pytest.MonkeyPatch) -> Site:
    """Forty vectors in three files, sixteen at most in each."""
    site.fill()
    site.mover().look()
    assert (site.far(), len(site.there())) == (40, 3)
    return site
