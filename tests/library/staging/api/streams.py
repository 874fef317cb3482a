"""Server-sent events as a test reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from regraft.routes.backfills import Event, Events


def events(lines: Iterable[str]) -> Iterator[Event]:
    """Parse the events in the lines of an answer."""
    coming = Events()
    return (event for line in lines if (event := coming.after(line)) is not None)
