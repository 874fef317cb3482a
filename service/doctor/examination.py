"""The doctor: looks through a data folder for what should not be there, says what to do, and mends what is safe.

Safe is what changes no answer but a wrong one, and loses nothing: vectors are brought to unit length, embeddings that
nothing can be compared with are removed from items to which something better remains, and files that nothing refers to
are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from service.doctor import deleted, engines, folders, images, kept_folders, places, sets, vector_files, vectors
from service.doctor.findings import Context, Finding
from service.registry.registry import Registry
from service.settings import Settings
from service.store.blob_references import open_blobs
from service.store.database import Database

Check = Callable[[Context, bool], list[Finding]]

CHECKS: Sequence[Check] = (
    folders.check,
    kept_folders.check,
    deleted.check,
    vectors.check,
    vector_files.check,
    images.check,
    engines.check,
)

ORDER = {"error": 0, "warning": 1, "info": 2}


class Doctor:
    """Examines what one settings object points to."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database

    def examine(self, *, fix: bool = False) -> list[Finding]:
        """Every finding, the worst first; with `fix`, what is safe to mend is mended."""
        registry = Registry(self._database, self._settings)
        registry.sync()
        blobs = open_blobs(self._database, self._settings.blobs_url)
        context = Context(self._settings, self._database, registry, blobs)
        findings = [finding for check in CHECKS for finding in check(context, fix)]
        # Last: what was removed from an item decides what serves it.
        findings += [*places.check(context), *sets.check(context)]
        return sorted((f for f in findings if f.count), key=lambda f: (ORDER[f.severity], f.code))
