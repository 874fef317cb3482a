"""Structured log events: a name and fields.

`logger.info(Event("indexed", gallery="g", items=5))` is `action=indexed gallery=g items=5` as text; a formatter reads
name and fields (`service.logs`). `CONTEXT` has the fields that all lines of a request share.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

NOTHING: Mapping[str, object] = MappingProxyType({})
CONTEXT: ContextVar[Mapping[str, object]] = ContextVar("CONTEXT", default=NOTHING)
"""Fields of every line that this thread or task logs, such as the request id."""


class Event:
    """The message of one log record."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, /, **fields: object) -> None:
        self.name = name
        self.fields: dict[str, object] = {**fields, **CONTEXT.get()}

    def __str__(self) -> str:
        return f"action={self.name}{fields_as_text(self.fields)}"


def fields_as_text(fields: Mapping[str, object]) -> str:
    """Fields as ` name=value` on one line; values are quoted where their end would be ambiguous."""
    return "".join(f" {name}={_plain(value)}" for name, value in fields.items())


def _plain(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(" '\"=") else repr(text)
