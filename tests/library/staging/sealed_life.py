"""The life of a gallery that a server seals, merges, writes down and unloads all the time, and is killed at it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx
from hypothesis import strategies as st

from index.engines.config import IndexKind, Storage
from staging.life import Life
from staging.lives import NAME, step
from staging.processes import Site

KINDS = [kind.value for kind in IndexKind if not kind.is_remote]
WAIT_SECONDS, BUILD_SECONDS = 2.0, 15.0
"""So long a step waits for something to be begun, and for something to be built."""


class SealedSite(Site):
    """Its server builds segments of a few items, and has room for one gallery."""

    SERVE = ("tests/faults/sealing_server.py",)


class SealedLife(Life):
    """The life of one gallery, searched by one engine after the other."""

    @step(kind=st.sampled_from(KINDS), storage=st.sampled_from([storage.value for storage in Storage]))
    def configure(self, kind: str, storage: str) -> None:
        """Another index, while it serves."""
        index = {"kind": kind, "storage": storage}
        self.stage.http.patch(f"/galleries/{self.name}", json={"index": index}).raise_for_status()
        self.stage.counts[kind] += 1

    @step()
    def unload(self) -> None:
        """Another gallery is asked for, and there is room for one; the load asks for this one again."""
        if self.stage.http.get("/galleries/other").status_code == 404:
            self.stage.http.post("/galleries", json={"name": "other"}).raise_for_status()
        ask = {"version": "v1", "embeddings": [[1, 0, 0, 0]]}
        self.stage.http.post("/galleries/other/query", json=ask).raise_for_status()

    @step(names=st.lists(NAME, min_size=3, max_size=3, unique=True), seconds=st.floats(0, 0.1))
    def kill_who_builds(self, names: list[str], seconds: float) -> None:
        """So long after files below `indexes` began to change by what was written."""
        self.store.__wrapped__(self, names=names, doom=None)
        before, end = self._files(), time.monotonic() + WAIT_SECONDS
        while self._files() == before and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(seconds)
        self.stage.counts["servers killed while they built"] += self._files() != before
        self.stage.end_server(signal.SIGKILL)

    @step()
    def let_build(self) -> None:
        """Until an index answers for some of the items, if there is to be one."""
        self.stage.http.patch(f"/galleries/{self.name}", json={"index": {"kind": "hnsw"}}).raise_for_status()
        end = time.monotonic() + BUILD_SECONDS
        while not (indexed := self.shown()["indexed"]) and time.monotonic() < end:
            time.sleep(0.01)
        self.stage.counts["items indexed"] += indexed

    def finish(self) -> None:
        """At last an index answers, and everything is killed."""
        self.let_build.__wrapped__(self)
        super().finish()

    def query(self, **request: Any) -> httpx.Response:
        """All items are found in any case; of the best few an index may miss one."""
        options = request.get("json", request.get("data"))
        if int(options["k"]) < len(self.model.items):
            options["exact"] = True if "json" in request else "true"
        return super().query(**request)

    def _files(self) -> list[tuple[str, list[str], list[str]]]:
        return list(os.walk(self.stage.site.settings.indexes))
