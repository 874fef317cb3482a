"""The engines elsewhere that this service is told of, and what they know its galleries by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from index.engines.config import IndexKind
from index.engines.remote import Collection, Engine, Metric, OpenCollection, Unreachable, no_engine
from index.errors import InvalidArgument, RegraftError
from index.version import ShardKey
from service.settings import Settings
from service.store.rows import GalleryRow

SETTINGS = {IndexKind.PGVECTOR: "REGRAFT_PGVECTOR_URL", IndexKind.MILVUS: "REGRAFT_MILVUS_URI"}
ALL = list(SETTINGS)


class Engines:
    """Each is opened when it is needed for the first time. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._makers: dict[IndexKind, Callable[[], Engine]] = {}
        if settings.pgvector:
            self._makers[IndexKind.PGVECTOR] = partial(_pgvector, settings)
        if settings.milvus_uri:
            self._makers[IndexKind.MILVUS] = partial(_milvus, settings)
        self._open: dict[IndexKind, Engine] = {}
        self._opening = threading.Lock()

    def any(self) -> bool:
        """Whether it is told of any."""
        return bool(self._makers)

    def get(self, kind: IndexKind) -> Engine:
        """One of them.

        Raises:
            InvalidArgument: it is not configured, or what it needs is not installed.
        """
        with self._opening:
            if kind not in self._open:
                self._open[kind] = self._made(kind)
            return self._open[kind]

    def check(self, kind: IndexKind) -> None:
        """Whether a gallery can lie in it: InvalidArgument, or EngineUnavailable where it does not answer."""
        if kind.is_remote:
            self.get(kind).check()

    def of(self, row: GalleryRow) -> OpenCollection:
        """What opens the collections of a gallery."""
        return partial(self._collection, name_of(row))

    def close(self) -> None:
        """Close their connections."""
        for engine in self._open.values():
            engine.close()

    def _collection(self, gallery: str, kind: IndexKind, place: ShardKey, width: int, metric: Metric) -> Collection:
        try:
            return self.get(kind).collection(gallery, place, width, metric)
        except RegraftError as error:  # the gallery is served without what lies there, and its indexer says why
            return Unreachable(error.message)

    def _made(self, kind: IndexKind) -> Engine:
        if kind not in self._makers:
            here = [kind.value for kind in IndexKind if not kind.is_remote or kind in self._makers]
            why = f"this service has no {kind.value}: set {SETTINGS[kind]}, or take one of {', '.join(here)}"
            raise InvalidArgument(why, pointer="/index/kind")
        try:
            return self._makers[kind]()
        except ImportError as error:
            why = f"{kind.value} needs {error.name}: pip install 'regraft[{kind.value}]'"
            raise InvalidArgument(why, pointer="/index/kind") from error


def no_engines(_: GalleryRow) -> OpenCollection:
    """Of a process that has none."""
    return no_engine


def name_of(row: GalleryRow) -> str:
    """What tells a gallery from any other of any service: numbers and names come again, with the moment they do not."""
    return f"{row.id} {row.name} {row.created!r}"


def _pgvector(settings: Settings) -> Engine:
    from index.engines.pgvector import PgvectorEngine

    return PgvectorEngine(settings.pgvector, settings.engine_seconds)


def _milvus(settings: Settings) -> Engine:
    from index.engines.milvus import MilvusEngine

    token = settings.milvus_token.get_secret_value()
    return MilvusEngine(settings.milvus_uri, token, settings.engine_seconds)
