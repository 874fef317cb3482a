"""The errors of the service, each with its HTTP status and code; `http.problems` turns them into responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from index.errors import RegraftError


def message_of(fault: Mapping[str, Any]) -> str:
    """The message of one of pydantic's errors, without what pydantic puts before those of our own validators."""
    return str(fault["msg"]).removeprefix("Value error, ")


class UnknownGallery(RegraftError):
    """No gallery has this name."""

    status = 404
    code = "unknown_gallery"


class UnknownVersion(RegraftError):
    """No version of this name is registered."""

    status = 404
    code = "unknown_version"


class DeletedMeanwhile(RegraftError):
    """Something that this request uses was deleted meanwhile. Nothing was changed; a retry says what is missing."""

    status = 409
    code = "deleted_meanwhile"


class UnknownItem(RegraftError):
    """The gallery has no item of this id."""

    status = 404
    code = "unknown_item"


class NoImage(RegraftError):
    """The item was stored as an embedding, without an image."""

    status = 404
    code = "no_image"


class GalleryExists(RegraftError):
    """A gallery of this name already exists."""

    status = 409
    code = "gallery_exists"


class VersionExists(RegraftError):
    """A version of this name with other content is already registered."""

    status = 409
    code = "version_exists"


class NoCurrentVersion(RegraftError):
    """The gallery has no current version: deploy one first."""

    status = 409
    code = "no_current_version"

    @classmethod
    def of(cls, gallery: str) -> NoCurrentVersion:
        """The error of a gallery, by its name."""
        return cls(f"gallery {gallery!r} has no current version: deploy one first")


class VersionBroken(RegraftError):
    """The version's folder differs from what was registered: it is quarantined."""

    status = 503
    code = "version_broken"


class EdgeBroken(RegraftError):
    """The edge's files differ from what was accepted: it is not used."""

    status = 503
    code = "edge_broken"


class DuplicateId(RegraftError):
    """An earlier item of this batch has the same id."""

    status = 422
    code = "duplicate_id"


class ItemExists(RegraftError):
    """An item of this id exists, and the request does not replace items."""

    status = 409
    code = "item_exists"


class InvalidItem(RegraftError):
    """The item is invalid."""

    status = 422
    code = "invalid_item"


class InvalidBody(RegraftError):
    """The body is invalid for this route."""

    status = 422
    code = "invalid_body"


class UnknownParameter(RegraftError):
    """The query parameter is unknown to this route or repeated."""

    status = 422
    code = "unknown_parameter"


class BodyTooLarge(RegraftError):
    """The body is larger than this service accepts."""

    status = 413
    code = "body_too_large"


class Unauthorized(RegraftError):
    """The header `Authorization: Bearer <key>` is missing or wrong."""

    status = 401
    code = "unauthorized"


class Forbidden(RegraftError):
    """The key does not permit this: its scope (query < ingest < admin) or its galleries are too narrow."""

    status = 403
    code = "forbidden"


class KeyExists(RegraftError):
    """A key of this name already exists."""

    status = 409
    code = "key_exists"


class UnknownKey(RegraftError):
    """No key has this name."""

    status = 404
    code = "unknown_key"


class NobodyAsked(RegraftError):
    """Keys require REGRAFT_API_KEY: start the service with one, then create others."""

    status = 409
    code = "no_api_key"


class ForeignOrigin(RegraftError):
    """A service without an API key only answers programs on this machine: no web pages, no proxies."""

    status = 403
    code = "foreign_origin"


class OutOfMemory(RegraftError):
    """The service has not enough memory for this request; nothing was changed."""

    status = 503
    code = "out_of_memory"


class OutOfMemoryCommitted(RegraftError):
    """The change was committed, then the service ran out of memory."""

    status = 503
    code = "out_of_memory_committed"


class OutOfMemoryUnknown(RegraftError):
    """The service ran out of memory during the commit; it is unknown whether the change was made."""

    status = 503
    code = "out_of_memory_unknown"


class ShuttingDown(RegraftError):
    """The service stopped before it could answer; it is unknown whether the request was carried out."""

    status = 503
    code = "shutting_down"


class DatabaseUnavailable(RegraftError):
    """The database does not answer; it is unknown whether a requested change was made."""

    status = 503
    code = "database_unavailable"


class DatabaseDamaged(RegraftError):
    """The database is damaged: stop the service and restore it from a backup."""

    status = 503
    code = "database_damaged"


class StorageFull(RegraftError):
    """No disk space left to store this."""

    status = 503
    code = "storage_full"


class StorageReadOnly(RegraftError):
    """The service cannot write: a folder or file belongs to another user or is mounted read-only."""

    status = 503
    code = "storage_read_only"


class ItemsRefused(RegraftError):
    """No item of the batch was stored."""

    status = 422
    code = "items_refused"

    def __init__(self, message: str, errors: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(message, pointer="/items")
        self.errors = errors
