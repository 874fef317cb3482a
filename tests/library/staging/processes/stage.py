"""`Stage`: one server and some workers as processes, which may be ended at any time, and a record of that."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from regraft.connection import certificates
from staging.processes.forked import Forked
from staging.processes.site import Site

MOST_WORKERS = 4
STOP_SECONDS = 60


class Stage:
    """The processes of a site. The server runs except within methods of this class and `doomed` requests."""

    http: httpx.Client

    def __init__(self, site: Site) -> None:
        self.site = site
        self.workers: list[Forked] = []
        self.counts: Counter[str] = Counter()
        self.outages = 0
        self._open()

    def outage(self) -> tuple[bool, int]:
        """Whether the server is down on purpose, and how often it has been."""
        return self._down, self.outages

    def end_server(self, how: signal.Signals) -> None:
        """Kill the server, or ask it to end, and start it again."""
        self._strike(how)
        assert self.server.wait(STOP_SECONDS) == (0 if how is signal.SIGTERM else -how)
        self._open()

    @contextmanager
    def doomed(self, seconds: float | None) -> Iterator[None]:
        """Kill the server `seconds` after the start of the block, and restart it after the block; None: do not."""
        if seconds is None:
            yield
            return
        striker = threading.Timer(seconds, self._strike, (signal.SIGKILL,))
        striker.start()
        try:
            yield
        finally:
            striker.join()
            self.server.wait(STOP_SECONDS)
            self._open()

    def begin_worker(self) -> None:
        """Start another worker, up to the limit."""
        if len(self.workers) < MOST_WORKERS:
            self.workers.append(self.site.worker())
            self.counts["workers started"] += 1

    def end_worker(self, place: int, how: signal.Signals) -> None:
        """Kill a worker, or ask it to end."""
        if not self.workers:
            return
        process = self.workers.pop(place % len(self.workers))
        process.send_signal(how)
        code = process.wait(STOP_SECONDS)
        # SIGTERM before the worker has installed its handler kills it.
        assert code == -how or (how is signal.SIGTERM and code == 0)
        self.counts[f"workers ended by {how.name}"] += 1

    def check(self) -> None:
        """Check that no process ended by itself and that only expected errors occurred."""
        assert [process.poll() for process in (self.server, *self.workers)] == [None] * (1 + len(self.workers))
        logs = [path.read_text() for path in self.site.settings.data.glob("*.log")]
        assert [log[log.index("Traceback") :] for log in logs if "Traceback" in log] == []

    def close(self) -> None:
        """Does nothing: the site ends its processes."""
        self.http.close()

    def _strike(self, how: signal.Signals) -> None:
        self._down = True
        self.outages += 1
        self.counts[f"servers ended by {how.name}"] += 1
        self.server.send_signal(how)

    def _open(self) -> None:
        self._down = True
        self.server = self.site.server()
        if self.outages:
            self.http.close()
        self.http = httpx.Client(base_url=self.site.http.base_url, timeout=60, verify=certificates())
        self._down = False
