"""API keys over HTTP: create, list, delete. The key in the settings permits everything and is not among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from index.errors import shortened
from regraft.models import KeyInfo, KeyList, KeyScope, NewKey
from service.errors import KeyExists, NobodyAsked, UnknownGallery
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import CONFIRMED, RequestContext, Service
from service.schemas import Body, Name, check_name
from service.store.api_keys import ApiKeyRow, add_key, all_keys, delete_key, key_named
from service.store.audit import record
from service.store.galleries.gallery import all_galleries

router = APIRouter(route_class=CheckedRoute, tags=["keys"])

RESERVED = {"api_key", "canary", "local", "worker"}
"""Names with a meaning in the audit log: the keys in the settings, no key, and a canary that ends itself."""


class KeyIn(Body):
    """A key's name and scope, for all galleries or for some existing ones."""

    name: Name
    scope: KeyScope
    galleries: Annotated[list[Name] | None, Field(min_length=1, max_length=100)] = None


@router.post("/keys", status_code=201)
def create(body: KeyIn, request: Request, service: Service) -> NewKey:
    """Create a key; only this answer shows it."""
    check_name(body.name, RESERVED)
    if service.settings.api_key is None:
        raise NobodyAsked
    try:
        with service.database.write() as connection:
            _check_galleries(connection, body.galleries or ())
            galleries = None if body.galleries is None else list(dict.fromkeys(body.galleries))
            row, key = add_key(connection, body.name, body.scope, galleries)
            record(connection, request.state.who, "key_created", body.name, **_access(row))
    except IntegrityError:
        raise KeyExists(f"key {body.name!r} already exists: delete it first", pointer="/name") from None
    return NewKey(name=row.name, created=row.created, key=key, **_access(row))


@router.get("/keys")
def list_all(service: Service) -> KeyList:
    """List the keys, without their secrets."""
    with service.database.lookup() as connection:
        rows = all_keys(connection)
    return KeyList(keys=[KeyInfo(name=row.name, created=row.created, **_access(row)) for row in rows])


@router.delete("/keys/{name}", status_code=204, dependencies=[CONFIRMED])
def remove(name: Name, service: Service, context: RequestContext) -> None:
    """Delete a key: it stops working in this process at once, in others within a second."""
    with service.database.write(dry_run=context.dry_run) as connection:
        row = key_named(connection, name)
        delete_key(connection, name)
        record(connection, context.who, "key_deleted", name, **_access(row))
    service.keys.refresh()


def _check_galleries(connection: Connection, names: Sequence[str]) -> None:
    existing = {row.name for row in all_galleries(connection)}
    for place, name in enumerate(names):
        if name not in existing:
            raise UnknownGallery(f"gallery {shortened(name)!r} does not exist", pointer=f"/galleries/{place}")


def _access(row: ApiKeyRow) -> dict[str, Any]:
    return {"scope": row.scope, "galleries": row.galleries}
