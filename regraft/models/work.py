"""Work for remote workers, and the counts of their results."""

from __future__ import annotations

from regraft.models.base import ApiModel


class WorkEdge(ApiModel):
    """An item edge that the chunk may need: fetched by `id`; `sha256` covers its complete content.

    `old_card_sha256`: of the version that the edge starts from.
    """

    id: int
    sha256: str
    old: str
    old_card_sha256: str


class WorkClaim(ApiModel):
    """A chunk that is claimed by the worker as long as it sends heartbeats with `lease`.

    `edges`: for a `transform`, exactly the edges to apply.
    """

    chunk: int
    lease: str
    lease_seconds: float
    backfill: int
    kind: str
    version: str
    card_sha256: str
    items: int
    edges: tuple[WorkEdge, ...]


class WorkItem(ApiModel):
    """An item to be moved, as of `seq`.

    `image` or `text` (if `is_text`): its content in base64; null: it is missing, or was not requested. `problem`: why
    it cannot be read.
    """

    item: int
    seq: int
    id: str
    is_text: bool = False
    image: str | None = None
    text: str | None = None
    problem: str | None = None
    from_version: str | None = None
    embedding: str | None = None
    side: str | None = None


class WorkInputs(ApiModel):
    """A page of a chunk's pending items; `next` is the cursor of the next page, null at the end."""

    items: list[WorkItem]
    next: str | None = None


class WorkCounts(ApiModel):
    """Numbers of items that were moved, given up, postponed for a retry, or skipped because they had changed."""

    done: int
    failed: int
    retried: int
    skipped: int
