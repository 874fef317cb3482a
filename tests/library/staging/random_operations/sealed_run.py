"""The random operations of `run`, on a gallery that is often sealed, indexed, merged, unloaded and read from files.

Its index is changed while it serves, so that one life uses every engine in memory. A second process has the gallery
too: each seals, and adopts the segments that the other has built.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from index.engines.config import IndexKind, Storage
from index.engines.memory.job import Job
from service.replica.engines import Engines
from service.replica.indexer import Indexer
from service.replica.loaded import LoadedGallery
from staging.random_operations.lives import Follower
from staging.random_operations.run import RACING, Run

KINDS = [kind.value for kind in IndexKind if not kind.is_remote]
G, OTHER = 1, "other"


class SealedRun(Run):
    """One life, with a second gallery, and memory for one of them only."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.counts: Counter[str] = Counter()
        super().__init__(*given, memory=1, **more)
        self.engines = Engines(self.settings)

    beside: Follower | None = None
    """The other process, if it has the gallery in memory."""

    def start(self) -> None:
        super().start()
        self.replica = self.http.app.state.runtime.replica
        self.indexer = Indexer(self.replica)

    def seal(self) -> None:
        """Build and write everything that is due."""
        loaded = self.replica.find("g")
        look(self.indexer, loaded)
        self.counts["most indexed"] = max(self.counts["most indexed"], loaded.gallery.indexed_count())
        self.counts["snapshots"] += loaded.snapshot_seq > 0

    def seal_beside(self) -> None:
        """Run another operation after the first index was built and before it is swapped in."""
        run, due = Job.run, [self.choose(RACING)]

        def beside(job: Job, stopped: Callable[[], bool]) -> bool:
            done = run(job, stopped)
            self.counts[f"segments merged: {len(job.replaced)}"] += 1
            while due:
                due.pop()()
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Job, "run", beside)
            self.seal()
        while due:  # nothing was to be built
            due.pop()()

    def seal_elsewhere(self) -> None:
        """Let the other process seal."""
        if self.beside is None:
            self.beside = Follower(self.settings, self.database, self.engines, "g")
        self.beside.replica.refresh(G)
        look(Indexer(self.beside.replica), self.beside.loaded)

    def check(self) -> None:
        super().check()
        if self.beside is not None:
            told = self.beside.answer(self.world, 3, len(self.model.items))
            expected, _ = self.model.by_picture(3)
            assert sorted(told.values()) == pytest.approx(sorted(one.score for one in expected.values()), abs=1e-4)

    def configure(self) -> None:
        """Change the index while it serves; it is built later."""
        index = {"kind": self.draw.choice(KINDS), "storage": self.draw.choice(list(Storage)).value}
        self.http.patch("/galleries/g", json={"index": index}).raise_for_status()
        self.counts[index["kind"]] += 1

    def unload(self) -> None:
        """Query the other gallery, which unloads this one."""
        self.http.post(f"/galleries/{OTHER}/query", json={"version": "v1", "embeddings": [[1, 0, 0, 0]]})
        assert self.replica.cache.peek(G) is None
        self.counts["unloaded"] += 1

    def damage(self) -> None:
        """Remove, truncate or change a file below `indexes` while nothing runs."""
        self.life.close()
        self.beside = None
        files = sorted(path for path in self.settings.indexes.rglob("*") if path.is_file())
        if files:
            harm(self.draw.choice(files), self.draw.choice(["gone", "cut", "changed"]))
            self.counts["files damaged"] += 1
        self.start()

    def ask_for_best(self) -> None:
        super().ask_for_best()
        number, k = self.draw.randint(0, 50), 3
        files = [("images", ("q", self.world.as_bytes(number)))]
        answer = self.http.post("/galleries/g/query", data={"k": str(k)}, files=files).json()
        expected, _ = self.model.by_picture(number)
        matches = answer["results"][0]["matches"]
        assert len({match["id"] for match in matches}) == len(matches) == min(k, len(expected))
        for match in matches:  # no dead rows, none served by another version; correct scores
            assert match["score"] == pytest.approx(expected[match["id"]].score, abs=1e-4)
        worst = sorted((one.score for one in expected.values()), reverse=True)[: len(matches)]
        self.counts["best found"] += sum(match["score"] >= worst[-1] - 1e-5 for match in matches)
        self.counts["best asked for"] += len(matches)


def look(indexer: Indexer, loaded: LoadedGallery) -> None:
    """The step of the indexer's thread after a recent write."""
    indexer._unchanged_since = {loaded.id: (loaded.seq, time.monotonic())}
    indexer._index_gallery(loaded)


def harm(path: Path, how: str) -> None:
    """Damage a file."""
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes(content[:middle] if how == "cut" else changed)


SEALING = {"seal": 8, "seal_beside": 5, "seal_elsewhere": 5, "configure": 3, "unload": 4, "damage": 1, "restart": 1}
"""Operation -> weight, in addition to the operations of `run`."""
