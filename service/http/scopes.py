"""Which scope a request wants of its key: by method and path alone, before anything else looks at it."""

from __future__ import annotations

from typing import get_args

from regraft.models import KeyScope

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


def opens(scope: KeyScope, wanted: KeyScope) -> bool:
    """Whether a key of one scope opens what wants another."""
    return SCOPES.index(scope) >= SCOPES.index(wanted)
