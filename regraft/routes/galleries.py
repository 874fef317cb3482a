"""Client methods for the service and its galleries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regraft.connection import Connection
from regraft.models import AuditPage, AuditRecord, GalleryInfo, GalleryList, Health, Readiness
from regraft.paths import change_params, delete_params, path_of
from regraft.routes.route import route


class GalleryRoutes(Connection):
    """Methods of both clients."""

    @route
    async def health(self) -> Health:
        """GET /v1/health: the process answers."""
        return await self._ask(Health, "GET", "health")

    @route
    async def ready(self) -> Readiness:
        """GET /v1/health/ready: `status` is ready or degraded; `problems` lists damaged parts, which are not used."""
        return await self._ask(Readiness, "GET", "health/ready")

    @route
    async def audit(self, *, limit: int = 100, before: int | None = None) -> list[AuditRecord]:
        """GET /v1/audit: who changed what, newest first; `before` is the id of the last row seen."""
        params = {"limit": limit} if before is None else {"limit": limit, "before": before}
        return (await self._ask(AuditPage, "GET", "audit", params=params)).audit

    @route
    async def create_gallery(self, name: str, *, index: Mapping[str, Any] | None = None) -> GalleryInfo:
        """POST /v1/galleries; `index`: fields of `IndexConfig`, others have their defaults."""
        return await self._ask(GalleryInfo, "POST", "galleries", json={"name": name, "index": dict(index or {})})

    @route
    async def change_gallery(self, name: str, *, index: Mapping[str, Any], dry_run: bool = False) -> GalleryInfo:
        """PATCH /v1/galleries/{gallery}: change its index while it serves."""
        body = {"index": dict(index)}
        return await self._ask(
            GalleryInfo, "PATCH", path_of("galleries", name), json=body, params=change_params(dry_run)
        )

    @route
    async def galleries(self) -> list[GalleryInfo]:
        """GET /v1/galleries."""
        return (await self._ask(GalleryList, "GET", "galleries")).galleries

    @route
    async def gallery(self, name: str) -> GalleryInfo:
        """GET /v1/galleries/{gallery}: current version, number of items, and number of embeddings per version."""
        return await self._ask(GalleryInfo, "GET", path_of("galleries", name))

    @route
    async def delete_gallery(self, name: str, *, dry_run: bool = False) -> None:
        """DELETE /v1/galleries/{gallery}, with everything in it."""
        await self._delete(path_of("galleries", name), params=delete_params(name, dry_run))
