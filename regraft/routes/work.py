"""Client methods for remote workers, which use the worker key."""

from __future__ import annotations

from collections.abc import Sequence

from regraft.connection import Connection, Json, read
from regraft.models import WorkClaim, WorkCounts, WorkInputs
from regraft.paths import flag, path_of
from regraft.routes.route import route


class WorkRoutes(Connection):
    """Methods of both clients; changes have short timeouts too, because leases expire."""

    @route
    async def claim_work(self, worker: str, kinds: Sequence[str] = ("reencode", "transform")) -> WorkClaim | None:
        """POST /v1/work:claim: the next chunk; None if there is none."""
        answer = await self._send("POST", "/work:claim", quick=True, json={"worker": worker, "kinds": list(kinds)})
        return None if answer.status_code == 204 else read(WorkClaim, answer.content)

    @route
    async def work(self, chunk: int, lease: str, *, inputs: bool = True, cursor: str = "") -> WorkInputs:
        """GET /v1/work/{chunk}: a page of items with their inputs; `inputs=False`: without images and texts."""
        params = {"lease": lease, "inputs": flag(inputs), "cursor": cursor}
        return await self._ask(WorkInputs, "GET", path_of("work", chunk), params=params)

    @route
    async def return_work(self, chunk: int, lease: str, result: Json) -> WorkCounts:
        """POST /v1/work/{chunk}: send new embeddings and failures; returns the counts of accepted ones."""
        return await self._ask(
            WorkCounts, "POST", path_of("work", chunk), quick=True, params={"lease": lease}, json=result
        )

    @route
    async def extend_work(self, chunk: int, lease: str) -> None:
        """POST /v1/work/{chunk}/extend: a heartbeat."""
        await self._send("POST", path_of("work", chunk, "extend"), quick=True, params={"lease": lease})

    @route
    async def release_work(self, chunk: int, lease: str, *, failed: bool = False) -> None:
        """POST /v1/work/{chunk}/release: return the chunk undone; if `failed`, it is free only after its lease."""
        params = {"lease": lease, "failed": flag(failed)}
        await self._send("POST", path_of("work", chunk, "release"), quick=True, params=params)

    @route
    async def work_edge(self, number: int) -> bytes:
        """GET /v1/work/edges/{number}: the edge's folder as a .zip."""
        archive: bytes = (await self._send("GET", path_of("work", "edges", number))).content
        return archive

    @route
    async def work_version(self, name: str) -> bytes:
        """GET /v1/work/versions/{name}: the version folder as a .zip."""
        archive: bytes = (await self._send("GET", path_of("work", "versions", name))).content
        return archive
