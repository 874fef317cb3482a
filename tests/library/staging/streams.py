"""Server-sent events as a test reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from regraft.routes.backfills import Event, Events


def events(lines: Iterable[str]) -> Iterator[Event]:
    """The events in the lines of an answer, as they come."""
    coming = Events()
    return (event for line in lines if (event := coming.after(line)) is not None)
