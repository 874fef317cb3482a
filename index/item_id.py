r"""Legal item ids (`is_item_id`), defined once for the service, the client and the docs.

An id becomes a part of a URL path. Clients and proxies decode and normalise paths before a service sees them: `..`
removes the segment before it (RFC 3986, section 5.2.4), and the URL standard also reads `\` as `/` and `%2e` as `.`.
With such a segment the URL of an item could become that of its gallery, so these are illegal in any encoding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeGuard, cast
from urllib.parse import unquote

MAX_ID = 256
"""Characters in an id."""
LEGAL_ID = (
    f"a string of 1 to {MAX_ID} characters, without control characters, line breaks and halves of surrogate pairs "
    "(U+0000 to U+001F, U+007F to U+009F, U+2028, U+2029, U+D800 to U+DFFF), and with no part that is . or .. between "
    "slashes, also when they are percent-encoded"
)
"""The definition of an id, for errors."""

_UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# Ends of a path segment, or of the path.
_ENDS = re.compile(r"[/\\?#;]")
_DOT_SEGMENT = re.compile(r"(?:^|[/\\?#;])\s*\.\.?\s*(?:$|[/\\?#;])")


def is_item_id(value: object) -> TypeGuard[str]:
    """Whether a value is a legal id."""
    return isinstance(value, str) and 1 <= len(value) <= MAX_ID and is_writable(value) and not has_dot_segments(value)


def are_plain_ids(values: Sequence[object]) -> bool:
    """Whether all values are surely legal ids, a fast check; if False, check each by `is_item_id`."""
    if set(map(type, values)) != {str}:
        return False
    texts = cast("Sequence[str]", values)
    lengths = set(map(len, texts))
    joined = "/".join(texts)
    plain = joined.isprintable() and "%" not in joined  # what is printable is writable
    return plain and min(lengths) >= 1 and max(lengths) <= MAX_ID and _DOT_SEGMENT.search(joined) is None


def is_writable(text: str) -> bool:
    """Whether a text has no control characters or surrogates; ids in a database always satisfy this."""
    return _UNWRITABLE.search(text) is None


def has_dot_segments(text: str) -> bool:
    """Whether a path segment is `.` or `..` (RFC 3986), plain or percent-encoded any number of times."""
    while (decoded := unquote(text)) != text:
        text = decoded
    return any(part.strip() in {".", ".."} for part in _ENDS.split(text))
