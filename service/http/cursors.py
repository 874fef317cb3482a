"""Cursors of lists in the order of their keys: opaque to whoever reads a list page by page."""

from __future__ import annotations

import base64

from index.errors import InvalidArgument
from service.schemas import MOST

MAX_CURSOR = 200
"""Characters of a cursor."""


def encode_cursor(key: int) -> str:
    """The cursor behind the row of this key."""
    return base64.urlsafe_b64encode(str(key).encode()).decode()


def decode_cursor(cursor: str) -> int:
    """The key a page begins behind; 0 for no cursor. Raises InvalidArgument."""
    try:
        key = int(base64.urlsafe_b64decode(cursor[: MAX_CURSOR + 1])) if cursor else 0
    except ValueError:
        key = -1
    if not 0 <= key <= MOST:
        raise InvalidArgument("cursor must be the `next` of an earlier page", pointer="/cursor")
    return key
