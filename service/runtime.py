"""What one process of the service holds: made at its start, closed at its end, reached by every route as `Service`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Annotated, Any, ParamSpec, TypeVar, cast
from weakref import WeakValueDictionary

from fastapi import Depends, Request

from index.decoding import Decoder
from service.backfills.moving import Mover
from service.backfills.traffic import Traffic
from service.registry.registry import Catalog
from service.replica.eviction import Rester
from service.replica.replica import Replica
from service.settings import Settings
from service.store.blob_references import open_blobs
from service.store.blobs import Blobs, StoreUnreachable
from service.store.database import Database, upgrade
from service.store.faults import Space
from service.upgrades.curves.measure import Curves
from service.upgrades.deployments.freeing import Freeing
from service.upgrades.rollouts.monitor import Watch

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """The parts of a running service."""

    settings: Settings
    database: Database
    blobs: Blobs
    decoder: Decoder
    catalog: Catalog
    mover: Mover
    replica: Replica
    traffic: Traffic
    watch: Watch
    curves: Curves
    freeing: Freeing
    space: Space
    threads: ThreadPoolExecutor
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the server is asked to stop: answers that never end by themselves end then."""
    lookers: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    """What looks at a backfill for its watchers, as long as there are some."""

    async def hop(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work on one of the service's own threads; cheaper than FastAPI's pool."""
        run = copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self.threads, lambda: run(work, *args, **kwargs))


@contextmanager
def running(settings: Settings) -> Iterator[Runtime]:
    """Migrate, load every gallery, follow the feed; stop in reverse order."""
    upgrade(settings)
    settings.versions.mkdir(exist_ok=True)
    with closing(Database(settings.database_url)) as database, ThreadPoolExecutor(settings.threads, "query") as threads:
        catalog = Catalog(database, settings)
        replica = Replica(database, catalog, settings.poll_seconds)
        watch = Watch(database, catalog, replica)
        blobs = open_blobs(database, settings.blobs_url)
        with suppress(StoreUnreachable):  # told in the log and by readiness; queries need no image
            blobs.check()
        decoder = Decoder(settings.max_image_pixels, settings.max_decoded_bytes)
        mover = Mover(catalog, blobs, decoder)
        rester = Rester(catalog, replica, settings.encoder_idle_seconds)
        traffic = Traffic(database)
        curves = Curves(database, catalog, replica, blobs, decoder)
        freeing = Freeing(database)
        with ExitStack() as started:
            for part in (replica, rester, watch, traffic, curves, freeing):
                part.start()
                started.callback(part.stop)
            space = Space(settings.data, settings.min_free_bytes)
            yield Runtime(
                settings,
                database,
                blobs,
                decoder,
                catalog,
                mover,
                replica,
                traffic,
                watch,
                curves,
                freeing,
                space,
                threads,
            )


async def runtime_of(request: Request) -> Runtime:
    """The runtime of the application that got the request; async, or FastAPI would hop to a thread for it."""
    return cast(Runtime, request.app.state.runtime)


Service = Annotated[Runtime, Depends(runtime_of)]
