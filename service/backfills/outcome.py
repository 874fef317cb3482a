"""The outcome of a chunk: moved and failed items. Needs no database, so that remote workers can use it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from index.space import Vectors

REASON_LENGTH = 1024


@dataclass(frozen=True)
class EmbeddedItems:
    """New embeddings of N items, each computed from its item as of its `seq`.

    Attributes:
        item_ids: N items, all different.
        seqs: N numbers of the change feed.
        vectors: (N, D), valid for the target version's space.
        side: (N, S), side-information by the target version, if it has any.
        uncertainty: (N,), variances by the item edge, if it predicts them.
    """

    item_ids: Sequence[int]
    seqs: Sequence[int]
    vectors: Vectors
    side: Vectors | None = None
    uncertainty: Vectors | None = None

    def only(self, wanted: Container[int]) -> EmbeddedItems:
        """Only the wanted items."""
        kept = [number for number, key in enumerate(self.item_ids) if key in wanted]
        if len(kept) == len(self.item_ids):
            return self
        return EmbeddedItems(
            [self.item_ids[number] for number in kept],
            [self.seqs[number] for number in kept],
            self.vectors[kept],
            None if self.side is None else self.side[kept],
            None if self.uncertainty is None else self.uncertainty[kept],
        )


@dataclass(frozen=True)
class Failed:
    """An item that could not be moved as of its `seq`, and why; `retry`: another attempt may succeed."""

    item_id: int
    seq: int
    reason: str
    code: str = "refused"
    retry: bool = False

    @property
    def line(self) -> str:
        """The reason as one line that any database can store: PostgreSQL's text has no NUL character."""
        return " ".join(self.reason.replace("\x00", " ").split())[:REASON_LENGTH]


Outcome = tuple[list[EmbeddedItems], list[Failed]]
Compute = Callable[[], Outcome]
"""Computes the embeddings of some items of a chunk, whose inputs are already in memory."""
