"""What the service refuses and why: an error for each kind, with its status and its code. `http.problems` says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from index.errors import RegraftError


class UnknownGallery(RegraftError):
    """There is no gallery of this name."""

    status = 404
    code = "unknown_gallery"


class UnknownVersion(RegraftError):
    """No version of this name is registered."""

    status = 404
    code = "unknown_version"


class DeletedMeanwhile(RegraftError):
    """What this needs was deleted at this very moment. Nothing was changed; asked again, it says what is gone."""

    status = 409
    code = "deleted_meanwhile"


class UnknownItem(RegraftError):
    """The gallery holds no item of this id."""

    status = 404
    code = "unknown_item"


class NoImage(RegraftError):
    """The item was stored as an embedding, without an image."""

    status = 404
    code = "no_image"


class GalleryExists(RegraftError):
    """A gallery of this name exists already."""

    status = 409
    code = "gallery_exists"


class VersionExists(RegraftError):
    """A version of this name but other content is registered already."""

    status = 409
    code = "version_exists"


class NoCurrentVersion(RegraftError):
    """The gallery has no current version: deploy one first."""

    status = 409
    code = "no_current_version"


class VersionBroken(RegraftError):
    """The version's folder is not what was registered: it is quarantined."""

    status = 503
    code = "version_broken"


class EdgeBroken(RegraftError):
    """The edge's files are not what was accepted: it is not used."""

    status = 503
    code = "edge_broken"


class DuplicateId(RegraftError):
    """An earlier item of this batch has the same id."""

    status = 422
    code = "duplicate_id"


class ItemExists(RegraftError):
    """An item of this id is there, and it was asked not to replace any."""

    status = 409
    code = "item_exists"


class InvalidItem(RegraftError):
    """The item is not what it should be."""

    status = 422
    code = "invalid_item"


class InvalidBody(RegraftError):
    """The body is not what this route reads."""

    status = 422
    code = "invalid_body"


class UnknownParameter(RegraftError):
    """The route has no such query parameter, or takes it once."""

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
    """The key does not open this: its scope (query, ingest or admin, each of which opens more), or its galleries."""

    status = 403
    code = "forbidden"


class KeyExists(RegraftError):
    """There is a key of this name."""

    status = 409
    code = "key_exists"


class UnknownKey(RegraftError):
    """There is no key of this name."""

    status = 404
    code = "unknown_key"


class NobodyAsked(RegraftError):
    """Without REGRAFT_API_KEY no request needs a key: start the service with one, then make others."""

    status = 409
    code = "no_api_key"


class ForeignOrigin(RegraftError):
    """A service without an API key answers this machine's own programs only: no web pages, no proxies."""

    status = 403
    code = "foreign_origin"


class OutOfMemory(RegraftError):
    """The service has too little memory for this request now; nothing was changed."""

    status = 503
    code = "out_of_memory"


class OutOfMemoryCommitted(RegraftError):
    """The change was committed; then the service had too little memory for the rest, or to say so."""

    status = 503
    code = "out_of_memory_committed"


class OutOfMemoryUnknown(RegraftError):
    """The service had too little memory while it committed; whether the change was made is unknown."""

    status = 503
    code = "out_of_memory_unknown"


class DatabaseUnavailable(RegraftError):
    """The database does not answer now; whether a change that was asked for was made is unknown."""

    status = 503
    code = "database_unavailable"


class DatabaseDamaged(RegraftError):
    """The database is damaged: stop the service, and restore it from a backup."""

    status = 503
    code = "database_damaged"


class StorageFull(RegraftError):
    """There is no space left to store this."""

    status = 503
    code = "storage_full"


class StorageReadOnly(RegraftError):
    """The service may not write where it has to: a folder or file belongs to somebody else, or is mounted read-only."""

    status = 503
    code = "storage_read_only"


class ItemsRefused(RegraftError):
    """No item of the batch was stored."""

    status = 422
    code = "items_refused"

    def __init__(self, message: str, errors: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(message, pointer="/items")
        self.errors = errors
