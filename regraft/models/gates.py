"""Evaluation sets and gate reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from regraft.models.base import ApiModel, ScoreInterval


class EvaluationInfo(ApiModel):
    """An evaluation set: `kind` is `images`, `texts` or `embeddings`.

    `labelled` of its `size` entries have a label, `relevant` name the items of the gallery that are right for them.
    """

    id: int | None
    name: str
    kind: str
    size: int
    labelled: int
    relevant: int = 0
    versions: list[str]
    created: float


class EvaluationList(ApiModel):
    """Every evaluation set of a gallery, oldest first."""

    evaluations: list[EvaluationInfo]


class SliceScores(ApiModel):
    """The queries that share a value of the metadata field `slice`.

    `difference`: by Student's t, so wide that the intervals of all slices hold together at 95 %.
    """

    value: str
    queries: int
    old_old: float
    new_old: float
    difference: ScoreInterval


class FlipEnd(ApiModel):
    """An item's id, or an entry's number in the evaluation set; its label as JSON, cut at 200 characters."""

    id: str
    label: str | None


class FlipInfo(ApiModel):
    """A query whose first match was right under old/old and is `wrong` under new/old.

    `rank` is the place of its first relevant item under new/old, which was 1 under old/old.
    """

    query: FlipEnd
    wrong: FlipEnd
    rank: int


class EncodeLatency(ApiModel):
    """Milliseconds to encode one image."""

    p50: float
    p99: float


class MergeReport(ApiModel):
    """The merge mode that served a simulated backfill best; `gains` are its area minus that of each other mode."""

    mode: str
    metric: str
    areas: dict[str, float]
    gains: dict[str, ScoreInterval]
    queries: int


class GateReport(ApiModel):
    """A gate report: M(old/old), M(new/old) by `route`, and M(new/new), of `current` (old) and `version` (new).

    `queries` that had an item of their label to find were compared over `items` on the gallery side: `whole` says
    whether that is every item that can be compared, `exhaustive` that moreover every one that can ask did. M(new/new)
    is over `new_new_items`; where these are fewer, `gap_closed` is unknown. `unreadable` images could not be decoded
    and did not ask; `relevant_missing` of the items that an evaluation set names as relevant are not there (null: it
    names none); `unlabelled` entries are left out where labels decide. `flips` are up to 12 of the
    `negative_flips`, the deepest fall (largest `rank`) first. `slices` are worst first, each `value` is JSON.
    `calibrations` maps were fitted, which a deployment by this gate brings into force, as it does the default
    merge mode of `merge`. A dry run has no `id`.
    """

    id: int | None
    version: str
    current: str
    verdict: Literal["pass", "warn", "refuse"]
    metric: str
    old_old: ScoreInterval
    new_old: ScoreInterval
    new_new: ScoreInterval | None
    difference: ScoreInterval
    negative_flips: int
    flips: list[FlipInfo] = Field([])
    gap_closed: float | None
    queries: int
    items: int
    new_new_items: int | None = None
    whole: bool = False
    exhaustive: bool = False
    unreadable: int
    unlabelled: int = 0
    route: list[str]
    label: str | None
    evaluation: int | None = None
    labelled: bool = True
    relevant_missing: int | None = None
    slice: str | None = None
    slices: list[SliceScores] = Field([])
    latency_ms: dict[str, EncodeLatency] = Field({})
    calibrations: int = 0
    merge: MergeReport | None = None
    who: str = "local"
    sample: int
    seed: int
    created: float


class GateList(ApiModel):
    """Every gate report of a gallery, oldest first."""

    gates: list[GateReport]
