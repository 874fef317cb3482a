"""`Answers`: cached answers of remote engines to one request, so that no search waits while it holds a gallery's lock.

An engine may take seconds. So a search reads the cached answers; for a missing one it records the question and raises
`Unanswered`. The caller releases the lock, asks all questions in parallel (`Answers.ask`) and searches again.

Candidates are checked against the gallery at that time. A cached answer may include removed rows, which are dropped,
but must not lack rows that were moved to the engine since: then it is outdated and the question is asked again. An
answer may have any depth that suffices; a search that has too few valid candidates asks for more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from time import perf_counter
from typing import NamedTuple

import numpy as np

from index.engines.base import Keys
from index.engines.remote.base import Candidates, Collection, EngineUnavailable
from index.engines.remote.rows import RemoteRows
from index.space import Vectors

MAX_THREADS = 16
"""Questions asked in parallel by this process, in addition to one per request."""
MAX_STALE = 3
"""After this many outdated answers, rows arrive faster than the engine answers: the search then waits for it."""

MAX_ROUNDS = 8
"""After this many rounds of questions, these change faster than the engine answers: the search then waits for it."""

Question = tuple[RemoteRows, bool, bytes, bool]
"""Identifies a search: the remote rows, whether it is exact, the queries, and whether it is restricted to keys."""


class Answer(NamedTuple):
    """The candidates, and the number of candidates per query that were asked for (`depth`)."""

    depth: int
    candidates: Candidates


class _CachedAnswer(NamedTuple):
    """An answer, the keys it was restricted to, and `RemoteRows.additions` before the question."""

    answer: Answer
    keys_N: Keys | None
    added: int

    def is_enough_for(self, keys_N: Keys | None, min_candidates: int) -> bool:
        """Whether it is deep enough and covers all of these keys."""
        among = keys_N is None or self.keys_N is None or bool(np.isin(keys_N, self.keys_N).all())
        return among and self.answer.depth >= min_candidates


class Unanswered(Exception):
    """A search needs answers that are not cached: call `answers.ask()`, then search again."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers


class Answers:
    """The answers to one request; see the module. Used by one thread; `ask` uses others."""

    def __init__(self) -> None:
        self._cached: defaultdict[Question, list[_CachedAnswer]] = defaultdict(list)
        self._errors: dict[RemoteRows, EngineUnavailable] = {}
        self._pending: dict[tuple[Question, int, bytes | None], Callable[[], None]] = {}
        self._stale = self._rounds = 0
        self.seconds: defaultdict[RemoteRows, float] = defaultdict(float)
        """Seconds that the questions about each shard's remote rows took."""

    def search(
        self,
        collection: Collection,
        rows: RemoteRows,
        queries_QW: Vectors,
        c: int,
        *,
        min_candidates: int,
        keys_N: Keys | None = None,
        exact: bool = False,
    ) -> Answer:
        """`Collection.search` from the cache. An answer of `min_candidates` suffices; a new question asks for c.

        Raises:
            Unanswered: there is no such answer yet; `ask` gets it.
            EngineUnavailable: the engine does not answer.
        """
        if (error := self._errors.get(rows)) is not None:
            raise EngineUnavailable(error.message)
        question = rows, exact, queries_QW.tobytes(), keys_N is not None
        known = [cached for cached in self._cached[question] if cached.is_enough_for(keys_N, min_candidates)]
        for cached in reversed(known):
            if cached.added == rows.additions:
                return cached.answer
        search = partial(collection.search, queries_QW, c, keys_N=keys_N, exact=exact)
        self._stale += bool(known)
        if self._stale >= MAX_STALE or self._rounds >= MAX_ROUNDS:
            return Answer(c, search())
        keys = None if keys_N is None else keys_N.tobytes()
        self._pending[question, c, keys] = partial(self._ask, question, c, keys_N, rows.additions, search)
        raise Unanswered(self)

    def check(self) -> None:
        """Raise Unanswered if there are open questions."""
        if self._pending:
            raise Unanswered(self)

    def ask(self) -> None:
        """Ask all open questions in parallel."""
        pending, self._pending = self._pending, {}
        self._rounds += 1
        first, *others = pending.values()
        begun = [_threads().submit(ask) for ask in others]
        first()
        for asked in begun:
            asked.result()

    def _ask(
        self, question: Question, c: int, keys_N: Keys | None, added: int, search: Callable[[], Candidates]
    ) -> None:
        rows, started = question[0], perf_counter()
        try:
            self._cached[question].append(_CachedAnswer(Answer(c, search()), keys_N, added))
        except EngineUnavailable as error:
            self._errors[rows] = error
        self.seconds[rows] += perf_counter() - started


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, "engines")
