"""API keys by name."""

from __future__ import annotations

from typing import Literal

from regraft.models.base import ApiModel

KeyScope = Literal["query", "ingest", "admin"]
"""What a key opens, each what those before it do, too: reading and queries; changes of items; everything."""


class KeyInfo(ApiModel):
    """A key that is asked for; `key` itself is shown once, in the answer that made it."""

    name: str
    scope: KeyScope
    created: float
    galleries: list[str] | None
    """the galleries it opens; null: all of them, and what belongs to none"""


class NewKey(KeyInfo):
    """A key that was made now."""

    key: str


class KeyList(ApiModel):
    """Every key, by name."""

    keys: list[KeyInfo]
