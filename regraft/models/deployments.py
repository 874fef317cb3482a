"""Deployments: how a version becomes current, and how it ends."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from regraft.models.base import ApiModel


class DeploymentAnswer(ApiModel):
    """What one answer says of a gallery's deployments.

    `etag` comes in the header, not in the body: a change that repeats it as `if_match` is refused (412) when somebody
    was faster.
    """

    etag: Annotated[str | None, SkipJsonSchema()] = Field(None, exclude=True)


class DeploymentInfo(DeploymentAnswer):
    """A deployment: `previous` was current before it, `activated` items moved at once. A dry run has no `id`.

    `notes`, in the answer to a change, say what to know of it: items that only an older version's encoder reaches, and
    that no gate has compared the versions, or that one warned or refused.
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
    """What a gallery went back to; `out_of_reach` counts by version the items its queries do not reach any more."""

    out_of_reach: dict[str, int]


class DeploymentList(ApiModel):
    """Every deployment of a gallery, oldest first."""

    deployments: list[DeploymentInfo]


class TransitionInfo(ApiModel):
    """One step of a deployment: who took it when, why, and what it rests on. `before` is null at its beginning."""

    before: str | None
    after: str
    who: str
    why: str
    evidence: dict[str, Any]
    at: float


class DeploymentDetail(DeploymentInfo):
    """A deployment with its record; `since` is when it became current. `trial` is what shadow or canary counted."""

    since: float | None
    undoes: int | None
    settings: dict[str, Any] | None
    transitions: list[TransitionInfo]
    trial: dict[str, dict[str, Any]]


class RetireResult(DeploymentAnswer):
    """What retiring a version freed: embeddings, and about how many bytes."""

    version: str
    deployments: list[int]
    embeddings: int
    bytes: int
