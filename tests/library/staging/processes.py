"""Real processes over one data folder, and what they leave in its database."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import select

from service.http.backfills import BackfillIn, start
from service.registry.registry import Registry
from service.settings import Settings
from service.store.database import Database
from service.store.tables import backfill, deployment, embedding, gallery, item
from staging.ports import free_port
from staging.working import SteppedWorker

ROOT = Path(__file__).parents[3]
LEASE_SECONDS = 0.5


class Site:
    """A data folder, and the processes that work on it."""

    def __init__(self, data: Path) -> None:
        self.settings = Settings(data=data, lease_seconds=LEASE_SECONDS)
        self.database = Database(self.settings.database_url)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}/v1", timeout=20)

    def launch(self, *command: str) -> subprocess.Popen[bytes]:
        """A Python process in the repository, working on this data folder."""
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "REGRAFT_DATA": str(self.settings.data),
            "REGRAFT_LEASE_SECONDS": str(LEASE_SECONDS),
        }
        log = self.settings.data / f"{len(self.processes)}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=stream, stderr=stream)
        self.processes.append(process)
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        """What an ended process has logged."""
        return (self.settings.data / f"{self.processes.index(process)}.log").read_text()

    def worker(self) -> subprocess.Popen[bytes]:
        """A real worker."""
        return self.launch("-m", "regraft", "worker")

    def doomed_worker(self, point: str, chunk: int = 3) -> subprocess.Popen[bytes]:
        """A real worker that stops or kills itself at a point of its chunk number `chunk`; see doomed_worker.py."""
        return self.launch("tests/faults/doomed_worker.py", point, str(chunk))

    def server(self) -> subprocess.Popen[bytes]:
        """A real server that answers, and is done with what another had left to free."""
        process = self.launch("-m", "regraft", "serve", "--workers", "0", "--port", str(self.port))
        until(self._answers, process)
        until(lambda: not self.reaper(), process)
        return process

    def reaper(self) -> list[int]:
        """Deployments whose retirement has still something to free."""
        with self.database.lookup() as connection:
            return list(connection.execute(select(deployment.c.id).where(deployment.c.to_free.is_not(None))).scalars())

    def _answers(self) -> bool:
        try:
            return self.http.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def start_backfill(self, name: str = "g", **fields: Any) -> int:
        """Plan a backfill of the gallery, without a server."""
        with self.database.write() as connection:
            gallery_id = connection.execute(select(gallery.c.id).where(gallery.c.name == name)).scalar_one()
            fields = {"chunk_size": 6, **fields}
            return start(connection, Registry(self.database, self.settings), gallery_id, BackfillIn(**fields)).id

    def work(self) -> None:
        """Work in this process until nothing is left, also what dead workers hold."""
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
        """What a gallery's live items are and hold: id -> (version that serves it, {version: (origin, vector)}).

        That is the current one where the item holds it, else, with two versions, the other.
        """
        with self.database.read() as connection:
            mine = connection.execute(select(gallery).where(gallery.c.name == name)).one()
            live = select(item).where(item.c.gallery_id == mine.id, item.c.deleted.is_(False))
            found = {row.id: (row.external_id, {}) for row in connection.execute(live)}
            for held in connection.execute(select(embedding).where(embedding.c.item_id.in_(list(found)))):
                found[held.item_id][1][held.version_id] = (held.origin, held.vector)
        current = mine.current_id
        return {name: (current if current in held else max(held), held) for name, held in found.values()}

    def mix(self, name: str = "g") -> dict[int, int]:
        """Live items per version id that serves them."""
        counted: dict[int, int] = {}
        for active_id, _ in self.state(name).values():
            counted[active_id] = counted.get(active_id, 0) + 1
        return counted

    def close(self) -> None:
        """End everything this site started."""
        self.http.close()
        self.database.close()
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


def until(holds: Callable[[], Any], process: subprocess.Popen[bytes] | None = None, seconds: float = 60) -> None:
    """Wait for a condition, as long as the process it depends on lives."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert process is None or process.poll() is None, f"the process ended with {process.returncode}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
