"""The permissions of a key, its scope and galleries, which are checked first, by method and path alone."""

from __future__ import annotations

from typing import get_args

from regraft.models import KeyScope
from service.errors import Forbidden
from service.store.api_keys import ApiKeyRow

SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
READ = {"GET", "HEAD"}
ADMINISTRATION = ("/v1/audit", "/v1/keys", "/v1/work")
"""Paths of routes that need the scope `admin` even for reading."""


def required_scope(method: str, path: str) -> KeyScope:
    """The lowest scope that permits a request; `admin` if no rule applies."""
    match path.split("/"):
        case ["", "v1", "galleries", _, "query" | "items:list"]:
            return "query"
        case ["", "v1", "galleries", _, items, *_] if method not in READ and items.partition(":")[0] == "items":
            return "ingest"
    return "query" if method in READ and not path.startswith(ADMINISTRATION) else "admin"


def check_allowed(key: ApiKeyRow, method: str, path: str) -> None:
    """Raise Forbidden, with the reason, unless the key's scope and galleries permit a request."""
    required = required_scope(method, path)
    if SCOPES.index(key.scope) < SCOPES.index(required):
        raise Forbidden(f"this requires the scope {required}; the key {key.name!r} has the scope {key.scope}")
    if key.galleries is not None and not _opens_gallery(key, method, path):
        raise outside_galleries(key)


def _opens_gallery(key: ApiKeyRow, method: str, path: str) -> bool:
    """Whether a key limited to some galleries permits a request; False if no rule applies.

    Versions and edges belong to no gallery and can be read. The list of galleries shows only those of the key, and
    routes of backfills look up their gallery themselves (`service.http.backfills.access.KEY_OPENS_BACKFILL`).
    """
    match path.split("/"):
        case ["", "v1", "galleries", name, *_]:
            return key.opens(name)
        case ["", "v1", "galleries"] | ["", "v1", "versions" | "edges", *_] | ["", "docs" | "openapi.json"]:
            return method in READ
    return path.startswith("/v1/backfills/")


def outside_galleries(key: ApiKeyRow) -> Forbidden:
    """The error of a request for a gallery that the key does not permit."""
    return Forbidden(f"the key {key.name!r} is only valid for these galleries: {', '.join(key.galleries or ())}")
