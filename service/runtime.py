"""What one process of the service holds: made at its start, closed at its end, given to every route."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from index.decoding import Decoder
from index.engines import gpu
from service.backfills.completion import Planner
from service.backfills.embedder import Embedder
from service.backfills.traffic import Traffic
from service.registry.packed_folders import PackedFolders
from service.registry.registry import Registry
from service.replica.engine_writer import EngineWriter
from service.replica.engines import Engines
from service.replica.eviction import EncoderEvictor
from service.replica.indexer import Indexer
from service.replica.preload import Preload
from service.replica.replica import Replica
from service.settings import Settings
from service.store.api_keys import ApiKeys
from service.store.blob_references import open_blobs
from service.store.blobs import Blobs, StoreUnreachable
from service.store.checkpoints import Checkpoints
from service.store.database import Database, is_sqlite, upgrade
from service.store.faults import DiskSpace
from service.store.offloader import Offloader
from service.upgrades.curves.measure import Curves
from service.upgrades.deployments.reaper import Reaper
from service.upgrades.rollouts.monitor import RolloutMonitor

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The parts of a running service."""

    settings: Settings
    database: Database
    blobs: Blobs
    decoder: Decoder
    registry: Registry
    embedder: Embedder
    replica: Replica
    engines: Engines
    preload: Preload
    traffic: Traffic
    rollouts: RolloutMonitor
    curves: Curves
    planner: Planner
    reaper: Reaper
    keys: ApiKeys
    space: DiskSpace
    threads: ThreadPoolExecutor
    """For what may wait: for an encoder, the database or a gallery that is loaded."""
    changers: ThreadPoolExecutor
    """As many, for what changes something: it may wait long for others, or for the store of images."""
    searchers: ThreadPoolExecutor
    """Few, for what computes and waits for nobody: more than there are cores would only take turns."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the server is asked to stop: answers that never end by themselves end then."""
    loading: dict[str, asyncio.Task[object]] = field(default_factory=dict)
    """Galleries that queries wait for, by name; touched on the event loop only."""
    lookers: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    """What looks at a backfill for its watchers, as long as there are some."""
    packed: PackedFolders = field(default_factory=PackedFolders)

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work on one of the service's own threads; cheaper than FastAPI's pool."""
        return await _run(self.threads, partial(work, *args, **kwargs))

    async def in_changer(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same on threads of their own for what changes something, so that no query waits behind it."""
        return await _run(self.changers, partial(work, *args, **kwargs))

    async def in_searcher(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same on the few threads for what computes and waits for nobody."""
        return await _run(self.searchers, partial(work, *args, **kwargs))

    async def loaded(self, name: str) -> None:
        """Have a gallery in memory. Those who ask for it while it is loaded wait for one thread, and take none.

        Raises:
            UnknownGallery: there is none.
        """
        if self.replica.is_loaded(name):
            return
        if (task := self.loading.get(name)) is None:
            task = self.loading[name] = asyncio.create_task(self.in_thread(self.replica.find, name))
            task.add_done_callback(partial(self._was_loaded, name))
        await asyncio.shield(task)  # a client that goes away ends its own wait, not the loading

    def _was_loaded(self, name: str, task: asyncio.Task[object]) -> None:
        del self.loading[name]
        if not task.cancelled():
            task.exception()  # whoever waits raises it; asyncio would log it where nobody does any more


async def _run(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """What it gives on one of these threads, with the context of who asked."""
    return await asyncio.get_running_loop().run_in_executor(threads, copy_context().run, work)


@contextmanager
def running(settings: Settings, *, migrated: bool = False) -> Iterator[Runtime]:
    """Migrate, if that was not done just before, and follow the feed of what is asked for; stop in reverse order."""
    gpu.use(settings.index_device)
    if not migrated:
        upgrade(settings)
    with (
        closing(Database(settings.database_url, settings.connections)) as database,
        ThreadPoolExecutor(settings.threads, "query") as threads,
        ThreadPoolExecutor(settings.threads, "change") as changers,
        ThreadPoolExecutor(settings.search_threads, "search") as searchers,
    ):
        registry = Registry(database, settings)
        # On a server others may write whom this one knows nothing of: what they acknowledged is shown here as well.
        shared = settings.processes > 1 or not is_sqlite(settings.database_url)
        memory = settings.memory // settings.processes
        engines = Engines(settings)
        replica = Replica(
            database, registry, settings.indexes, settings.poll_seconds, memory, shared=shared, elsewhere=engines.of
        )
        rollouts = RolloutMonitor(database, registry, replica)
        blobs = open_blobs(database, settings.blobs_url)
        with suppress(StoreUnreachable):  # told in the log and by readiness; queries need no image
            blobs.check()
        decoder = Decoder(settings.max_image_pixels, settings.max_decoded_bytes)
        embedder = Embedder(registry, blobs, decoder)
        evictor = EncoderEvictor(registry, replica, settings.encoder_idle_seconds)
        indexer, writer = Indexer(replica), EngineWriter(database, registry, replica, engines)
        preload = Preload(database, replica, settings.preloaded)
        traffic = Traffic(database)
        curves = Curves(database, registry, replica, blobs, decoder)
        planner = Planner(database, registry, embedder)
        reaper = Reaper(database, registry, blobs)
        offloader, checkpoints = Offloader(database, blobs, settings.vectors), Checkpoints(database)
        keys = ApiKeys(database)
        with ExitStack() as started:
            started.callback(engines.close)
            for part in (
                replica,
                preload,
                evictor,
                indexer,
                writer,
                rollouts,
                traffic,
                curves,
                planner,
                reaper,
                offloader,
                checkpoints,
                keys,
            ):
                part.start()
                started.callback(part.stop)
            yield Runtime(
                settings=settings,
                database=database,
                blobs=blobs,
                decoder=decoder,
                registry=registry,
                embedder=embedder,
                replica=replica,
                engines=engines,
                preload=preload,
                traffic=traffic,
                rollouts=rollouts,
                curves=curves,
                planner=planner,
                reaper=reaper,
                keys=keys,
                space=DiskSpace(settings.data, settings.min_free_bytes),
                threads=threads,
                changers=changers,
                searchers=searchers,
            )
