"""The doctor's findings, and the context of its checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from service.doctor.on_disk import KeysOnDisk
from service.registry.registry import Registry
from service.settings import Settings
from service.store.database.connections import Database
from service.store.galleries.gallery import all_galleries
from service.store.image_store.blobs import Blobs, StoreUnreachable
from service.store.rows import GalleryRow

EXAMPLES = 5
ORPHAN_SECONDS = 3600.0
"""Younger files may belong to a write that is not committed yet."""


@dataclass
class Finding:
    """A kind of problem: how often it was found, some examples by name, and what to do.

    `severity`: `error` (answers are wrong or missing), `warning` (something will go wrong) or `info`.
    """

    code: str
    severity: str
    what: str
    advice: str
    count: int = 0
    examples: list[str] = field(default_factory=list)
    fixed: int = 0
    fixable: bool = False

    def add(self, example: str, count: int = 1) -> None:
        """Count one more, or `count` more."""
        self.count += count
        if len(self.examples) < EXAMPLES:
            self.examples.append(example)

    def withdraw(self, example: str) -> None:
        """Count one less, which is no problem any more."""
        self.count -= 1
        if example in self.examples:
            self.examples.remove(example)


@dataclass(frozen=True)
class Context:
    """A data folder with its database and its images."""

    settings: Settings
    database: Database
    registry: Registry
    blobs: Blobs

    def galleries(self) -> list[GalleryRow]:
        """Every gallery's row."""
        with self.database.lookup() as connection:
            return all_galleries(connection)


@contextmanager
def until_store_is_away(findings: list[Finding]) -> Iterator[None]:
    """Context of a check's use of the image store: if this does not answer, add the finding `store_unreachable`.

    What was found, and fixed, before is kept.
    """
    try:
        yield
    except StoreUnreachable as error:
        away = Finding("store_unreachable", "error", "image stores cannot be read", "make the store reachable")
        away.add(error.message)
        findings.append(away)


def remove_orphans(context: Context, orphan: Finding, stored: KeysOnDisk, advice: str, *, fix: bool) -> Finding:
    """Count stored keys (with their age in seconds) that nothing names; with `fix`, remove them.

    Those that cannot be removed are not counted as fixed. If no stored key is named at all, nothing is removed, since a
    wrong setting must not cost all files; `advice` then replaces that of the finding.
    """
    any_named = stored.any_named()
    for unnamed_keys in stored.unnamed(ORPHAN_SECONDS):
        for key in unnamed_keys:
            orphan.add(key)
        if fix and any_named:
            orphan.fixed += len(unnamed_keys) - len(context.blobs.remove(unnamed_keys))
    if orphan.count and not any_named:
        orphan.severity, orphan.fixable, orphan.advice = "warning", False, advice
    return orphan
