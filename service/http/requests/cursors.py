"""Opaque cursors for reading lists page by page, in the order of keys."""

from __future__ import annotations

import base64

from index.errors import InvalidArgument
from service.schemas import MOST

MAX_CURSOR = 200
"""Most characters of a cursor."""


def encode_cursor(owner: int, key: int) -> str:
    """The cursor of the page after row `key`; `owner`: the key of the gallery, backfill or chunk that is listed."""
    return base64.urlsafe_b64encode(f"{owner} {key}".encode()).decode()


def decode_cursor(owner: int, cursor: str) -> int:
    """The key after which a page begins, 0 for no cursor. Raises InvalidArgument, also for another owner's cursor."""
    if not cursor:
        return 0
    try:
        made_for, key = map(int, base64.urlsafe_b64decode(cursor[: MAX_CURSOR + 1]).split(b" "))
        if made_for == owner and 0 <= key <= MOST:
            return key
    except ValueError:
        pass
    raise InvalidArgument("cursor must be the `next` of an earlier page of this list", pointer="/cursor")
