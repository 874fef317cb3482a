"""What routes take besides a body: the runtime, a loaded gallery, the context of a change, a confirmed deletion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Header, Query, Request

from index.errors import InvalidArgument
from service.runtime import Runtime
from service.store.audit import ChangeContext


async def runtime_of(request: Request) -> Runtime:
    """The runtime of the request's application; async, or FastAPI would run this on a thread."""
    return cast(Runtime, request.app.state.runtime)


Service = Annotated[Runtime, Depends(runtime_of)]
Newest = Annotated[int | None, Query(ge=1, le=1000, description="only this many, the newest; default: all")]
"""Limits lists of a gallery's history, which grows forever."""


async def _load(request: Request, service: Service) -> None:
    await service.ensure_loaded(request.path_params["name"])


LOADED = Depends(_load)
"""Dependency of a route that needs a gallery in memory: requests wait for its load without taking a thread."""


@dataclass(frozen=True)
class ConditionalContext(ChangeContext):
    """The context of a change of a gallery's deployments; `if_match`: the expected ETag, None: any."""

    if_match: str | None


DryRun = Annotated[bool, Query(description="check and answer as usual, but change nothing")]


async def context_of(request: Request, dry_run: DryRun = False) -> ChangeContext:
    """The context of this request's change."""
    return ChangeContext(request.state.who, dry_run)


async def conditional_context_of(
    request: Request,
    dry_run: DryRun = False,
    if_match: Annotated[str | None, Header(description="the ETag of the gallery's deployments")] = None,
) -> ConditionalContext:
    """The context of this request's change of deployments."""
    return ConditionalContext(request.state.who, dry_run, if_match)


REPEATED = Query(description="the last part of the path, repeated")


async def confirmed(request: Request, confirm: Annotated[str, REPEATED]) -> None:
    """Raise InvalidArgument unless a deletion of more than an item repeats the last part of its path.

    A client that joins ids into paths, or a proxy that normalises them, may turn the deletion of an item
    (`.../items/..`) into that of a gallery, but without this parameter.
    """
    *_, last = request.path_params.values()
    if confirm != last:
        raise InvalidArgument(f"confirm must be {last!r}: the last part of the path, repeated", pointer="/confirm")


async def confirmed_if_given(
    request: Request, confirm: Annotated[str | None, Query(description="the item's id, repeated")] = None
) -> None:
    """Raise InvalidArgument if a request for one item repeats another id than that in its path.

    A proxy that merges slashes turns the deletion or the image of the item `a//b` into that of `a/b`.
    """
    item_id = request.path_params["item_id"]
    if confirm not in {None, item_id}:
        raise InvalidArgument(f"confirm must be {item_id!r}: the id in the path, repeated", pointer="/confirm")


CONFIRMED = Depends(confirmed)
CONFIRMED_IF_GIVEN = Depends(confirmed_if_given)
RequestContext = Annotated[ChangeContext, Depends(context_of)]
IfMatchContext = Annotated[ConditionalContext, Depends(conditional_context_of)]
