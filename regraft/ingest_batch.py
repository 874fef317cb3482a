"""Send a batch of items, with one result whichever way the service refuses items; in halves if it is too large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from regraft.connection import Problem
from regraft.models import IngestResult, ItemError, MetadataResult

TOO_LARGE = 413
T = TypeVar("T")


def ingest_in_halves(send: Callable[[Sequence[T]], IngestResult], items: Sequence[T]) -> IngestResult:
    """The result of a batch: sent in halves if it is too large for the service or a proxy before it.

    An item that is too large alone is an error of its own. A batch in which all items are invalid is refused as a
    whole, with the same list of errors.

    Raises:
        Problem: another refusal.
    """
    try:
        return send(items)
    except Problem as problem:
        if problem.status == TOO_LARGE:
            if len(items) == 1:
                error = ItemError(index=0, id=None, code=problem.code, detail=problem.detail, pointer="")
                return nothing_stored([error])
            cut = len(items) // 2
            return _together(ingest_in_halves(send, items[:cut]), ingest_in_halves(send, items[cut:]), cut)
        if errors := _item_errors(problem):
            return nothing_stored(errors)
        raise


def change_metadata(send: Callable[[Sequence[T]], MetadataResult], items: Sequence[T]) -> MetadataResult:
    """The result of a batch of changed metadata, also if the service refuses all of them.

    Raises:
        Problem: another refusal.
    """
    try:
        return send(items)
    except Problem as problem:
        if errors := _item_errors(problem):
            return MetadataResult(updated=0, failed=len(items), errors=errors)
        raise


def _item_errors(problem: Problem) -> list[ItemError]:
    """The errors of a batch in which all items are invalid; none: it is another refusal."""
    if problem.errors and all("index" in error for error in problem.errors):
        return [ItemError(**error) for error in problem.errors]
    return []


def nothing_stored(errors: list[ItemError]) -> IngestResult:
    """The result of a batch of which no item was stored."""
    counts = dict.fromkeys(("stored", "new", "updated", "replaced", "seq"), 0)
    return IngestResult(**counts, failed=len(errors), errors=errors, warnings=[])


def _together(first: IngestResult, second: IngestResult, cut: int) -> IngestResult:
    """The result of a batch whose first `cut` items were sent before the others."""
    counts = ("stored", "new", "updated", "replaced", "failed")
    summed = {name: getattr(first, name) + getattr(second, name) for name in counts}
    behind = [error.model_copy(update={"index": error.index + cut}) for error in second.errors]
    lists = {"errors": [*first.errors, *behind], "warnings": [*first.warnings, *second.warnings]}
    return second.model_copy(update={**summed, **lists})
