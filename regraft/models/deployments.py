"""Deployments: versions that become current, rollbacks and retirement."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from regraft.models.base import ApiModel


class DeploymentAnswer(ApiModel):
    """Base of answers about a gallery's deployments.

    `etag` is a header, not in the body: a change with it as `if_match` is refused (412) if there was another change
    since.
    """

    etag: Annotated[str | None, SkipJsonSchema()] = Field(None, exclude=True)


class DeploymentInfo(DeploymentAnswer):
    """A deployment: `previous` was current before, `activated` items were served by it at once. A dry run has no `id`.

    `notes`, in the answer to a change, are its risks: items that only an older version's encoder reaches, or that no
    gate has compared the versions, or that one warned or refused.
    """

    id: int | None
    version: str
    previous: str | None
    state: str
    gate: int | None
    reason: str
    created: float
    activated: int
    notes: list[str] = Field([])


class RollbackResult(DeploymentInfo):
    """The result of a rollback; `out_of_reach`: version -> number of items that queries no longer reach."""

    out_of_reach: dict[str, int]


class DeploymentList(ApiModel):
    """The deployments of a gallery, oldest first."""

    deployments: list[DeploymentInfo]


class TransitionInfo(ApiModel):
    """One step of a deployment: its time, author, reason and evidence. `before` is null in the first step."""

    before: str | None
    after: str
    who: str
    why: str
    evidence: dict[str, Any]
    at: float


class DeploymentDetail(DeploymentInfo):
    """A deployment with its steps; `since`: when it became current; `trial`: the counts of shadow or canary."""

    since: float | None
    undoes: int | None
    settings: dict[str, Any] | None
    transitions: list[TransitionInfo]
    trial: dict[str, dict[str, Any]]


class RetireResult(DeploymentAnswer):
    """The result of retiring a version: the number of embeddings deleted, and approximately their bytes."""

    version: str
    deployments: list[int]
    embeddings: int
    bytes: int
