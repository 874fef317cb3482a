"""`Answers`: what engines say to a request, asked for while nobody is kept from writing.

An engine may take seconds, and whoever searches a gallery holds its lock. So a search never waits: it takes what was
answered before, and where there is nothing yet it notes what is to be asked and ends by `Unanswered`. Who began it
leaves the lock, has everything asked at once, and begins again. Which candidates count is decided then, by what the
gallery is then: an answer is older than that, so it may tell of rows that went, which fall out, but must not lack rows
that came to lie there since. Where some did it is asked again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from time import perf_counter

from index.engines.base import Keys
from index.engines.remote import Candidates, Collection, EngineUnavailable
from index.engines.remote_rows import RemoteRows
from index.space import Vectors

MOST_THREADS = 16
"""So many questions of this process are asked at once, beside one for each request."""
MOST_STALE = 3
"""Where so many answers of a request were too old, rows come faster than the engine answers: writers wait for once."""

Question = tuple[RemoteRows, int, bool, bytes, bytes | None]
"""The table of the rows there, and what they are searched for: candidates wanted, exact, queries and keys."""


class Unanswered(Exception):
    """Engines are to be asked first."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers


class Answers:
    """Those to one request; see the module. Used by one thread, which has `ask` use others."""

    def __init__(self) -> None:
        # By question the answer, and how many rows had come to lie there when it was asked.
        self._told: dict[Question, tuple[int, Candidates]] = {}
        self._away: dict[RemoteRows, EngineUnavailable] = {}
        self._due: dict[Question, Callable[[], None]] = {}
        self._stale = 0
        self.seconds: defaultdict[RemoteRows, float] = defaultdict(float)
        """What the questions about each table took."""

    def search(
        self,
        collection: Collection,
        rows: RemoteRows,
        queries_QW: Vectors,
        c: int,
        *,
        keys_N: Keys | None = None,
        exact: bool = False,
    ) -> Candidates:
        """As `Collection.search`, of the collection whose rows these are.

        Raises:
            Unanswered: it was not asked yet, and is about to be.
            EngineUnavailable: it does not answer.
        """
        if (error := self._away.get(rows)) is not None:
            raise EngineUnavailable(error.message)
        keys = None if keys_N is None else keys_N.tobytes()
        question = rows, c, exact, queries_QW.tobytes(), keys
        told = self._told.get(question)
        if told is not None and told[0] == rows.added:
            return told[1]
        search = partial(collection.search, queries_QW, c, keys_N=keys_N, exact=exact)
        self._stale += told is not None
        if self._stale >= MOST_STALE:
            return search()
        self._due[question] = partial(self._ask, question, rows.added, search)
        raise Unanswered(self)

    def check(self) -> None:
        """Raise Unanswered where anything is to be asked."""
        if self._due:
            raise Unanswered(self)

    def ask(self) -> None:
        """Ask all that is due, at once."""
        due, self._due = self._due, {}
        first, *others = due.values()
        begun = [_threads().submit(ask) for ask in others]
        first()
        for asked in begun:
            asked.result()

    def _ask(self, question: Question, added: int, search: Callable[[], Candidates]) -> None:
        rows, started = question[0], perf_counter()
        try:
            self._told[question] = added, search()
        except EngineUnavailable as error:
            self._away[rows] = error
        self.seconds[rows] += perf_counter() - started


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, "engines")
