"""`DatabaseSource`: a database as a source, with readable errors and a check of its metric.

Unit vectors rank the same by cosine, inner product and Euclidean distance, so every space fits them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from index.errors import InvalidArgument, RegraftError
from regraft.sources.base import Batch, Column, Database, Wanted

COSINE, DOT, L2 = "cosine", "dot", "l2"
METRICS = {
    "cosine": COSINE,
    "cosinesimil": COSINE,
    "dot": DOT,
    "ip": DOT,
    "innerproduct": DOT,
    "euclid": L2,
    "l2": L2,
    "l2-squared": L2,
}
"""Name of a metric in databases, in lower case -> metric; others do not rank as any space does."""
UNIT_TOLERANCE = 0.01
"""Largest difference from length 1 of a unit vector; some databases store half precision."""


class DatabaseSource:
    """The rows of a database; refuses vectors whose metric there does not fit their version's space.

    `name`: of the database, for messages. `wanted`: the columns. `space_of`: version -> kind of its space; None: no
    check. `note`: a warning about all vectors; empty: none.

    Raises:
        InvalidArgument: a wanted field of metadata does not exist, in a database that knows its fields.
    """

    def __init__(
        self,
        name: str,
        database: Database,
        wanted: Wanted,
        space_of: Callable[[str | None], str] | None,
        note: str = "",
    ) -> None:
        self.note = note
        if (there := database.fields) is not None:
            _check_fields(name, wanted.metadata or (), there)
            _check_fields(name, wanted.flatten, there, "/flatten")
        self._name, self._database, self._wanted, self._space_of = name, database, wanted, space_of

    @property
    def identity(self) -> str:
        return f"{self._database.identity} {self._wanted}"

    @property
    def count(self) -> int | None:
        with readable_errors(self._name):
            return self._database.count

    def batches(self, size: int, after: Any = None) -> Iterator[Batch]:
        with readable_errors(self._name):
            odd = self._other_metrics()
            for batch in self._database.batches(size, after):
                for column in batch.columns:
                    if column.version in odd:
                        self._check(column, *odd[column.version])
                yield batch

    def _other_metrics(self) -> dict[str | None, tuple[str, str]]:
        """Version -> (metric of the database, space), for versions whose space does not fit."""
        if self._space_of is None:
            return {}
        said = {version: (word, self._space_of(version)) for version, word in self._database.metrics.items()}
        return {
            version: (word, space)
            for version, (word, space) in said.items()
            if space in (COSINE, L2) and METRICS.get(word.lower()) != space
        }

    def _check(self, column: Column, word: str, space: str) -> None:
        metric = METRICS.get(word.lower())
        lengths = np.linalg.norm(column.vectors, axis=1)
        if metric and np.allclose(lengths[np.isfinite(lengths)], 1.0, rtol=0.0, atol=UNIT_TOLERANCE):
            return
        fitting = f"; `regraft version create NAME --space {metric}` fits" if metric in (COSINE, L2) else ""
        raise InvalidArgument(
            f"{self._name} compares vectors by {word}, but {column.version or 'the current version'} has space "
            f"{space}: as not all vectors are of unit length, rankings would differ{fitting}; "
            "--ignore-metric imports them anyway",
            pointer="/version",
        )


def _check_fields(name: str, wanted: Sequence[str], there: Collection[str], pointer: str = "/metadata") -> None:
    if unknown := [field for field in wanted if field not in there]:
        legal = ", ".join(there) or "none"
        raise InvalidArgument(f"{name} has no field {unknown[0]!r}, only: {legal}", pointer=pointer)


@contextmanager
def readable_errors(name: str) -> Iterator[None]:
    """Convert errors of a database's client to InvalidArgument."""
    try:
        yield
    except (RegraftError, ModuleNotFoundError):
        raise
    except Exception as error:  # the clients raise many types, also of their libraries
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise InvalidArgument(f"{name} cannot be read: {said}") from error
