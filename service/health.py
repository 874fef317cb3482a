"""Health: alive, and ready to answer."""

from __future__ import annotations

from fastapi import APIRouter
from sqlalchemy import text

from index.errors import RegraftError
from service.runtime import Service

router = APIRouter(tags=["health"])

VERSION = "0.1.0"


class NotReady(RegraftError):
    """The service does not follow its database."""

    status = 503
    code = "not_ready"


@router.get("/health")
async def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok", "version": VERSION}


@router.get("/health/ready")
def ready(service: Service) -> dict[str, str]:
    """The database answers and the replica follows it."""
    with service.database.lookup() as connection:
        connection.execute(text("select 1"))
    if service.replica.failure is not None:
        raise NotReady(f"the replica cannot follow the change feed ({service.replica.failure})")
    return {"status": "ready"}
