"""What every change can carry: who asks, rehearsal or not, and for deployments on which state it rests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Query, Request

from index.errors import InvalidArgument
from service.store.audit import Change


@dataclass(frozen=True)
class ConditionalChange(Change):
    """The terms of a change of a gallery's deployments; `if_match` is the ETag it rests on, None: whatever it is."""

    if_match: str | None


DryRun = Annotated[bool, Query(description="check and answer as if, but change nothing")]


async def change_of(request: Request, dry_run: DryRun = False) -> Change:
    """The terms of this request's change."""
    return Change(request.state.who, dry_run)


async def conditional_change_of(
    request: Request,
    dry_run: DryRun = False,
    if_match: Annotated[str | None, Header(description="the ETag of the gallery's deployments")] = None,
) -> ConditionalChange:
    """The terms of this request's change of deployments."""
    return ConditionalChange(request.state.who, dry_run, if_match)


async def confirmed(
    request: Request, confirm: Annotated[str, Query(description="the last part of the path once more")]
) -> None:
    """Raise InvalidArgument unless a deletion of more than an item says twice what it deletes.

    A client that joins ids into paths, or a proxy that shortens them, makes one of the deletion of an item
    (`.../items/..`); it cannot make that.
    """
    *_, last = request.path_params.values()
    if confirm != last:
        raise InvalidArgument(f"confirm must be {last!r}: the last part of the path once more", pointer="/confirm")


CONFIRMED = Depends(confirmed)
Terms = Annotated[Change, Depends(change_of)]
IfMatchTerms = Annotated[ConditionalChange, Depends(conditional_change_of)]
