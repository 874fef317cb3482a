"""Evaluation sets and gate reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from regraft.models.base import ApiModel, ScoreInterval


class EvaluationInfo(ApiModel):
    """An evaluation set: `kind` is `images`, `texts` or `embeddings`.

    `labelled` of its `size` entries have a label; `relevant` entries name their relevant items of the gallery.
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
    """The evaluation sets of a gallery, oldest first."""

    evaluations: list[EvaluationInfo]


class SliceScores(ApiModel):
    """The result for the queries that share a value of the metadata field `slice`.

    The intervals of `difference`, by Student's t, hold for all slices together at 95 %.
    """

    value: str
    queries: int
    old_old: float
    new_old: float
    difference: ScoreInterval


class FlipEnd(ApiModel):
    """An item's id, or an entry's number in the evaluation set; and its label as JSON, truncated to 200 characters."""

    id: str
    label: str | None


class FlipInfo(ApiModel):
    """A query whose first match is relevant under old/old; `wrong` is its first match under new/old.

    `rank` is the rank of its first relevant item under new/old; it was 1 under old/old.
    """

    query: FlipEnd
    wrong: FlipEnd
    rank: int


class EncodeLatency(ApiModel):
    """Milliseconds to encode one image."""

    p50: float
    p99: float


class MergeReport(ApiModel):
    """The best merge mode in a simulated backfill; `gains`: other mode -> the area of the best mode minus its area."""

    mode: str
    metric: str
    areas: dict[str, float]
    gains: dict[str, ScoreInterval]
    queries: int


class GateReport(ApiModel):
    """A gate report: M(old/old), M(new/old) by `route`, and M(new/new), of `current` (old) and `version` (new).

    The number of `queries` with a relevant item that were compared over `items`. `whole`: these are all comparable
    items; `exhaustive`: also, all possible queries were used. M(new/new) is over `new_new_items`; if these are fewer,
    `gap_closed` is unknown. `unreadable`: images that could not be decoded and were not used as queries.
    `relevant_missing`: items that the evaluation set names as relevant but do not exist (null: it names none).
    `unlabelled`: entries left out because labels decide. `flips`: up to 12 of the `negative_flips`, largest `rank`
    first. `slices`: worst first, each `value` is JSON. `calibrations`: number of fitted score maps, which a deployment
    with this gate uses, as it does the merge mode of `merge`. A dry run has no `id`.
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
    """The gate reports of a gallery, oldest first."""

    gates: list[GateReport]
