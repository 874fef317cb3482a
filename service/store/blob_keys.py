"""What the key of a stored content says of it: nothing more is needed to tell a text from an image."""

from __future__ import annotations

TEXT = ".txt"
"""What the keys of texts end in."""


def is_text(key: str) -> bool:
    """Whether it is the key of a text, else of an image."""
    return key.endswith(TEXT)
