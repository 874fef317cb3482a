"""Keys that the doctor has seen, on disk: of a large store there are more than memory has room for."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator

BLOCK = 1000


class KeysOnDisk:
    """Keys, each with a value and whether it was named; in a file that goes with this object, or with the process."""

    def __init__(self) -> None:
        self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # "": a file without a name
        self._file.execute("pragma journal_mode=off")
        self._file.execute("create table kept (key primary key, value, named default 0) without rowid")
        self._file.execute("begin")

    def close(self) -> None:
        """Remove them."""
        self._file.close()

    def put(self, keys: Iterable[tuple[object, object]]) -> None:
        """Keep keys with their values; one that is kept stays as it is."""
        self._file.executemany("insert or ignore into kept (key, value) values (?, ?)", keys)

    def add(self, key: object, value: object) -> object:
        """Keep one; returns the value that is kept of it now."""
        self.put([(key, value)])
        return self._file.execute("select value from kept where key = ?", (key,)).fetchone()[0]

    def name(self, key: object) -> bool:
        """Note that something names a key; whether it is kept."""
        return self._file.execute("update kept set named = 1 where key = ?", (key,)).rowcount > 0

    def forget(self, prefix: str) -> None:
        """Forget those that begin so."""
        self._file.execute("delete from kept where substr(key, 1, ?) = ?", (len(prefix), prefix))

    def any_named(self) -> bool:
        """Whether one was."""
        return self._file.execute("select 1 from kept where named limit 1").fetchone() is not None

    def unnamed(self, above: float) -> Iterator[list[str]]:
        """The others with values above this, some at a time."""
        rows = self._file.execute("select key from kept where not named and value > ? order by key", (above,))
        while found := rows.fetchmany(BLOCK):
            yield [key for (key,) in found]
