"""API keys."""

from __future__ import annotations

from typing import Literal

from regraft.models.base import ApiModel

KeyScope = Literal["query", "ingest", "admin"]
"""The permissions of a key; each includes those before it: reading and queries; changes of items; everything."""


class KeyInfo(ApiModel):
    """A key without its secret."""

    name: str
    scope: KeyScope
    created: float
    galleries: list[str] | None
    """the galleries that it is for; null: all galleries, and routes outside of galleries"""


class NewKey(KeyInfo):
    """A new key; only this answer has its secret, `key`."""

    key: str


class KeyList(ApiModel):
    """All keys, by name."""

    keys: list[KeyInfo]
