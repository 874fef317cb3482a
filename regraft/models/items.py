"""Items, their embeddings, and results of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regraft.models.base import ApiModel


class ItemError(ApiModel):
    """The error of one item of a batch."""

    index: int
    id: str | None
    code: str
    detail: str
    pointer: str


class ImageWarning(ApiModel):
    """`count` images lose much in the preprocessing of a version; `pointer`: the first of them in the request.

    `code` is `image_mostly_unseen` or `image_much_reduced`.
    """

    code: str
    version: str
    count: int
    pointer: str
    detail: str


class IngestResult(ApiModel):
    """The result of an ingest; `seq` is the number of its last write in the gallery's change feed.

    Of the items `stored`, `new` did not exist, `updated` got another embedding in addition to theirs, and `replaced`
    lost their earlier content, except for their metadata if none were given.
    """

    stored: int
    new: int
    updated: int
    replaced: int
    failed: int
    seq: int
    errors: list[ItemError]
    warnings: list[ImageWarning]


class ItemInfo(ApiModel):
    """A stored item; `active` is the version whose embedding serves it, null: it has no embedding.

    `image`: whether it has an image. `text`: its text, if requested; null: it has none, or it cannot be read.
    """

    id: str
    metadata: dict[str, Any]
    active: str | None
    image: bool
    text: str | None = None
    seq: int
    created: float


class EmbeddingInfo(ApiModel):
    """An embedding of an item."""

    version: str
    origin: str


class ItemDetail(ItemInfo):
    """A stored item and its embeddings, without vectors."""

    embeddings: list[EmbeddingInfo]


class ItemPage(ApiModel):
    """A page of items; `next` is the cursor of the next page, null at the end."""

    items: list[ItemInfo]
    next: str | None


class StoredEmbedding(EmbeddingInfo):
    """An embedding of an item with its vector."""

    embedding: list[float]


class EmbeddedItem(ItemInfo):
    """A stored item and its embeddings with their vectors."""

    embeddings: list[StoredEmbedding]


class DamagedEmbedding(ApiModel):
    """An embedding of an item that cannot be read, see `regraft doctor`."""

    id: str
    version: str


class EmbeddingPage(ApiModel):
    """A page of items with their embeddings; `next` is the cursor of the next page, null at the end.

    `damaged`: embeddings of these items that are left out.
    """

    items: list[EmbeddedItem]
    next: str | None
    damaged: Sequence[DamagedEmbedding] = ()


class MissingPage(ApiModel):
    """Ids of items without an embedding made by `version` itself; `next` as in `ItemPage`."""

    version: str
    ids: list[str]
    next: str | None


class MetadataResult(ApiModel):
    """The number of items whose metadata were changed, and those that failed: `errors` has up to 100 of them.

    If a filter selected the items, each `index` is 0.
    """

    updated: int
    failed: int
    errors: list[ItemError]


class DeleteResult(ApiModel):
    """The number of items deleted, and the ids that did not exist."""

    deleted: int
    missing: list[str]
