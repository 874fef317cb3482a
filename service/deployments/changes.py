"""What every change to a gallery's deployments can carry: who asks, on which state it rests, rehearsal or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Query, Request


@dataclass(frozen=True)
class Change:
    """The terms of a change.

    Attributes:
        who: the name of the API key, "local" where none is needed.
        if_match: the ETag the change rests on, None: whatever the state is.
        dry_run: check and answer as if, but change nothing.
    """

    who: str
    if_match: str | None
    dry_run: bool

    def status(self, done: int) -> int:
        """The status to answer with: `done`, or 200 when nothing was."""
        return 200 if self.dry_run else done


async def change_of(
    request: Request,
    dry_run: Annotated[bool, Query(description="check and answer as if, but change nothing")] = False,
    if_match: Annotated[str | None, Header(description="the ETag of the gallery's deployments")] = None,
) -> Change:
    """The terms of this request's change."""
    return Change(request.state.who, if_match, dry_run)


Terms = Annotated[Change, Depends(change_of)]
