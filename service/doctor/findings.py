"""What the doctor says, and whom he looks at."""

from __future__ import annotations

from dataclasses import dataclass, field

from service.doctor.on_disk import KeysOnDisk
from service.registry.registry import Registry
from service.settings import Settings
from service.store.blobs import Blobs
from service.store.database import Database
from service.store.repository import all_galleries
from service.store.rows import GalleryRow

EXAMPLES = 5
ORPHAN_SECONDS = 3600.0
"""What is younger than this may belong to a write that is not committed yet."""


@dataclass
class Finding:
    """Something wrong: `count` things of one kind, some of them by name, and what to do about them.

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
        """Count one more."""
        self.count += count
        if len(self.examples) < EXAMPLES:
            self.examples.append(example)


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


def remove_orphans(context: Context, orphan: Finding, stored: KeysOnDisk, advice: str, *, fix: bool) -> Finding:
    """Have a finding count what is stored (with its age in seconds) and not named, and with `fix` remove it.

    `advice`: where nothing that is stored is named. A setting that was forgotten must not cost everything there is.
    """
    known = stored.any_named()
    for lost in stored.unnamed(ORPHAN_SECONDS):
        for key in lost:
            orphan.add(key)
        if fix and known:
            context.blobs.remove(lost)
            orphan.fixed += len(lost)
    if orphan.count and not known:
        orphan.severity, orphan.fixable, orphan.advice = "warning", False, advice
    return orphan
