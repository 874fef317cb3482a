"""The parts of one process of the service (`Runtime`), started and stopped by `running`, and given to every route."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from index.encoders.decoding import Decoder
from index.engines.memory import gpu
from service.backfills.embedder import Embedder
from service.backfills.planning import Planner
from service.backfills.traffic import Traffic
from service.background import Background
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
from service.store.database.checkpoints import Checkpoints
from service.store.database.connections import Database, is_sqlite
from service.store.database.migration import upgrade
from service.store.faults import DiskSpace
from service.store.galleries.item_counts import ItemCountCache
from service.store.image_store.blobs import Blobs, StoreUnreachable
from service.store.image_store.recovery import StoreRecovery
from service.store.offloading.offloader import Offloader
from service.upgrades.curves.measure import Curves
from service.upgrades.deployments.reaper import Reaper
from service.upgrades.tombstones import TombstonePurger
from service.upgrades.trials.monitor import TrialMonitor

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
    engine_writer: EngineWriter
    preload: Preload
    traffic: Traffic
    trials: TrialMonitor
    curves: Curves
    planner: Planner
    reaper: Reaper
    keys: ApiKeys
    space: DiskSpace
    blocking_threads: ThreadPoolExecutor
    """For work that may wait: for an encoder, the database or the load of a gallery."""
    write_threads: ThreadPoolExecutor
    """As many, for writes, which may wait long for one another or for the store of images."""
    search_threads: ThreadPoolExecutor
    """Few, for work that computes and never waits: more threads than cores would only take turns."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the server is asked to stop; ends responses that would never end, such as streams of events."""
    loading: dict[str, asyncio.Task[object]] = field(default_factory=dict)
    """The load of each gallery that queries wait for, by name; used on the event loop only."""
    progress_pollers: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)
    """The `ProgressPoller` of each backfill that is watched, by the backfill's number."""
    packed: PackedFolders = field(default_factory=PackedFolders)
    item_count_cache: ItemCountCache = field(default_factory=ItemCountCache)

    async def run_blocking(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work on one of the service's threads; cheaper than FastAPI's pool."""
        return await _run(self.blocking_threads, partial(work, *args, **kwargs))

    async def run_write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a write on a thread that only writes use, so that no query waits for it."""
        return await _run(self.write_threads, partial(work, *args, **kwargs))

    async def run_search(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that computes and never waits on one of the few search threads."""
        return await _run(self.search_threads, partial(work, *args, **kwargs))

    async def ensure_loaded(self, name: str) -> None:
        """Load a gallery into memory if necessary. Concurrent requests share one load and one thread.

        Raises:
            UnknownGallery: there is no gallery of this name.
        """
        if self.replica.is_loaded(name):
            return
        if (task := self.loading.get(name)) is None:
            task = self.loading[name] = asyncio.create_task(self.run_blocking(self.replica.find, name))
            task.add_done_callback(partial(self._load_ended, name))
        await asyncio.shield(task)  # a client that disconnects ends its own wait, not the load

    def _load_ended(self, name: str, task: asyncio.Task[object]) -> None:
        del self.loading[name]
        if not task.cancelled():
            task.exception()  # waiting requests raise it; if none waits any more, asyncio would log it


async def _run(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """The result of `work` on one of these threads, in the context of the caller."""
    return await asyncio.get_running_loop().run_in_executor(threads, copy_context().run, work)


@contextmanager
def running(settings: Settings, *, migrated: bool = False) -> Iterator[Runtime]:
    """Migrate the database unless `migrated`, then start the parts of the service; stop them in reverse order."""
    gpu.use(settings.index_device)
    if not migrated:
        upgrade(settings)
    with (
        closing(Database(settings.database_url, settings.connections)) as database,
        ThreadPoolExecutor(settings.threads, "query") as blocking_threads,
        ThreadPoolExecutor(settings.threads, "change") as write_threads,
        ThreadPoolExecutor(settings.search_threads, "search") as search_threads,
    ):
        runtime = _assemble(settings, database, blocking_threads, write_threads, search_threads)
        with ExitStack() as started:
            started.callback(runtime.engines.close)
            for part in _background_parts(runtime):
                part.start()
                started.callback(part.stop)
            yield runtime


def _assemble(
    settings: Settings,
    database: Database,
    blocking_threads: ThreadPoolExecutor,
    write_threads: ThreadPoolExecutor,
    search_threads: ThreadPoolExecutor,
) -> Runtime:
    """The connected parts of a service; none of their threads runs yet."""
    registry = Registry(database, settings)
    engines = Engines(settings)
    replica = _replica(settings, database, registry, engines)
    blobs = open_blobs(database, settings.blobs_url)
    with suppress(StoreUnreachable):  # readiness reports it; queries need no image
        blobs.check()
    decoder = Decoder(settings.max_image_pixels, settings.max_decoded_bytes)
    embedder = Embedder(registry, blobs, decoder)
    return Runtime(
        settings=settings,
        database=database,
        blobs=blobs,
        decoder=decoder,
        registry=registry,
        embedder=embedder,
        replica=replica,
        engines=engines,
        engine_writer=EngineWriter(database, registry, replica, engines),
        preload=Preload(database, replica, settings.preloaded),
        traffic=Traffic(database),
        trials=TrialMonitor(database, registry, replica),
        curves=Curves(database, registry, replica, blobs, decoder),
        planner=Planner(database, registry, embedder),
        reaper=Reaper(database, registry, blobs),
        keys=ApiKeys(database, checked=settings.api_key is not None),
        space=DiskSpace(settings.data, settings.min_free_bytes),
        blocking_threads=blocking_threads,
        write_threads=write_threads,
        search_threads=search_threads,
    )


def _replica(settings: Settings, database: Database, registry: Registry, engines: Engines) -> Replica:
    # Other processes may write to the database of a server: this process has to show what they acknowledged.
    shared = settings.processes > 1 or not is_sqlite(settings.database_url)
    memory = settings.memory // settings.processes
    return Replica(
        database, registry, settings.indexes, settings.poll_seconds, memory, shared=shared, collections_of=engines.of
    )


def _background_parts(runtime: Runtime) -> Sequence[Background | Replica]:
    """The parts with their own thread, in starting order; those that no route uses are created here."""
    settings, database, registry, replica = runtime.settings, runtime.database, runtime.registry, runtime.replica
    return (
        replica,
        runtime.preload,
        EncoderEvictor(registry, replica, settings.encoder_idle_seconds),
        Indexer(replica),
        runtime.engine_writer,
        runtime.trials,
        runtime.traffic,
        runtime.curves,
        runtime.planner,
        runtime.reaper,
        TombstonePurger(database),
        StoreRecovery(runtime.blobs),
        Offloader(database, runtime.blobs, settings.vectors),
        Checkpoints(database),
        runtime.keys,
    )
