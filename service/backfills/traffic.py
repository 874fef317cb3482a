"""Count how often items are matched, for backfills in the order `traffic`.

The query path only appends the keys that it found to a queue; a thread sums them up and writes them every few seconds.
A crash loses the last seconds; a full queue drops its oldest answers.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import chain

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from index.errors import RegraftError
from index.events import Event
from service.background import Background
from service.store.database.connections import Database
from service.store.faults import is_unreachable
from service.store.sql.arrays import INSERT, blocks, count_table
from service.store.tables import item, item_traffic

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
QUEUE = 10_000
"""Most answers that wait to be counted."""


class Traffic(Background):
    """Counts matches of one process. `count` may be called by any thread and never waits."""

    def __init__(self, database: Database, flush_seconds: float = FLUSH_SECONDS) -> None:
        super().__init__("traffic")
        self._database = database
        self._flush_seconds = flush_seconds
        self._found: deque[Sequence[int]] = deque(maxlen=QUEUE)
        self._flushing = threading.Lock()

    def stop(self) -> None:
        """Write what is left and end."""
        super().stop()
        self.flush()

    def count(self, keys: Sequence[int]) -> None:
        """Count a match of each of these items, by key; a key that occurs twice counts twice."""
        self._found.append(keys)

    def flush(self) -> None:
        """Write the counts so far; those that cannot be written are dropped, with a log line."""
        with self._flushing:
            found = [self._found.popleft() for _ in range(len(self._found))]
            if not found:
                return
            counted = list(Counter(chain.from_iterable(found)).items())
            try:
                for block in blocks(counted):
                    with self._database.write() as connection:
                        add(connection, dict(block))
            except (SQLAlchemyError, RegraftError) as error:  # for example, a gallery was deleted meanwhile
                logger.warning(Event("matches_not_counted", items=len(counted)), exc_info=not is_unreachable(error))

    def _run(self) -> None:
        while not self._stop.wait(self._flush_seconds):
            self.flush()


def add(connection: Connection, matches: Mapping[int, int]) -> None:
    """Add to the items' counters; items that no longer exist are left out."""
    listed = count_table(connection, matches)
    found = select(item.c.id, listed.number).where(item.c.id == listed.key).order_by(item.c.id)
    if connection.dialect.name != "sqlite":  # which has one writer at a time
        # Locked, so that none is deleted before its count is written; in one order, so that processes do not deadlock.
        locked = found.with_for_update(read=True, key_share=True, of=item).subquery()
        connection.execute(select(func.count()).select_from(locked))
    statement = INSERT[connection.dialect.name](item_traffic).from_select(["item_id", "matches"], found)
    increments = {"matches": func.coalesce(item_traffic.c.matches, 0) + statement.excluded.matches}
    connection.execute(statement.on_conflict_do_update(index_elements=["item_id"], set_=increments))
