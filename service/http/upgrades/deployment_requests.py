"""Request bodies of deployments: which steps they ask for, and which options each step takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from index.errors import InvalidArgument
from service.registry.placement import ItemCounts
from service.registry.trial_records import CanaryIn, ShadowIn
from service.schemas import Body, Name, Number, Reason
from service.upgrades.deployments.history import DeploymentState
from service.upgrades.deployments.transition import TransitionRequest

OPTIONS: dict[str, set[DeploymentState]] = {
    "gate": {DeploymentState.GATED},
    "override": {DeploymentState.GATED, DeploymentState.CANARY, DeploymentState.CURRENT},
    "shadow": {DeploymentState.SHADOW},
    "canary": {DeploymentState.CANARY},
}
"""The steps that take each option."""


class StepIn(Body):
    """The options of a step: `gate` is the report it rests on, `override` the reason for overriding a refusal."""

    gate: Number | None = None
    override: Reason | None = None
    reason: Reason = ""
    shadow: ShadowIn | None = None
    canary: CanaryIn | None = None


class DeploymentIn(StepIn):
    """A version to deploy, step by step up to `until`; an option that none of these steps takes is refused."""

    version: Name
    until: Literal["registered", "verified", "gated", "shadow", "canary", "current"] = "current"


class AdvanceIn(StepIn):
    """The next step of a deployment; an option that belongs to another step is refused."""

    to: Literal["verified", "gated", "shadow", "canary", "current"]


def steps_to(until: DeploymentState, gate: int | None) -> list[DeploymentState]:
    """The steps that lead to `until`: a gate where its report is named, a trial only as the last step."""
    if until in (DeploymentState.REGISTERED, DeploymentState.VERIFIED):
        return [DeploymentState.VERIFIED] if until is DeploymentState.VERIFIED else []
    gated = [DeploymentState.GATED] if gate is not None or until is DeploymentState.GATED else []
    return [DeploymentState.VERIFIED, *gated, *([until] if until is not DeploymentState.GATED else [])]


def check_options(body: StepIn, steps: Sequence[DeploymentState]) -> None:
    """Refuse an option that none of the steps takes, so that none is silently ignored.

    Raises:
        InvalidArgument: names the field, the steps it belongs to, and what is legal here.
    """
    legal = [name for name, steps_of_option in OPTIONS.items() if steps_of_option & set(steps)]
    for name, steps_of_option in OPTIONS.items():
        if getattr(body, name) is not None and name not in legal:
            step_names = ", ".join(step.value for step in steps) or "registered"
            expected = " or ".join(step.value for step in DeploymentState if step in steps_of_option)
            legal_here = ", ".join(legal) or "none"
            why = f"{name} is only legal for {expected}; legal for the steps of this call ({step_names}): {legal_here}"
            raise InvalidArgument(why, pointer=f"/{name}")


def transition_request(
    body: StepIn, who: str, to: DeploymentState, if_match: str | None, checked: dict[str, Any], item_counts: ItemCounts
) -> TransitionRequest:
    """The request of a step, with the trial settings that were given, including nulls."""
    settings = {DeploymentState.SHADOW: body.shadow, DeploymentState.CANARY: body.canary}.get(to)
    return TransitionRequest(
        who=who,
        why=body.reason,
        if_match=if_match,
        gate=body.gate,
        override=body.override,
        settings=settings.model_dump(exclude_unset=True) if settings else {},
        checked=checked,
        item_counts=item_counts,
    )
