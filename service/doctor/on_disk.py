"""A set of keys on disk, since a large store has more keys than fit into memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator

BLOCK = 1000


class KeysOnDisk:
    """Keys, each with a value and whether it was named, in an anonymous temporary file."""

    def __init__(self) -> None:
        self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # "": a temporary file
        self._file.execute("pragma journal_mode=off")
        self._file.execute("create table kept (key primary key, value, named default 0) without rowid")
        self._file.execute("begin")

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def put(self, keys: Iterable[tuple[object, object]]) -> None:
        """Add keys with their values; an existing key keeps its value."""
        self._file.executemany("insert or ignore into kept (key, value) values (?, ?)", keys)

    def add(self, key: object, value: object) -> object:
        """Add one key; returns its value: the first that was added."""
        self.put([(key, value)])
        return self._file.execute("select value from kept where key = ?", (key,)).fetchone()[0]

    def name(self, key: object) -> bool:
        """Mark a key as named; returns whether it exists."""
        return self._file.execute("update kept set named = 1 where key = ?", (key,)).rowcount > 0

    def forget(self, prefix: str) -> None:
        """Remove the keys with this prefix."""
        self._file.execute("delete from kept where substr(key, 1, ?) = ?", (len(prefix), prefix))

    def any_named(self) -> bool:
        """Whether any key is named."""
        return self._file.execute("select 1 from kept where named limit 1").fetchone() is not None

    def unnamed(self, above: float) -> Iterator[list[str]]:
        """The keys that are not named and whose values are greater than `above`, in blocks."""
        rows = self._file.execute("select key from kept where not named and value > ? order by key", (above,))
        while found := rows.fetchmany(BLOCK):
            yield [key for (key,) in found]
