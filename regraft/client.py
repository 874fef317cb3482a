"""`Client` and `AsyncClient`: one method per route, which returns a model of `regraft.models` (docs/http-api.md).

with Client("http://127.0.0.1:8080") as client:
    client.create_gallery("shoes")
    client.register_version(Path("examples/v1"))
    client.deploy("shoes", "v1")
    client.ingest("shoes", [ImageItem("a", Path("a.png").read_bytes(), {"label": "boot"})])
    client.query("shoes", [Path("b.png").read_bytes()], k=1).results[0].matches[0].id

async with AsyncClient("http://127.0.0.1:8080") as client:
    answer = await client.query("shoes", [Path("b.png").read_bytes()], k=1)
    async for progress in client.watch_backfill(7):
        print(progress.remaining)
"""

from __future__ import annotations

from regraft.connection import (
    DEFAULT_URL,
    AsyncConnection,
    Json,
    Problem,
    SyncConnection,
    TimedOut,
    UnexpectedAnswer,
    Unreachable,
)
from regraft.inputs import InvalidInput
from regraft.routes.backfills import BackfillRoutes
from regraft.routes.edges import EdgeRoutes
from regraft.routes.galleries import GalleryRoutes
from regraft.routes.items import ImageItem, ItemRoutes, TextItem
from regraft.routes.keys import KeyRoutes
from regraft.routes.queries import DEFAULT_K, QueryOptions, QueryRoutes
from regraft.routes.route import define_methods
from regraft.routes.upgrades import UpgradeRoutes
from regraft.routes.versions import VersionRoutes
from regraft.routes.work import WorkRoutes

__all__ = [
    "DEFAULT_K",
    "DEFAULT_URL",
    "AsyncClient",
    "Client",
    "ImageItem",
    "InvalidInput",
    "Json",
    "Problem",
    "QueryOptions",
    "TextItem",
    "TimedOut",
    "UnexpectedAnswer",
    "Unreachable",
]


class Routes(
    GalleryRoutes,
    VersionRoutes,
    ItemRoutes,
    QueryRoutes,
    UpgradeRoutes,
    EdgeRoutes,
    BackfillRoutes,
    KeyRoutes,
    WorkRoutes,
):
    """All routes of the API; each method is written once for both clients (`regraft.routes.route`)."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        define_methods(cls)


class Client(SyncConnection, Routes):
    """A client of one service, with the methods of `Routes`. See `Connection` for arguments and errors.

    Thread-safe, and safe to use in forked processes.

    Items and queries are checked before they are sent; invalid ones raise InvalidInput.
    """


class AsyncClient(AsyncConnection, Routes):
    """`Client` for an event loop: its methods are awaited, those that watch are iterated by `async for`.

    At most 100 requests are sent concurrently, further ones wait; streams are not counted. Folders are packed on a
    thread.
    """
