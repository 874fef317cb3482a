"""Run all checks of a data folder, and the safe fixes; see `Doctor.examine`.

A fix is safe if it loses nothing and changes only wrong answers: it normalises vectors, removes damaged embeddings of
items that keep something better, and removes files that nothing refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from service.doctor import deleted, engines, folders, images, kept_folders, places, sets, vector_files, vectors
from service.doctor.findings import Context, Finding
from service.registry.registry import Registry
from service.settings import Settings
from service.store.blob_references import open_blobs
from service.store.database.connections import Database

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
    """Runs every check on the data that a settings object points to."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database

    def examine(self, *, fix: bool = False) -> list[Finding]:
        """Every finding, the worst first; with `fix`, also apply safe fixes."""
        registry = Registry(self._database, self._settings)
        registry.sync()
        blobs = open_blobs(self._database, self._settings.blobs_url)
        context = Context(self._settings, self._database, registry, blobs)
        findings = [finding for check in CHECKS for finding in check(context, fix)]
        # Last, because embeddings removed above change which one serves an item.
        findings += [*places.check(context), *sets.check(context)]
        # Each check whose store is away says so.
        by_code = {finding.code: finding for finding in findings if finding.count}
        return sorted(by_code.values(), key=lambda f: (ORDER[f.severity], f.code))
