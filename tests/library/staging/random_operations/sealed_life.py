"""The life of a gallery that a server constantly seals, merges, writes to disk and unloads, and is killed at it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx
from hypothesis import strategies as st

from index.engines.config import IndexKind, Storage
from staging.processes.site import Site
from staging.random_operations.life import Life
from staging.random_operations.lives import NAME, step

KINDS = [kind.value for kind in IndexKind if not kind.is_remote]
WAIT_SECONDS, BUILD_SECONDS = 2.0, 15.0
"""Seconds a step waits for the start of a build, and for its end."""


class SealedSite(Site):
    """A site whose server builds segments of a few items and keeps one gallery in memory."""

    SERVE = ("tests/faults/sealing_server.py",)


class SealedLife(Life):
    """The life of one gallery, searched by one engine after the other."""

    @step(kind=st.sampled_from(KINDS), storage=st.sampled_from([storage.value for storage in Storage]))
    def configure(self, kind: str, storage: str) -> None:
        """Change the index while it serves."""
        index = {"kind": kind, "storage": storage}
        self.stage.http.patch(f"/galleries/{self.name}", json={"index": index}).raise_for_status()
        self.stage.counts[kind] += 1

    @step()
    def unload(self) -> None:
        """Query another gallery, which unloads this one; the load then loads it again."""
        if self.stage.http.get("/galleries/other").status_code == 404:
            self.stage.http.post("/galleries", json={"name": "other"}).raise_for_status()
        ask = {"version": "v1", "embeddings": [[1, 0, 0, 0]]}
        self.stage.http.post("/galleries/other/query", json=ask).raise_for_status()

    @step(names=st.lists(NAME, min_size=3, max_size=3, unique=True), seconds=st.floats(0, 0.1))
    def kill_who_builds(self, names: list[str], seconds: float) -> None:
        """Kill the server so long after a write made files below `indexes` change."""
        self.store.__wrapped__(self, names=names, doom=None)
        before, end = self._files(), time.monotonic() + WAIT_SECONDS
        while self._files() == before and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(seconds)
        self.stage.counts["servers killed while they built"] += self._files() != before
        self.stage.end_server(signal.SIGKILL)

    @step()
    def let_build(self) -> None:
        """Wait until an index serves some of the items, if one is configured."""
        self.stage.http.patch(f"/galleries/{self.name}", json={"index": {"kind": "hnsw"}}).raise_for_status()
        end = time.monotonic() + BUILD_SECONDS
        while not (indexed := self.shown()["indexed"]) and time.monotonic() < end:
            time.sleep(0.01)
        self.stage.counts["items indexed"] += indexed

    def finish(self) -> None:
        """Wait for an index, then kill everything."""
        self.let_build.__wrapped__(self)
        super().finish()

    def query(self, **request: Any) -> httpx.Response:
        """Query; exact if it asks for fewer items than there are, as an index may miss some of the best."""
        options: dict[str, Any] = request["json"] if "json" in request else request["data"]
        if int(options["k"]) < len(self.model.items):
            options["exact"] = True if "json" in request else "true"
        return super().query(**request)

    def _files(self) -> list[tuple[str, list[str], list[str]]]:
        return list(os.walk(self.stage.site.settings.indexes))
