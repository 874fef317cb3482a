"""The configured external engines (pgvector, Milvus), opened on first use, and the galleries' names in them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from index.engines.config import IndexKind
from index.engines.remote.base import Collection, Engine, Metric, OpenCollection, Unreachable, no_engine
from index.errors import InvalidArgument, RegraftError
from index.version import ShardKey
from service.settings import Settings
from service.store.rows import GalleryRow

SETTINGS = {IndexKind.PGVECTOR: "REGRAFT_PGVECTOR_URL", IndexKind.MILVUS: "REGRAFT_MILVUS_URI"}
ALL = list(SETTINGS)


class Engines:
    """The engines, each opened on first use. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._makers: dict[IndexKind, Callable[[], Engine]] = {}
        if settings.pgvector:
            self._makers[IndexKind.PGVECTOR] = partial(_pgvector, settings)
        if settings.milvus_uri:
            self._makers[IndexKind.MILVUS] = partial(_milvus, settings)
        self._open: dict[IndexKind, Engine] = {}
        self._lock = threading.Lock()

    def any(self) -> bool:
        """Whether any engine is configured."""
        return bool(self._makers)

    def get(self, kind: IndexKind) -> Engine:
        """The engine of a kind.

        Raises:
            InvalidArgument: it is not configured, or its client is not installed.
        """
        with self._lock:
            if kind not in self._open:
                self._open[kind] = self._connect(kind)
            return self._open[kind]

    def unusable(self, kind: IndexKind) -> str | None:
        """Why this process cannot use a kind: its setting or its client is missing; None: it has both."""
        try:
            self.get(kind)
        except InvalidArgument as error:
            return error.message
        return None

    def check(self, kind: IndexKind) -> None:
        """Check an index kind's engine, if it needs one. Raises InvalidArgument, EngineUnavailable."""
        if kind.is_remote:
            self.get(kind).check()

    def of(self, row: GalleryRow) -> OpenCollection:
        """A function that opens the collections of a gallery."""
        return partial(self._collection, name_of(row))

    def close(self) -> None:
        """Close the engines' connections."""
        for engine in self._open.values():
            engine.close()

    def _collection(self, gallery: str, kind: IndexKind, place: ShardKey, width: int, metric: Metric) -> Collection:
        try:
            return self.get(kind).collection(gallery, place, width, metric)
        except RegraftError as error:  # the gallery is served without this shard, which reports the reason
            return Unreachable(error.message)

    def _connect(self, kind: IndexKind) -> Engine:
        if kind not in self._makers:
            available = [kind.value for kind in IndexKind if not kind.is_remote or kind in self._makers]
            why = f"{kind.value} is not configured: set {SETTINGS[kind]}, or use one of {', '.join(available)}"
            raise InvalidArgument(why, pointer="/index/kind")
        try:
            return self._makers[kind]()
        except ImportError as error:
            why = f"{kind.value} requires {error.name}: pip install 'regraft[{kind.value}]'"
            raise InvalidArgument(why, pointer="/index/kind") from error


def no_engines(_: GalleryRow) -> OpenCollection:
    """As `Engines.of`, for a process without engines."""
    return no_engine


def name_of(row: GalleryRow) -> str:
    """The gallery's name in engines; the time of creation makes it unique, as numbers and names are reused."""
    return f"{row.id} {row.name} {row.created!r}"


def _pgvector(settings: Settings) -> Engine:
    from index.engines.pgvector.engine import PgvectorEngine

    return PgvectorEngine(settings.pgvector, settings.engine_seconds)


def _milvus(settings: Settings) -> Engine:
    from index.engines.milvus.engine import MilvusEngine

    token = settings.milvus_token.get_secret_value()
    return MilvusEngine(settings.milvus_uri, token, settings.engine_seconds)
