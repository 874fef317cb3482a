"""Client methods for edges."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regraft import inputs
from regraft.connection import Connection
from regraft.models import DomainCheck, EdgeInfo, EdgeList, EdgeRemoval
from regraft.paths import change_params, flag, path_of
from regraft.routes.route import route


class EdgeRoutes(Connection):
    """Methods of both clients."""

    @route
    async def edges(self, *, new: str | None = None, old: str | None = None) -> list[EdgeInfo]:
        """GET /v1/edges: edges with their evidence; `new`, `old`: only edges from or to this version."""
        params = {name: value for name, value in (("new", new), ("old", old)) if value}
        return (await self._ask(EdgeList, "GET", "edges", params=params)).edges

    @route
    async def edge(self, new: str, old: str, kind: str) -> EdgeInfo:
        """GET /v1/edges/{new}/{old}/{kind}."""
        return await self._ask(EdgeInfo, "GET", path_of("edges", new, old, kind))

    @route
    async def add_edge(
        self, new: str, old: str, folder: Path, *, replace: bool = False, dry_run: bool = False
    ) -> EdgeInfo:
        """POST /v1/edges: add an edge from its folder (edge.json and its other files), or a .zip of it."""
        with tempfile.TemporaryDirectory() as scratch:
            archive = await self._run_blocking(inputs.archive, folder, Path(scratch))
            with archive.open("rb") as stream:
                data = {"new": new, "old": old, "replace": flag(replace)}
                files = {"archive": (archive.name, stream, "application/zip")}
                return await self._ask(EdgeInfo, "POST", "edges", params=change_params(dry_run), data=data, files=files)

    @route
    async def declare_edge(
        self,
        new: str,
        old: str,
        kind: str,
        *,
        verify: Mapping[str, Any] | None = None,
        replace: bool = False,
        dry_run: bool = False,
    ) -> EdgeInfo:
        """POST /v1/edges: add an edge without files. `verify`: {gallery, items, seed}, what to verify it on."""
        checked = {"verify": dict(verify)} if verify is not None else {}
        body = {"new": new, "old": old, "kind": kind, "replace": replace, **checked}
        return await self._ask(EdgeInfo, "POST", "edges", params=change_params(dry_run), json=body)

    @route
    async def fit_edge(
        self, /, new: str, old: str, kind: str, *, pairs: Path | None = None, dry_run: bool = False, **asked: Any
    ) -> EdgeInfo:
        """POST /v1/edges:fit: procrustes, ridge, low_rank, slerp or auto, on items that have both embeddings.

        `pairs`: an .npz to fit on instead, with `new` (S, M), `old` (S, N) of the same inputs, and `labels` (S,) if
        known. `asked`: options, seed, replace, and without `pairs` gallery, sample, label.
        """
        # Without the slash httpx would read "edges" as a scheme.
        path, params = "/edges:fit", change_params(dry_run)
        named = {"new": new, "old": old, "kind": kind}
        if pairs is None:
            return await self._ask(EdgeInfo, "POST", path, params=params, json={**named, **asked})
        data = {**named, **{name: inputs.as_json(value) for name, value in asked.items()}}
        with pairs.open("rb") as stream:
            return await self._ask(
                EdgeInfo, "POST", path, params=params, data=data, files={"pairs": (pairs.name, stream)}
            )

    @route
    async def check_edge(
        self,
        new: str,
        old: str,
        kind: str,
        *,
        vectors: Path | None = None,
        gallery: str | None = None,
        sample: int = 1000,
        seed: int = 0,
    ) -> DomainCheck:
        """POST /v1/edges:check: whether queries are in the domain of a fitted edge.

        `vectors`: an .npy of queries embedded by `new` (Q, M); or `gallery`: its items that have embeddings of `new`.
        """
        named: dict[str, Any] = {"new": new, "old": old, "kind": kind}
        if vectors is None:
            asked = {**named, "gallery": gallery, "sample": sample, "seed": seed}
            return await self._ask(DomainCheck, "POST", "/edges:check", json=asked)
        with vectors.open("rb") as stream:
            files = {"vectors": (vectors.name, stream)}
            return await self._ask(DomainCheck, "POST", "/edges:check", data=named, files=files)

    @route
    async def remove_edge(
        self, new: str, old: str, kind: str, *, dry_run: bool = False, force: bool = False, reason: str = ""
    ) -> EdgeRemoval:
        """DELETE /v1/edges/{new}/{old}/{kind}; `dry_run`: only list the galleries that depend on it."""
        params = {"confirm": kind, "dry_run": flag(dry_run), "force": flag(force), "reason": reason}
        return await self._ask(EdgeRemoval, "DELETE", path_of("edges", new, old, kind), params=params)
