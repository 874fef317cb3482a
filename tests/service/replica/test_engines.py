"""Configured engines: opened once, on first use; what is missing for one is named, and its shards are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from index.engines.config import IndexKind
from index.engines.remote.base import EngineUnavailable, Metric, Unreachable
from index.errors import InvalidArgument
from service.replica import engines
from service.replica.engines import Engines
from service.settings import Settings
from service.store.rows import GalleryRow
from staging.external.fake_engine import FakeCollection, FakeEngine

GALLERY = GalleryRow(1, "g", 1, 1, 2.5, None, None, 0, 0, None)
PLACE = ("v1", "encoded")


class Opened(FakeEngine):
    """Counts how often it is closed; `away`: its server does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.away, self.closed = False, 0

    def check(self) -> None:
        if self.away:
            raise EngineUnavailable

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    made: list[Opened] = []
    monkeypatch.setattr(engines, "_pgvector", lambda _: made.append(Opened()) or made[-1])
    return made


@pytest.fixture
def configured(tmp_path: Path, opened: list[Opened]) -> Engines:
    return Engines(Settings(data=tmp_path, pgvector_url="postgresql://nowhere/x"))


def test_each_is_opened_once_on_first_use_and_closed(configured: Engines, opened: list[Opened]) -> None:
    assert configured.any()
    configured.check(IndexKind.HNSW)
    configured.close()
    assert opened == []

    assert configured.get(IndexKind.PGVECTOR) is configured.get(IndexKind.PGVECTOR)
    configured.close()

    assert [engine.closed for engine in opened] == [1]


def test_each_kind_has_its_own(tmp_path: Path, opened: list[Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    milvus = FakeEngine()
    monkeypatch.setattr(engines, "_milvus", lambda _: milvus)
    made = Engines(Settings(data=tmp_path, pgvector_url="postgresql://nowhere/x", milvus_uri="http://nowhere"))
    assert [made.get(kind) for kind in engines.ALL] == [*opened, milvus]


def test_the_server_is_checked_for_kinds_that_need_it(configured: Engines, opened: list[Opened]) -> None:
    configured.check(IndexKind.PGVECTOR)
    opened[0].away = True
    configured.check(IndexKind.IVF)
    with pytest.raises(EngineUnavailable):
        configured.check(IndexKind.PGVECTOR)


def test_collections_belong_to_one_life_of_a_gallery(configured: Engines) -> None:
    again = GALLERY._replace(created=3.5)
    first, second, other = (
        configured.of(gallery)(IndexKind.PGVECTOR, PLACE, 2, Metric.L2) for gallery in (GALLERY, GALLERY, again)
    )

    assert isinstance(first, FakeCollection)
    assert first is second is not other


@pytest.mark.parametrize(
    ("configuration", "legal"),
    [({}, "auto, exact, hnsw, ivf"), ({"pgvector_url": "postgresql://nowhere/x"}, "auto, exact, hnsw, ivf, pgvector")],
)
def test_one_that_is_not_configured_is_named_with_the_legal_kinds(
    tmp_path: Path, opened: list[Opened], configuration: dict[str, Any], legal: str
) -> None:
    made = Engines(Settings(data=tmp_path, **configuration))
    assert made.any() is bool(configuration)
    with pytest.raises(InvalidArgument, match=f"REGRAFT_MILVUS_URI.* {legal}$") as told:
        made.get(IndexKind.MILVUS)
    assert told.value.pointer == "/index/kind"
    assert isinstance(made.of(GALLERY)(IndexKind.MILVUS, PLACE, 2, Metric.L2), Unreachable)


def test_one_whose_client_is_not_installed_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: Settings) -> Any:
        raise ModuleNotFoundError(name="psycopg")

    monkeypatch.setattr(engines, "_pgvector", absent)
    made = Engines(Settings(data=tmp_path, pgvector_url="postgresql://nowhere/x"))
    with pytest.raises(InvalidArgument, match=r"psycopg.*regraft\[pgvector\]") as told:
        made.check(IndexKind.PGVECTOR)
    assert told.value.pointer == "/index/kind"
