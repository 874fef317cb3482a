"""Server-sent events as a test reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from regraft.routes.backfills import Event, Events


def events(texts: Iterable[str]) -> Iterator[Event]:
    """Parse the events in the parts of an answer."""
    coming = Events()
    return (event for text in texts for event in coming.after(text))
