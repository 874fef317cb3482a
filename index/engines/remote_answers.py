"""`Answers`: what engines say to a request, asked for while nobody is kept from writing.

An engine may take seconds, and whoever searches a gallery holds its lock. So a search never waits: it takes what was
answered before, and where there is nothing yet it notes what is to be asked and ends by `Unanswered`. Who began it
leaves the lock, has everything asked at once, and begins again. Which candidates count is decided then, by what the
gallery is then: an answer is older than that, so it may tell of rows that went, which fall out, but must not lack rows
that came to lie there since. Where some did it is asked again. How many candidates should do changes with every row
that goes, so an answer is taken however deep it is: who has too few left of it asks for more.
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

MOST_THREADS = 16
"""So many questions of this process are asked at once, beside one for each request."""
MOST_STALE = 3
"""Where so many answers of a request were too old, rows come faster than the engine answers: writers wait for once."""

MOST_ROUNDS = 8
"""The same where a request was answered so often: questions change faster than the engine answers."""

Question = tuple[RemoteRows, bool, bytes, bool]
"""The table of the rows there, and what they are searched for: exact or not, queries, and whether among some keys."""


class Answer(NamedTuple):
    """An answer, and how many candidates were asked for."""

    depth: int
    candidates: Candidates


class _KeptAnswer(NamedTuple):
    """An answer to a question: among which keys, if any, and how many times rows had come to lie there before."""

    answer: Answer
    keys_N: Keys | None
    added: int

    def is_for(self, keys_N: Keys | None, least: int) -> bool:
        """Whether it is deep enough, and of all of these keys."""
        among = keys_N is None or self.keys_N is None or bool(np.isin(keys_N, self.keys_N).all())
        return among and self.answer.depth >= least


class Unanswered(Exception):
    """Engines are to be asked first."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers


class Answers:
    """Those to one request; see the module. Used by one thread, which has `ask` use others."""

    def __init__(self) -> None:
        self._kept: defaultdict[Question, list[_KeptAnswer]] = defaultdict(list)
        self._away: dict[RemoteRows, EngineUnavailable] = {}
        self._due: dict[tuple[Question, int, bytes | None], Callable[[], None]] = {}
        self._stale = self._rounds = 0
        self.seconds: defaultdict[RemoteRows, float] = defaultdict(float)
        """What the questions about each table took."""

    def search(
        self,
        collection: Collection,
        rows: RemoteRows,
        queries_QW: Vectors,
        c: int,
        *,
        least: int,
        keys_N: Keys | None = None,
        exact: bool = False,
    ) -> Answer:
        """As `Collection.search`, of the collection whose rows these are; `least`: candidates, c where it is asked now.

        Raises:
            Unanswered: it was not asked yet, and is about to be.
            EngineUnavailable: it does not answer.
        """
        if (error := self._away.get(rows)) is not None:
            raise EngineUnavailable(error.message)
        question = rows, exact, queries_QW.tobytes(), keys_N is not None
        known = [kept for kept in self._kept[question] if kept.is_for(keys_N, least)]
        for kept in reversed(known):
            if kept.added == rows.added:
                return kept.answer
        search = partial(collection.search, queries_QW, c, keys_N=keys_N, exact=exact)
        self._stale += bool(known)
        if self._stale >= MOST_STALE or self._rounds >= MOST_ROUNDS:
            return Answer(c, search())
        keys = None if keys_N is None else keys_N.tobytes()
        self._due[question, c, keys] = partial(self._ask, question, c, keys_N, rows.added, search)
        raise Unanswered(self)

    def check(self) -> None:
        """Raise Unanswered where anything is to be asked."""
        if self._due:
            raise Unanswered(self)

    def ask(self) -> None:
        """Ask all that is due, at once."""
        due, self._due = self._due, {}
        self._rounds += 1
        first, *others = due.values()
        begun = [_threads().submit(ask) for ask in others]
        first()
        for asked in begun:
            asked.result()

    def _ask(
        self, question: Question, c: int, keys_N: Keys | None, added: int, search: Callable[[], Candidates]
    ) -> None:
        rows, started = question[0], perf_counter()
        try:
            self._kept[question].append(_KeptAnswer(Answer(c, search()), keys_N, added))
        except EngineUnavailable as error:
            self._away[rows] = error
        self.seconds[rows] += perf_counter() - started


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, "engines")
