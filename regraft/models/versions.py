"""Versions and the edges between them."""

from __future__ import annotations

from typing import Any

from regraft.models.base import ApiModel, ScoreInterval


class EdgeSummary(ApiModel):
    """A declared way to compare a version with an older one."""

    old: str
    kind: str
    scores: dict[str, ScoreInterval]


class VersionInfo(ApiModel):
    """A registered version and the edges that lead from it now.

    `loaded` names the encoders this process holds in memory: `images`, `texts`. `problem`: why it is quarantined.
    `created` is null in a dry run.
    """

    name: str
    dim: int
    space: dict[str, Any]
    method: str
    metrics: dict[str, Any]
    side_dim: int
    encoder: bool
    text: bool
    loaded: list[str]
    edges: list[EdgeSummary]
    created: float | None
    problem: str | None


class VersionList(ApiModel):
    """Every registered version, in order of registration."""

    versions: list[VersionInfo]


class DomainCheck(ApiModel):
    """How far queries are from the pairs that an edge was fitted on.

    `share` of `queries` are out of its domain, with a 95 % interval; of the pairs that were held out `expected` are.
    `nearest` is the median likeness of a query to the nearest pair; below `least` it is out. `advice` says it in words.
    """

    queries: int
    share: float
    low: float
    high: float
    expected: float
    nearest: float
    least: float
    advice: str


class EdgeInfo(ApiModel):
    """An edge and its evidence.

    `origin` says how it came to be known: `registered` with its version, `added`, `fitted` on stored items or `claimed`
    and verified; `made` on what. `support` is the number of pairs it was fitted on. `problem`: why it is not used.
    `created` is null in a dry run.
    """

    new: str
    old: str
    kind: str
    direction: str
    origin: str
    scores: dict[str, ScoreInterval]
    support: int
    calibration: dict[str, Any] | None
    old_encoder: str
    made: dict[str, Any]
    files: dict[str, str]
    created: float | None
    warning: str | None
    problem: str | None


class EdgeList(ApiModel):
    """Declared edges, in the order in which they were."""

    edges: list[EdgeInfo]


class ReroutedItems(ApiModel):
    """Items of a version that are reached along the edge, and how without it; `after` null: not at all."""

    version: str
    items: int
    before: list[str]
    after: list[str] | None


class DependentGallery(ApiModel):
    """What a removal does to a gallery: `moved` items go to another embedding they hold, `lost` cannot be reached.

    By queries of `version`: the current one, or one that is tried out there.
    """

    gallery: str
    version: str
    routes: list[ReroutedItems]
    moved: int
    lost: int


class EdgeRemoval(ApiModel):
    """A removed edge, or with `dry_run` what removing it would do; `blocked_by` are backfills that apply it."""

    edge: EdgeInfo
    removed: bool
    dependents: list[DependentGallery]
    blocked_by: list[int]
