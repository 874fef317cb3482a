"""The audit log over HTTP: changes, newest first."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import select

from regraft.models import AuditPage, AuditRecord
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import Service
from service.schemas import Number
from service.store.tables import audit

router = APIRouter(route_class=CheckedRoute, tags=["audit"])


@router.get("/audit")
def list_all(
    service: Service,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[Number | None, Query(description="only rows with a smaller id")] = None,
) -> AuditPage:
    """List changes to versions, edges, evaluation sets, backfills and galleries, newest first."""
    found = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if before is not None:
        found = found.where(audit.c.id < before)
    with service.database.lookup() as connection:
        return AuditPage(
            audit=[AuditRecord.model_validate(row, from_attributes=True) for row in connection.execute(found)]
        )
