"""The audit over HTTP: changes, newest first."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy import select

from service.http.requests import CheckedRoute, Service
from service.schemas import Number
from service.store.tables import audit

router = APIRouter(route_class=CheckedRoute, tags=["audit"])


class AuditOut(BaseModel):
    """A change: `subject` is what was changed, `evidence` what it did."""

    id: int
    at: float
    who: str
    action: str
    subject: str
    why: str
    evidence: dict[str, Any]


class Audit(BaseModel):
    """Changes, newest first."""

    audit: list[AuditOut]


@router.get("/audit")
def list_all(
    service: Service,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[Number | None, Query(description="only rows with a smaller id")] = None,
) -> Audit:
    """Changes to versions, edges, evaluation sets, backfills and galleries, newest first."""
    found = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if before is not None:
        found = found.where(audit.c.id < before)
    with service.database.lookup() as connection:
        return Audit(audit=[AuditOut.model_validate(row, from_attributes=True) for row in connection.execute(found)])
