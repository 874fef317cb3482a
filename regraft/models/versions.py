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
    """A registered version and the edges from it.

    `loaded`: the encoders in this process's memory: `images`, `texts`. `problem`: why the version is not used.
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
    """All registered versions, in order of registration."""

    versions: list[VersionInfo]


class DomainCheck(ApiModel):
    """Whether queries are in the domain of a fitted edge: similar to the pairs that it was fitted on.

    `share` of `queries` are out of the domain, with a 95 % interval; of held-out pairs the share `expected` is.
    `nearest` is the median similarity of a query to the nearest pair; below `least` it is out of the domain. `advice`
    is the result in words.
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

    `origin`: `registered` with its version, `added`, `fitted` on stored items, or `claimed` and verified; `made` has
    the details. `support` is the number of pairs that it was fitted on. `problem`: why it is not used.
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
    """Edges, in the order of their declaration."""

    edges: list[EdgeInfo]


class ReroutedItems(ApiModel):
    """Items of a version that are reached along the edge, and their route without it; `after` null: none."""

    version: str
    items: int
    before: list[str]
    after: list[str] | None


class DependentGallery(ApiModel):
    """The effect of a removal on a gallery: `moved` items are served by another embedding, `lost` are unreachable.

    For queries of `version`: the current one, or one in shadow or canary.
    """

    gallery: str
    version: str
    routes: list[ReroutedItems]
    moved: int
    lost: int


class EdgeRemoval(ApiModel):
    """The effect of removing an edge, also in a dry run; `blocked_by`: backfills that apply it."""

    edge: EdgeInfo
    removed: bool
    dependents: list[DependentGallery]
    blocked_by: list[int]
