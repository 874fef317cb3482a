"""Keys that are limited to some galleries, on routes whose path names a backfill and no gallery."""

from __future__ import annotations

from fastapi import Depends, Request

from service.backfills.records import backfill_row
from service.http.requests.dependencies import Service
from service.http.server.scopes import outside_galleries
from service.runtime import Runtime
from service.schemas import Number
from service.store.api_keys import ApiKeyRow
from service.store.galleries.gallery import gallery_row


async def _key_opens_backfill(request: Request, number: Number, service: Service) -> None:
    key: ApiKeyRow | None = request.state.key
    if key is not None and key.galleries is not None:
        await service.run_blocking(_check_key, service, key, number)


def _check_key(service: Runtime, key: ApiKeyRow, number: int) -> None:
    with service.database.read() as connection:
        gallery = gallery_row(connection, backfill_row(connection, number).gallery_id)
    if gallery is None or not key.opens(gallery.name):
        raise outside_galleries(key)


KEY_OPENS_BACKFILL = Depends(_key_opens_backfill)
"""Dependency of a route for one backfill: a key limited to some galleries permits only their backfills."""
