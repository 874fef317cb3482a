"""What a remote worker gets, and what became of what it returned."""

from __future__ import annotations

from regraft.models.base import ApiModel


class WorkEdge(ApiModel):
    """An item edge that the chunk may need: `id` fetches it, `sha256` is over everything it consists of.

    `old_card_sha256` is of the version that the edge starts from.
    """

    id: int
    sha256: str
    old: str
    old_card_sha256: str


class WorkClaim(ApiModel):
    """A chunk that is the worker's as long as it sends heartbeats: `lease` is what proves it.

    `edges` are, for a `transform`, the edges it has to apply, these and no others.
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
    """An item to be moved, as it is at `seq`.

    `image` or `text`, as `is_text` says: its bytes in base64; null: it is missing, or was not asked for. `problem`: why
    what is there cannot be read now.
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
    """A page of a chunk's items that still wait; `next` is the cursor of the page behind it, null at the end."""

    items: list[WorkItem]
    next: str | None = None


class WorkCounts(ApiModel):
    """How many items were moved, given up, put off, or skipped because they changed meanwhile."""

    done: int
    failed: int
    retried: int
    skipped: int
