"""API keys: make, list, delete. The one of the settings opens everything, and is none of these."""

from __future__ import annotations

from fastapi import APIRouter, Request
from sqlalchemy.exc import IntegrityError

from regraft.models import KeyInfo, KeyList, KeyScope, NewKey
from service.errors import KeyExists, NobodyAsked
from service.http.request_context import CONFIRMED, RequestContext
from service.http.requests import CheckedRoute, Service, check_name
from service.schemas import Body, Name
from service.store.api_keys import add_key, all_keys, delete_key, key_named
from service.store.audit import record

router = APIRouter(route_class=CheckedRoute, tags=["keys"])

TAKEN = {"api_key", "canary", "local", "worker"}
"""Whom the audit names itself: who asks with the keys of the settings, or none, and a canary that ends itself."""


class KeyIn(Body):
    """A key's name, and what it opens."""

    name: Name
    scope: KeyScope


@router.post("/keys", status_code=201)
def create(body: KeyIn, request: Request, service: Service) -> NewKey:
    """Make a key; the answer shows it, and nothing does later."""
    check_name(body.name, TAKEN)
    if service.settings.api_key is None:
        raise NobodyAsked
    try:
        with service.database.write() as connection:
            row, key = add_key(connection, body.name, body.scope)
            record(connection, request.state.who, "key_created", body.name, scope=body.scope)
    except IntegrityError:
        raise KeyExists(f"key {body.name!r} exists already: delete it first", pointer="/name") from None
    return NewKey(name=row.name, scope=row.scope, created=row.created, key=key)


@router.get("/keys")
def list_all(service: Service) -> KeyList:
    """Every key, without itself."""
    with service.database.lookup() as connection:
        rows = all_keys(connection)
    return KeyList(keys=[KeyInfo(name=row.name, scope=row.scope, created=row.created) for row in rows])


@router.delete("/keys/{name}", status_code=204, dependencies=[CONFIRMED])
def remove(name: Name, service: Service, context: RequestContext) -> None:
    """Have a key open nothing any more: here at once, in other processes within a second."""
    with service.database.write(dry_run=context.dry_run) as connection:
        row = key_named(connection, name)
        delete_key(connection, name)
        record(connection, context.who, "key_deleted", name, scope=row.scope)
    service.keys.read()
