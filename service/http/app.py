"""The HTTP application: `create_app` builds it, `serve` runs it until a signal."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from socket import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from index.garbage_collection import gc_paused
from index.incoming import sweep
from service.http import openapi
from service.http.backfills import backfills, failures, progress, remote_workers
from service.http.galleries import galleries, items, stored_embeddings
from service.http.operation import audit, health, keys, metrics
from service.http.operation.metrics import RequestMetrics
from service.http.pages import console, reference
from service.http.search import search
from service.http.search.query_route import QueryRoute
from service.http.server import faults, problems
from service.http.server.auth import Guard, check_exposure
from service.http.server.draining import Server
from service.http.server.http_protocol import HttpProtocol
from service.http.upgrades import deployments, edge_fits, edges, evaluations, gates, versions
from service.logs import configure
from service.runtime import running
from service.settings import Settings

# Matched in this order for every request, so queries are first.
ROUTERS = (
    search.router,
    health.router,
    galleries.router,
    versions.router,
    edges.router,
    edge_fits.router,
    items.router,
    stored_embeddings.router,
    evaluations.router,
    gates.router,
    deployments.router,
    backfills.router,
    progress.router,
    failures.router,
    remote_workers.router,
    keys.router,
    audit.router,
)

SWITCH_SECONDS = 0.001
"""How long a thread may hold the GIL when another wants it."""
FULL_COLLECTION = 100
"""Collections of the middle generation before one of all objects; Python's default is 10."""
IDLE_SECONDS = 75
"""How long a connection may be idle between two requests. A request sent while it is closed gets no response, so this
is longer than clients and proxies keep idle connections: httpx 5 seconds, most load balancers 60."""
NOT_STARTED = 3
"""Exit code if the server could not listen on its address."""


class Application(FastAPI):
    """FastAPI behind the fast path of queries, which bypasses the framework."""

    def __init__(self, settings: Settings, **options: Any) -> None:
        """`options`: FastAPI's own."""
        super().__init__(**options)
        self.metrics = RequestMetrics()
        self._queries = QueryRoute(super().__call__, self, settings, self.metrics.count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._queries(scope, receive, send)


def create_app(settings: Settings, *, migrated: bool = False) -> FastAPI:
    """The application; it opens its database at its start, migrating it unless `migrated`, and closes it at its end."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        sweep(settings.versions)
        sweep(settings.edges)
        _compile_routes(app)
        process = running(settings, migrated=migrated)
        app.state.runtime = await run_in_threadpool(process.__enter__)
        try:
            with suppress(asyncio.CancelledError):  # the user forces the end, of which uvicorn would log a traceback
                yield
        finally:
            await run_in_threadpool(process.__exit__, None, None, None)

    # No redirects to paths without a trailing slash: an item's path that a proxy shortened would become a gallery's.
    app = Application(
        settings,
        title="Regraft",
        version=health.VERSION,
        lifespan=life,
        separate_input_output_schemas=False,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=openapi.operation_id,
        redirect_slashes=False,
    )
    app.add_middleware(Guard, settings=settings, count=app.metrics.count)
    problems.install(app)
    faults.install(app)
    openapi.install(app, settings)
    for router in ROUTERS:
        app.include_router(router, prefix="/v1")
    app.include_router(metrics.router)
    app.include_router(console.router)
    app.include_router(reference.router)
    return app


def serve(
    settings: Settings, listener: socket | None = None, listening: Callable[[int], None] = lambda _: None
) -> None:
    """Serve from a migrated database until SIGTERM or SIGINT, then let running requests end.

    `listener`: a socket shared with other processes. `listening` is called with the port once it is open.

    Raises:
        ExposedWithoutKey: the address is reachable from elsewhere and no key is set.
    """
    check_exposure(settings)
    configure(settings.log_format, settings.log_level)
    signal.signal(signal.SIGTERM, _ended)
    app = create_app(settings, migrated=True)
    _share_interpreter()
    _open_many_files()
    # Nothing here depends on the address or scheme of a request, so no header of a proxy has to be trusted.
    options: dict[str, Any] = {"access_log": False, "log_config": None, "proxy_headers": False}
    # No route is a WebSocket: a connection that becomes one would leave HttpProtocol with its limits, before any key is
    # checked, and never be forgotten by it.
    options |= {"http": HttpProtocol, "ws": "none", "timeout_keep_alive": IDLE_SECONDS}
    config = uvicorn.Config(app, host=settings.host, port=settings.port, **options)
    server = Server(config, app, shared=listener is not None, listening=listening)
    with suppress(KeyboardInterrupt):
        server.run(None if listener is None else [listener])
    if not server.started:
        sys.exit(NOT_STARTED)


def _compile_routes(app: FastAPI) -> None:
    """Compile the routes now: FastAPI would do it at the first request, which would delay all others for 0.1 s."""
    with gc_paused():
        for route in app.routes:
            route.matches({"type": "http", "method": "GET", "path": "/nowhere", "headers": [], "root_path": ""})


def _share_interpreter() -> None:
    """Limit how long a thread holds the GIL, as queries wait while another request is computed in Python.

    A full garbage collection holds the GIL in proportion to the objects it visits. Imported objects stay forever, so
    they are frozen, that is never visited. Full collections of the others are so rare that even a request of a million
    numbers hardly meets one.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION)
    sys.setswitchinterval(SWITCH_SECONDS)


def _open_many_files() -> None:
    """Raise the limit of open files to its maximum: each larger file of a form takes one, and a batch has thousands.

    The default limit is low only for programs that use `select`.
    """
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system that refuses the maximum that it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _ended(number: int, frame: FrameType | None) -> None:
    """Ignore the signal that stopped uvicorn, which it raises again at its end, when everything is closed."""
