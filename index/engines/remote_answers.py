"""`Answers`: what remote engines have answered to one request, so that no search waits while it holds a gallery's lock.

An engine may take seconds. So a search reads the answers there are; for a missing one it notes the question and raises
`Unanswered`. The caller leaves the lock, asks all questions at once, and searches again. Candidates are checked against
the gallery as it is then: an older answer may include removed rows, which are dropped, but must not lack rows that
were moved to the engine since; if it may, it is asked again. How many candidates suffice changes with every removed
row, so an answer of any depth is used, and a search that has too few left asks for more.
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
from index.engines.remote import Candidates, Collection, EngineUnavailable
from index.engines.remote_rows import RemoteRows
from index.space import Vectors

MAX_THREADS = 16
"""Questions asked at once by this process, beside one for each request."""
MAX_STALE = 3
"""After so many outdated answers rows arrive faster than the engine answers: then the search waits for it, once."""

MAX_ROUNDS = 8
"""The same after so many rounds of questions: they change faster than the engine answers."""

Question = tuple[RemoteRows, bool, bytes, bool]
"""The remote rows, and the search: exact or not, the queries, and whether it is restricted to keys."""


class Answer(NamedTuple):
    """The candidates, and how many were asked for."""

    depth: int
    candidates: Candidates


class _CachedAnswer(NamedTuple):
    """An answer, the keys it was restricted to, and the rows' `additions` before it was asked."""

    answer: Answer
    keys_N: Keys | None
    added: int

    def is_enough_for(self, keys_N: Keys | None, min_candidates: int) -> bool:
        """Whether it is deep enough, and includes all of these keys."""
        among = keys_N is None or self.keys_N is None or bool(np.isin(keys_N, self.keys_N).all())
        return among and self.answer.depth >= min_candidates


class Unanswered(Exception):
    """Remote engines must be asked first."""

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
        """Seconds that the questions about each table took."""

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
        """As `Collection.search`; `min_candidates`: as many suffice in an answer, c are asked for.

        Raises:
            Unanswered: it was not asked yet; `ask` will.
            EngineUnavailable: it does not answer.
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
        """Ask all open questions at once."""
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
