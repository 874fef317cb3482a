"""Two clients that run during the upgrade: one queries, one ingests and deletes. Both check every answer.

A wrong answer, an error, or no answer counts as failed. The only exception: while the service is down because the demo
killed it, a request counts as interrupted and is repeated until it is answered.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self, TypeVar

from examples.demo.pictures import Pictures
from index.errors import RegraftError
from regraft import Client, ImageItem, Problem, Unreachable
from regraft.models import SearchResponse

MOST_VISITORS = 12
"""Largest number of temporary items at a time."""
QUERY_PAUSE_SECONDS = 0.07
CHURN_PAUSE_SECONDS = 0.12
QUERY_K = 10

Answered = TypeVar("Answered")


class Outage:
    """Knows when the service is down because the demo killed it."""

    def __init__(self) -> None:
        self._begun = 0
        self._ended = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """The service is down on purpose within the block."""
        self._begun += 1
        try:
            yield
        finally:
            self._ended += 1

    def token(self) -> int:
        """A token, to be taken before a request is sent."""
        return self._ended

    def excuses(self, token: int) -> bool:
        """Whether there was an outage since the token was taken."""
        return self._begun > token

    def wait_over(self) -> None:
        """Wait until the outage is over."""
        while self._begun > self._ended:
            time.sleep(0.02)


class Ledger:
    """The acknowledged writes of the ingesting client: a model to compare the service with.

    An id is `present` from the acknowledged ingest to the start of its deletion, and `gone` from the acknowledged
    deletion on; in between, both states are correct. No id is used twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: deque[str] = deque()
        self._gone: set[str] = set()

    def ingested(self, ids: Sequence[str]) -> None:
        """The service acknowledged these items."""
        with self._lock:
            self._present.extend(ids)

    def leaving(self, count: int) -> list[str]:
        """Take the oldest present ids for deletion: from now on they need not be present."""
        with self._lock:
            return [self._present.popleft() for _ in range(min(count, len(self._present)))]

    def deleted(self, ids: Sequence[str]) -> None:
        """The service acknowledged their deletion."""
        with self._lock:
            self._gone.update(ids)

    def present(self) -> list[str]:
        """Ids that must exist."""
        with self._lock:
            return list(self._present)

    def gone(self) -> frozenset[str]:
        """Ids that must never appear again."""
        with self._lock:
            return frozenset(self._gone)


@dataclass
class Counts:
    """Counts of the clients."""

    queries_served: int = 0
    queries_failed: int = 0
    queries_interrupted: int = 0
    writes_acknowledged: int = 0
    writes_failed: int = 0
    writes_interrupted: int = 0
    deleted_seen: set[str] = field(default_factory=set)
    missed_on_deletion: set[str] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Add the counts of another upgrade."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, mine | value if isinstance(value, set) else mine + value)


class Traffic:
    """The two clients, which run within the context."""

    def __init__(self, connect: Callable[[], Client], gallery: str, pictures: Pictures, *, seed: int = 0) -> None:
        self.gallery = gallery
        self.ledger = Ledger()
        self.outage = Outage()
        self.counts = Counts()
        self._connect = connect
        self._pictures = pictures
        self._choice = random.Random(seed)
        self._visitors = (ImageItem(f"visitor-{n}", v.image, v.metadata) for n, v in _numbered(pictures.visitors))
        self._stop = threading.Event()
        self._crashes: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=(step, pause), daemon=True)
            for step, pause in ((self._query, QUERY_PAUSE_SECONDS), (self._churn, CHURN_PAUSE_SECONDS))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._crashes:
            raise self._crashes[0]

    def _repeat(self, step: Callable[[Client], None], pause: float) -> None:
        with self._connect() as client:
            try:
                while not self._stop.is_set():
                    step(client)
                    self._stop.wait(pause)
            except BaseException as error:
                self._crashes.append(error)

    def _query(self, client: Client) -> None:
        images = self._choice.sample(self._pictures.queries, 2)
        gone = self.ledger.gone()
        begun = time.perf_counter()
        try:
            answer, interrupted = self._until_answered(lambda: client.query(self.gallery, images, QUERY_K))
        except RegraftError as error:
            self._failed_query(str(error))
            return
        self.counts.queries_interrupted += interrupted
        if not interrupted:
            self.counts.seconds.append(time.perf_counter() - begun)
        self.counts.deleted_seen |= gone & {m.id for result in answer.results for m in result.matches}
        if fault := wrong_answer(answer, len(images), QUERY_K):
            self._failed_query(fault)
        else:
            self.counts.queries_served += 1

    def _failed_query(self, reason: str) -> None:
        self.counts.queries_failed += 1
        self.counts.reasons.append(f"query: {reason}")

    def _churn(self, client: Client) -> None:
        if len(self.ledger.present()) + 2 > MOST_VISITORS:
            self._delete(client, 2)
        else:
            self._ingest(client, [next(self._visitors), next(self._visitors)])

    def _ingest(self, client: Client, items: Sequence[ImageItem]) -> None:
        if self._written(lambda: client.ingest(self.gallery, items, atomic=True)):
            self.ledger.ingested([item.id for item in items])

    def _delete(self, client: Client, count: int) -> None:
        ids = self.ledger.leaving(count)
        interrupted = self.counts.writes_interrupted
        answer = self._written(lambda: client.delete_items(self.gallery, ids))
        if answer is None:
            return
        self.ledger.deleted(ids)
        # After an interruption a repeated deletion may find its items already deleted.
        if interrupted == self.counts.writes_interrupted:
            self.counts.missed_on_deletion |= set(answer.missing)

    def _written(self, write: Callable[[], Answered]) -> Answered | None:
        try:
            answer, interrupted = self._until_answered(write)
        except RegraftError as error:
            self.counts.writes_failed += 1
            self.counts.reasons.append(f"write: {error}")
            return None
        self.counts.writes_acknowledged += 1
        self.counts.writes_interrupted += interrupted
        return answer

    def _until_answered(self, send: Callable[[], Answered]) -> tuple[Answered, int]:
        """The answer, and the number of interruptions by kills of the service."""
        for interrupted in itertools.count():
            token = self.outage.token()
            try:
                return send(), interrupted
            except (Unreachable, Problem) as error:
                if error.status != Unreachable.status or not self.outage.excuses(token):
                    raise
            self.outage.wait_over()
        raise AssertionError


def wrong_answer(answer: SearchResponse, queries: int, k: int) -> str:
    """The error in an answer; "" if it is correct."""
    if len(answer.results) != queries:
        return f"{len(answer.results)} results for {queries} queries"
    if answer.degraded:
        return f"items left out: {answer.degraded}"
    for result in answer.results:
        ids = [match.id for match in result.matches]
        if len(ids) != k or len(set(ids)) != k:
            return f"{len(set(ids))} different matches of {len(ids)} where {k} were wanted"
        scores = [match.score for match in result.matches]
        if scores != sorted(scores, reverse=True):
            return "matches out of order"
    return ""


def _numbered(items: Sequence[ImageItem]) -> Iterator[tuple[int, ImageItem]]:
    return enumerate(itertools.cycle(items))
