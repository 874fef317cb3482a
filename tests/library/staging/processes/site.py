"""`Site`: real processes on one data folder, and the state of its database."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import select

from regraft.connection import certificates
from service.backfills.scores import NO_SCORES
from service.backfills.starting import BackfillRequest, start
from service.backfills.sweeps import continue_sweep, release_sweep
from service.registry.placement import version_order_to
from service.registry.registry import Registry
from service.replica.engines import Engines
from service.settings import Settings
from service.store.database.connections import Database
from service.store.tables import backfill, deployment, embedding, gallery, item
from staging.processes.forked import Forked, environment
from staging.processes.ports import free_port
from staging.states.working import SteppedWorker
from staging.waiting import until

LEASE_SECONDS = 0.5


class Site:
    """A data folder and the processes that work on it; by default with SQLite and short leases."""

    SERVE: tuple[str, ...] = ("-m", "regraft", "serve", "--workers", "0", "--port")
    """The command of a server, before its port."""

    def __init__(self, data: Path, settings: Settings | None = None) -> None:
        self.settings = settings or Settings(data=data, lease_seconds=LEASE_SECONDS)
        self.database = Database(self.settings.database_url)
        self.engines = Engines(self.settings)
        self.processes: list[Forked] = []
        self.port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}/v1", timeout=20, verify=certificates())

    def launch(self, *command: str) -> Forked:
        """A Python process in the repository, working on this data folder."""
        env = environment(
            REGRAFT_DATA=str(self.settings.data),
            REGRAFT_DATABASE_URL=self.settings.database_url,
            REGRAFT_BLOBS_URL=self.settings.blobs_url,
            REGRAFT_VECTORS=self.settings.vectors,
            REGRAFT_PGVECTOR_URL=self.settings.pgvector_url,
            REGRAFT_MILVUS_URI=self.settings.milvus_uri,
            REGRAFT_LEASE_SECONDS=str(self.settings.lease_seconds),
        )
        self.processes.append(Forked(command, env, self._logs(len(self.processes))))
        return self.processes[-1]

    def log(self, process: Forked) -> str:
        """The log of a process."""
        return self._logs(self.processes.index(process)).read_text()

    def _logs(self, number: int) -> Path:
        return self.settings.data / f"{self.port}-{number}.log"  # several sites may share a folder

    def worker(self) -> Forked:
        """A real worker."""
        return self.launch("-m", "regraft", "worker")

    def doomed_worker(self, point: str, chunk: int = 3) -> Forked:
        """A real worker that stops or kills itself at a point of its chunk `chunk`; see doomed_worker.py."""
        return self.launch("tests/faults/doomed_worker.py", point, str(chunk))

    def server(self, *options: str) -> Forked:
        """A real server that answers and has freed what an earlier one left."""
        process = self.launch(*self.SERVE, str(self.port), *options)
        until(self.answers, process)
        until(lambda: not self.reaper(), process)
        return process

    def reaper(self) -> list[int]:
        """Deployments whose retirement has not freed everything."""
        with self.database.lookup() as connection:
            return list(connection.execute(select(deployment.c.id).where(deployment.c.to_free.is_not(None))).scalars())

    def answers(self) -> bool:
        try:
            return self.http.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def start_backfill(self, name: str = "g", *, planned: bool = True, **fields: Any) -> int:
        """Add a backfill of the gallery without a server, and plan it, unless a worker shall."""
        registry = Registry(self.database, self.settings)
        with self.database.write() as connection:
            gallery_id = connection.execute(select(gallery.c.id).where(gallery.c.name == name)).scalar_one()
            fields = {"chunk_size": 6, **fields}
            job = start(connection, registry, gallery_id, BackfillRequest(**fields))
            if not planned:
                release_sweep(connection, job)
        if planned:
            continue_sweep(self.database, job, version_order_to(registry, job.version_id), lambda: NO_SCORES)
        return job.id

    def work(self) -> None:
        """Work in this process until nothing is left, including chunks of dead workers."""
        worker = SteppedWorker(self.settings)
        deadline = time.monotonic() + 30
        while self.active():
            assert time.monotonic() < deadline, "the backfill does not end"
            worker.drain()
            time.sleep(0.02)
        worker.close()

    def active(self) -> list[int]:
        """Backfills that are running."""
        with self.database.lookup() as connection:
            running = select(backfill.c.id).where(backfill.c.state == "running")
            return list(connection.execute(running).scalars())

    def backfill(self, number: int) -> Any:
        """A backfill's row."""
        with self.database.lookup() as connection:
            return connection.execute(select(backfill).where(backfill.c.id == number)).one()

    def state(self, name: str = "g") -> dict[str, Any]:
        """The live items of a gallery: id -> (version that serves it, {version: (origin, vector)}).

        The serving version is the current one if the item has it, else (with two versions) the other.
        """
        with self.database.read() as connection:
            mine = connection.execute(select(gallery).where(gallery.c.name == name)).one()
            live = select(item).where(item.c.gallery_id == mine.id, item.c.deleted.is_(False))
            found: dict[int, tuple[str, dict[int, Any]]] = {
                row.id: (row.external_id, {}) for row in connection.execute(live)
            }
            for held in connection.execute(select(embedding).where(embedding.c.item_id.in_(list(found)))):
                found[held.item_id][1][held.version_id] = (held.origin, held.vector)
        current = mine.current_id
        return {name: (current if current in held else max(held), held) for name, held in found.values()}

    def mix(self, name: str = "g") -> dict[int, int]:
        """Version id -> number of live items that it serves."""
        counted: dict[int, int] = {}
        for active_id, _ in self.state(name).values():
            counted[active_id] = counted.get(active_id, 0) + 1
        return counted

    def close(self) -> None:
        """End everything this site started."""
        self.http.close()
        self.database.close()
        self.engines.close()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
