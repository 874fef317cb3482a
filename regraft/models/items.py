"""Items: what is stored, and what became of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regraft.models.base import ApiModel


class ItemError(ApiModel):
    """Why one item of a batch was not stored."""

    index: int
    id: str | None
    code: str
    detail: str
    pointer: str


class ImageWarning(ApiModel):
    """So many images are much larger than what a version reads; `pointer` is where the first stands in the request.

    `code` is `image_mostly_unseen` or `image_much_reduced`.
    """

    code: str
    version: str
    count: int
    pointer: str
    detail: str


class IngestResult(ApiModel):
    """What became of a batch; `seq` is the number of its last write in the gallery's feed.

    Of the items `stored`, `new` were not there, `updated` got an embedding beside those they held, and of those
    `replaced` nothing stayed but, where none were named, the metadata.
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
    """A stored item; `active` is the version whose embedding of it is served, None: it holds none.

    `image`: whether it is an image. `text`: what it is, where that was asked for; null: none, or it cannot be read now.
    """

    id: str
    metadata: dict[str, Any]
    active: str | None
    image: bool
    text: str | None = None
    seq: int
    created: float


class EmbeddingInfo(ApiModel):
    """An embedding an item holds."""

    version: str
    origin: str


class ItemDetail(ItemInfo):
    """A stored item and the embeddings it holds."""

    embeddings: list[EmbeddingInfo]


class ItemPage(ApiModel):
    """A page of items; `next` is the cursor of the page behind it, null at the end."""

    items: list[ItemInfo]
    next: str | None


class StoredEmbedding(EmbeddingInfo):
    """An embedding an item holds, with its numbers."""

    embedding: list[float]


class EmbeddedItem(ItemInfo):
    """A stored item and the embeddings it holds, with their numbers."""

    embeddings: list[StoredEmbedding]


class DamagedEmbedding(ApiModel):
    """An embedding that an item holds and that cannot be read: `regraft doctor` says more."""

    id: str
    version: str


class EmbeddingPage(ApiModel):
    """A page of items with their embeddings; `next` is the cursor of the page behind it, null at the end.

    `damaged`: embeddings that these items hold and that are left out.
    """

    items: list[EmbeddedItem]
    next: str | None
    damaged: Sequence[DamagedEmbedding] = ()


class MissingPage(ApiModel):
    """Ids of items that hold no embedding which `version` itself made; `next` as in `ItemPage`."""

    version: str
    ids: list[str]
    next: str | None


class MetadataResult(ApiModel):
    """Of how many items the metadata were changed, and why those of others were not: `errors` names up to 100.

    Where a filter chose the items, the `index` of each is 0.
    """

    updated: int
    failed: int
    errors: list[ItemError]


class DeleteResult(ApiModel):
    """How many items were deleted, and which ids were not there."""

    deleted: int
    missing: list[str]
