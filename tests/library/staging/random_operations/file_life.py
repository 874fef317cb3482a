"""The life of a gallery whose vectors are moved into files and back by a server that is killed while it does so."""

from __future__ import annotations

import signal
import time
from typing import Any

from hypothesis import strategies as st
from sqlalchemy import select

from service.store.blob_references import open_blobs
from service.store.vectors.files import vector_file
from staging.processes.site import Site
from staging.random_operations.life import Life
from staging.random_operations.lives import NAME, step
from staging.states.vector_site import vectors_in_files
from staging.waiting import until

WAIT_SECONDS = 2.0
"""Seconds a step waits for vectors to move."""


class FileSite(Site):
    """Its server moves vectors as soon as it can."""

    SERVE = ("tests/faults/moving_server.py",)

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        open_blobs(self.database, self.settings.blobs_url)  # so that vectors are read here too

    def far(self) -> int:
        """Number of vectors in files."""
        return vectors_in_files(self.database)

    def files(self) -> dict[int, str]:
        """The state of each file that has a row."""
        with self.database.lookup() as connection:
            return {row.id: row.state for row in connection.execute(select(vector_file.c.id, vector_file.c.state))}


class FileLife(Life):
    """The life of one gallery whose vectors are in files, in the database, or being moved."""

    @property
    def site(self) -> FileSite:
        found = self.stage.site
        assert isinstance(found, FileSite)
        return found

    @step(names=st.lists(NAME, min_size=2, max_size=3, unique=True), seconds=st.floats(0, 0.2))
    def kill_who_moves(self, names: list[str], seconds: float) -> None:
        """Kill the server so long after it began to move the vectors just written, or to move vectors back."""
        self.store.__wrapped__(self, names=names, doom=None)
        before, end = (self.site.files(), self.site.far()), time.monotonic() + WAIT_SECONDS
        while (moving := (self.site.files(), self.site.far())) == before and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(seconds)
        self.stage.end_server(signal.SIGKILL)
        self._count_files()
        if moving != before:
            self.stage.counts["servers killed while they moved vectors"] += 1

    @step(store=st.sampled_from(("objects", "objects", "sql")), how=st.sampled_from((signal.SIGKILL, signal.SIGTERM)))
    def turn_over(self, store: Any, how: signal.Signals) -> None:
        """Restart the server with this storage of vectors: `objects` (files) or `sql`."""
        self.site.settings = self.site.settings.model_copy(update={"vectors": store})
        self.stage.end_server(how)

    @step()
    def let_move(self) -> None:
        """Wait until some vectors are in files, or all are in the database."""
        settled = (lambda: not self.site.far()) if self.site.settings.vectors == "sql" else self.site.far
        until(settled, seconds=30)
        self.stage.counts["times that vectors were moved"] += 1
        self._count_files()

    def finish(self) -> None:
        """Move all vectors back into the database."""
        self._count_files()
        self.stage.counts["vectors in files at the end"] += self.site.far()
        self.turn_over.__wrapped__(self, store="sql", how=signal.SIGKILL)
        until(lambda: not self.site.far(), seconds=30)
        super().finish()

    def _count_files(self) -> None:
        """Count the files written so far, by the highest number, which is never reused."""
        self.stage.counts["files"] = max(self.stage.counts["files"], *self.site.files(), 0)
