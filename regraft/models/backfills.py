"""Backfills: progress, estimate, failures and curve."""

from __future__ import annotations

from typing import Any

from regraft.models.base import ApiModel, ScoreInterval


class CurvePoint(ScoreInterval):
    """The metric, with its 95 % bootstrap interval over `queries`, after a `share` of the backfill was settled.

    `moved`: items moved before the measurement; `meanwhile`: items moved during it. The share is that at its middle.
    `seq`: number of the gallery's change feed that the measured state had.
    """

    share: float
    moved: int
    meanwhile: int
    queries: int
    seq: int
    at: float


class CurveInfo(ApiModel):
    """A metric over the share of items moved: `points` by ascending share, and the `area` below once it is `complete`.

    `stopped`: the backfill was cancelled, or measuring was given up because of `error`. While `measuring`, `error` is
    the reason why the last attempt failed.
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
    """A backfill. Of `total` items planned so far, `done` were moved, `skipped` had changed or needed no move.

    `failed` items were given up; `retrying` of the `remaining` ones failed and will be retried. `planning`: items are
    still being planned, and none is moved until this is done.
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
    """An item that could not be moved; it stays reachable in `version`. `next_try`: when it will be retried.

    `code`: `image_missing`, `image_invalid`, `image_unreadable`, the same for `text`, `refused` (by the encoder or the
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
    """A page of a backfill's failures, including those to be retried; `failed` items were given up.

    `next` is the cursor of the next page, null at the end.
    """

    failures: list[ItemFailure]
    failed: int
    next: str | None


class ItemMacs(ApiModel):
    """Multiply-accumulates per item; null if this kind of move is impossible or a model's shapes are unknown."""

    reencode: int | None
    transform: float | None


class BackfillEstimate(ApiModel):
    """The estimate of a backfill. `seconds`: with one worker on this machine, or as the rate allows.

    Bytes are those of the gallery's vectors and side-information: now, after the backfill, and after retiring all
    versions but the target (null if some items would still depend on another version). With a `share` or `limit` they
    are upper bounds: items that have an embedding of the target take no more. `tokens` and their `price`, in the
    currency of the card, are for a target whose texts a provider embeds, extrapolated from the sample.
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
