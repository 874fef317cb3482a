"""What a key allows: its scope and its galleries, checked by method and path alone, before anything else."""

from __future__ import annotations

from typing import get_args

from regraft.models import KeyScope
from service.errors import Forbidden
from service.store.api_keys import ApiKeyRow

SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
READ = {"GET", "HEAD"}
ADMINISTRATION = ("/v1/audit", "/v1/keys", "/v1/work")
"""Routes below these need the scope `admin` to be read, too."""


def required_scope(method: str, path: str) -> KeyScope:
    """The lowest scope that allows a request; what no rule names needs `admin`."""
    match path.split("/"):
        case ["", "v1", "galleries", _, "query" | "items:list"]:
            return "query"
        case ["", "v1", "galleries", _, items, *_] if method not in READ and items.partition(":")[0] == "items":
            return "ingest"
    return "query" if method in READ and not path.startswith(ADMINISTRATION) else "admin"


def check_allowed(key: ApiKeyRow, method: str, path: str) -> None:
    """Raise Forbidden, with the reason, unless the key's scope and its galleries allow a request."""
    required = required_scope(method, path)
    if SCOPES.index(key.scope) < SCOPES.index(required):
        raise Forbidden(f"this requires the scope {required}; the key {key.name!r} has the scope {key.scope}")
    if key.galleries is not None and not _opens_gallery(key, method, path):
        raise outside_galleries(key)


def _opens_gallery(key: ApiKeyRow, method: str, path: str) -> bool:
    """Whether a key limited to some galleries allows a request; what no rule names is for unlimited keys.

    Versions and edges belong to no gallery. A backfill's number does not tell its gallery: its routes look it up
    (`service.http.requests.KEY_OPENS_BACKFILL`), and the list of galleries shows those of the key.
    """
    match path.split("/"):
        case ["", "v1", "galleries", name, *_]:
            return key.opens(name)
        case ["", "v1", "galleries"] | ["", "v1", "versions" | "edges", *_] | ["", "docs" | "openapi.json"]:
            return method in READ
    return path.startswith("/v1/backfills/")


def outside_galleries(key: ApiKeyRow) -> Forbidden:
    """The error for a key limited to some galleries that asks for another."""
    return Forbidden(f"the key {key.name!r} is only valid for these galleries: {', '.join(key.galleries or ())}")
