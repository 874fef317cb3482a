"""The media types of bodies, and the refusal of those that a route does not read, or that are compressed."""

from __future__ import annotations

from functools import lru_cache

from fastapi import Request

from index.errors import RegraftError

JSON = "application/json"
FORM = "multipart/form-data"


class UnsupportedMediaType(RegraftError):
    """This route reads application/json or multipart/form-data."""

    status = 415
    code = "unsupported_media_type"


def media_type(request: Request, *legal: str) -> str:
    """The body's media type, one of `legal`. Raises UnsupportedMediaType, also if it is compressed."""
    check_encoding(request.headers.get("content-encoding", ""))
    found = type_of(request.headers.get("content-type", ""))
    if found not in legal:
        raise UnsupportedMediaType(f"the content type must be {' or '.join(legal)}, not {found or 'missing'}")
    return found


def check_encoding(header: str) -> None:
    """Raise UnsupportedMediaType if a body is compressed, which no part of it would say plainly."""
    if (found := header.strip().lower()) not in {"", "identity"}:
        raise UnsupportedMediaType(f"the body must not be compressed; its Content-Encoding is {found[:50]!r}")


@lru_cache(maxsize=64)
def type_of(header: str) -> str:
    """The media type in a header, without its parameters."""
    return header.partition(";")[0].strip().lower()
