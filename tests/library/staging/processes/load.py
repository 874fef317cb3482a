"""A constant load of queries, which records every incomplete answer."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from regraft.connection import certificates


class Load:
    """Clients that query a gallery for its `k` best items until they are stopped.

    `outage`: for a server that may be down on purpose, whether it is down now and how often it has been. A request that
    was interrupted by an outage has not failed. Every other error and every incomplete answer is a failure.
    """

    def __init__(
        self,
        url: str,
        pictures: Sequence[bytes],
        k: int,
        *,
        clients: int = 1,
        pause: float = 0.0,
        outage: Callable[[], tuple[bool, int]] = lambda: (False, 0),
        key: str = "",
    ) -> None:
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url, self.pictures, self.k = url, pictures, k
        self.wrong: list[str] = []
        self.versions: Counter[str] = Counter()
        self.answered = self.cut_off = 0
        self._pause, self._outage = pause, outage
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def wait(self, more: int = 6) -> None:
        """Wait until this many more queries have been answered."""
        target, deadline = self.answered + more, time.monotonic() + 60
        while self.answered < target:
            assert time.monotonic() < deadline, "the load came to a halt"
            time.sleep(0.005)

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=30, verify=certificates(), headers=self.headers) as http:
            while not self._stop.wait(self._pause):
                number += len(self._threads)
                files = [("images", ("q", self.pictures[number % len(self.pictures)]))]
                before = self._outage()
                try:
                    answer = http.post(self.url, data={"k": str(self.k)}, files=files)
                except httpx.TransportError as error:
                    if before == self._outage() and not before[0]:
                        self.wrong.append(repr(error))
                    self.cut_off += 1
                else:
                    self._note(answer)

    def _note(self, answer: httpx.Response) -> None:
        if answer.status_code != 200:
            self.wrong.append(answer.text)
            return
        found: dict[str, Any] = answer.json()
        matches = found["results"][0]["matches"]
        ids, scores = [match["id"] for match in matches], [match["score"] for match in matches]
        if len(set(ids)) != self.k or len(ids) != self.k or found["degraded"] or scores != sorted(scores, reverse=True):
            self.wrong.append(json.dumps(found))
        self.versions[found["version"]] += 1
        self.answered += 1
