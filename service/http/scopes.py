"""What a key opens: its scope and its galleries, by method and path alone, before anything else looks at a request."""

from __future__ import annotations

from typing import get_args

from regraft.models import KeyScope
from service.errors import Forbidden
from service.store.api_keys import ApiKeyRow

SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)
READ = {"GET", "HEAD"}
ADMINISTRATION = ("/v1/audit", "/v1/keys", "/v1/work")
"""What is read below them is for those who run the service."""


def wanted(method: str, path: str) -> KeyScope:
    """The least scope that opens a route; what no rule names is for `admin`."""
    match path.split("/"):
        case ["", "v1", "galleries", _, "query" | "items:list"]:
            return "query"
        case ["", "v1", "galleries", _, items, *_] if method not in READ and items.partition(":")[0] == "items":
            return "ingest"
    return "query" if method in READ and not path.startswith(ADMINISTRATION) else "admin"


def check_opens(key: ApiKeyRow, method: str, path: str) -> None:
    """Raise Forbidden, which says why, unless the key's scope and its galleries open a route."""
    least = wanted(method, path)
    if SCOPES.index(key.scope) < SCOPES.index(least):
        raise Forbidden(f"the scope of the key {key.name!r} is {key.scope}, and this wants {least}")
    if key.galleries is not None and not _reaches(key, method, path):
        raise beyond(key)


def _reaches(key: ApiKeyRow, method: str, path: str) -> bool:
    """Whether a key of some galleries opens a route; what no rule names is for keys of all.

    Versions and edges belong to no gallery. Whose a backfill is, its number does not say: its routes look
    (`service.http.requests.OF_ITS_GALLERIES`), and the list of galleries shows those of the key.
    """
    match path.split("/"):
        case ["", "v1", "galleries", name, *_]:
            return key.opens(name)
        case ["", "v1", "galleries"] | ["", "v1", "versions" | "edges", *_] | ["", "docs" | "openapi.json"]:
            return method in READ
    return path.startswith("/v1/backfills/")


def beyond(key: ApiKeyRow) -> Forbidden:
    """What a key of some galleries is told that asks for more."""
    return Forbidden(f"the key {key.name!r} is for these galleries alone: {', '.join(key.galleries or ())}")
