"""Backfills: how far one is, what it costs, what it could not move, and its curve."""

from __future__ import annotations

from typing import Any

from regraft.models.base import ApiModel, ScoreInterval


class CurvePoint(ScoreInterval):
    """The metric, with its 95 % bootstrap interval over `queries`, when a `share` of the backfill was settled.

    `moved` items had been moved when measuring began and `meanwhile` more when it ended; the share is of the middle.
    `seq`: how far the gallery's feed had been followed.
    """

    share: float
    moved: int
    meanwhile: int
    queries: int
    seq: int
    at: float


class CurveInfo(ApiModel):
    """A metric over the share of items moved: `points` by rising share. `area` under it: once it is `complete`.

    `stopped`: the backfill was cancelled, or `error` says why measuring was given up. While `measuring`, `error` says
    why the last attempt failed.
    """

    state: str
    error: str | None
    metric: str
    label: str | None
    evaluation: int | None
    sample: int
    seed: int
    marks: int
    points: list[CurvePoint]
    area: float | None
    largest_dip: float


class BackfillInfo(ApiModel):
    """A backfill: of `total` items so far, `done` moved, `skipped` changed meanwhile or needed no move, `failed`.

    `retrying` of the `remaining` failed and will be tried again. `planning`: items are still being counted, and none
    is moved until all are.
    """

    id: int
    gallery: str
    version: str
    kind: str
    order: str
    state: str
    planning: bool
    total: int
    done: int
    skipped: int
    failed: int
    retrying: int
    remaining: int
    rate: float | None
    share: float | None
    limit: int | None
    origin: str | None
    filter: dict[str, Any] | None
    attempts: int
    created: float
    finished: float | None
    active_seconds: float
    items_per_second: float | None
    eta_seconds: float | None
    curve: CurveInfo | None


class BackfillList(ApiModel):
    """Every backfill of a gallery, oldest first."""

    backfills: list[BackfillInfo]


class ItemFailure(ApiModel):
    """An item that could not be moved, and why; it stays reachable in `version`. `next_try`: it will be tried again.

    `code`: `image_missing`, `image_invalid`, `image_unreadable`, the same of a `text`, `refused` (by the encoder or the
    edge), or `worker_died`.
    """

    item: str
    code: str
    reason: str
    attempts: int
    next_try: float | None
    version: str | None
    at: float


class FailurePage(ApiModel):
    """A page of a backfill's failures, those that wait to be tried again too, and how many items were given up.

    `next` is the cursor of the page behind it, null at the end.
    """

    failures: list[ItemFailure]
    failed: int
    next: str | None


class ItemMacs(ApiModel):
    """Multiply-accumulates for one item; null where a way is not open, or a model's shapes are not known."""

    reencode: int | None
    transform: float | None


class BackfillEstimate(ApiModel):
    """A backfill on paper. `seconds`: one worker on this machine, one step after the other, or what the rate allows.

    Storage is that of the gallery's vectors and side-information: now, after the backfill, and once every version but
    the target is retired; null where some items would still depend on another. With a `share` or `limit` it is the
    most: an item that has an embedding by the target takes no more. `tokens` and their `price`, in the currency of the
    card, are of a target whose texts a provider embeds, by what it counted of the sample.
    """

    kind: str
    version: str
    items: int
    without_image: int
    sampled: int
    seconds_per_item: float | None
    seconds: float | None
    bytes_now: int
    bytes_after: int
    bytes_after_retiring: int | None
    macs_per_item: ItemMacs
    macs: float | None
    tokens: float | None = None
    price: float | None = None
