"""Compute the new embeddings of a chunk from images and texts or from stored embeddings; see `Embedder`.

There are two steps, which can overlap: an iterator reads and decodes, and yields functions that compute. An item that
cannot be moved does not stop the others: it becomes a `Failed` with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby, islice
from typing import Protocol, TypeVar

from index.edges.transform import Forward, TransformedItems, load_forward
from index.encoders.decoding import Decoder
from index.encoders.encoder import BATCH
from index.errors import InvalidImage, InvalidText, InvalidVersionFolder, RegraftError
from index.space import check_vectors, space_from_json
from index.version import Edge, EdgeKey, EdgeKind
from service.backfills.outcome import Compute, EmbeddedItems, Failed, Outcome
from service.registry.encoders.embedding_api import ProviderUnavailable
from service.registry.stored_contents import ContentSource, Embeds, Input, embed, make_input
from service.store.image_store.keys import is_text
from service.store.vectors.codec import from_bytes

X = TypeVar("X")


class VersionSource(Protocol):
    """The part of `service.registry.registry.Registry` that `Embedder` needs."""

    def by_id(self, version_id: int) -> Embeds: ...
    def sync_edges(self) -> None: ...
    def edge(self, key: EdgeKey) -> NumberedEdge | None: ...
    def opening(self, edge: Edge) -> AbstractContextManager[None]: ...


class NumberedEdge(Protocol):
    """An edge, with a number that changes when it is replaced; `check` raises if it cannot be used."""

    @property
    def id(self) -> int: ...
    @property
    def edge(self) -> Edge: ...
    def check(self) -> None: ...


class ReadItem(Protocol):
    """An item, as of its feed number when it was read."""

    @property
    def id(self) -> int: ...
    @property
    def seq(self) -> int: ...


class WithContent(ReadItem, Protocol):
    """A row of `chunks.read_contents`."""

    @property
    def blob(self) -> str: ...


class HeldEmbedding(ReadItem, Protocol):
    """A row of `chunks.read_embeddings`."""

    @property
    def version_id(self) -> int: ...
    @property
    def vector(self) -> bytes: ...
    @property
    def side(self) -> bytes | None: ...


class Embedder:
    """Computes embeddings by a target version. Keeps the edges that it has opened."""

    def __init__(
        self,
        registry: VersionSource,
        contents: ContentSource,
        decoder: Decoder,
        transforms: dict[int, Forward] | None = None,
    ) -> None:
        """`transforms`: open edges by number, if several embedders share them."""
        self._registry = registry
        self._contents = contents
        self._decoder = decoder
        self._transforms = {} if transforms is None else transforms

    def reencode(self, target: Embeds, rows: Sequence[WithContent]) -> Iterator[Compute]:
        """Read and decode stored images and texts, each kind in batches of its encoder.

        Raises:
            StoreUnreachable: the store does not answer; no item counts as failed.
            NoEncoder, NoTextEntrance: the target does not embed images, or texts.
        """

        def encode(inputs: Sequence[Input]) -> TransformedItems:
            embedded = embed(target, inputs)
            return TransformedItems(embedded.vectors, embedded.side)

        images, texts = ([row for row in rows if is_text(row.blob) is kind] for kind in (False, True))
        for some, size in ((images, BATCH), (texts, target.text_encoder().batch if texts else BATCH)):
            contents = zip(some, self._contents.read_all(row.blob for row in some), strict=True)
            while block := list(islice(contents, size)):
                readable, failed = self._inputs(target, block)
                yield partial(_with, failed, readable, encode)

    def transform(self, target: Embeds, rows: Sequence[HeldEmbedding]) -> Iterator[Compute]:
        """Apply the item edges from the versions of stored embeddings to the target."""
        for old_id, group in groupby(sorted(rows, key=lambda row: row.version_id), key=lambda row: row.version_id):
            yield partial(_embed, [(row, row) for row in group], self._forward(self._registry.by_id(old_id), target))

    def forward(self, old: Embeds, new: Embeds) -> Forward | None:
        """The item edge between two versions, opened; None: there is none. Raises EdgeBroken."""
        # Edges change while a worker runs, except those that an active backfill applies.
        self._registry.sync_edges()
        declared = self._registry.edge((new.name, old.name, EdgeKind.FORWARD.value))
        if declared is None:
            return None
        declared.check()
        if declared.id not in self._transforms:
            with self._registry.opening(declared.edge):
                self._transforms[declared.id] = load_forward(declared.edge, new.card, old.card)
        return self._transforms[declared.id]

    def _inputs(
        self, target: Embeds, contents: Iterable[tuple[WithContent, Callable[[], bytes]]]
    ) -> tuple[list[tuple[WithContent, Input]], list[Failed]]:
        readable: list[tuple[WithContent, Input]] = []
        failed: list[Failed] = []
        for row, read in contents:
            kind = "text" if is_text(row.blob) else "image"
            try:
                readable.append((row, make_input(target, row.blob, read(), self._decoder)))
            except FileNotFoundError:
                failed.append(Failed(row.id, row.seq, f"the stored {kind} is missing", f"{kind}_missing"))
            except (InvalidImage, InvalidText) as error:
                failed.append(Failed(row.id, row.seq, error.message, f"{kind}_invalid"))
            except OSError as error:
                reason = f"the {kind} cannot be read: {error}"
                failed.append(Failed(row.id, row.seq, reason, f"{kind}_unreadable", retry=True))
        return readable, failed

    def _forward(self, old: Embeds, new: Embeds) -> Callable[[Sequence[HeldEmbedding]], TransformedItems]:
        transform = self.forward(old, new)
        assert transform is not None, "the plan holds items of versions with an item edge only"
        space = space_from_json(dict(new.card.space))

        def apply(rows: Sequence[HeldEmbedding]) -> TransformedItems:
            given = apply_transform(transform, old, [row.vector for row in rows], [row.side for row in rows])
            return TransformedItems(
                check_vectors(given.vectors_ND, new.card.dim, space), given.side_NS, given.variance_N
            )

        return apply


def apply_transform(
    transform: Forward, old: Embeds, vectors: Sequence[bytes], sides: Sequence[bytes | None]
) -> TransformedItems:
    """Apply an item edge to stored embeddings of `old`."""
    side = [row for row in sides if row is not None]
    # If the edge needs side-information and it is missing for some rows, the edge raises the error.
    given = from_bytes(side, old.card.side_dim) if side and old.card.side_dim else None
    return transform.transform_items(from_bytes(vectors, old.card.dim), given)


def outcome_of(computed: Iterator[Compute]) -> Outcome:
    """Compute everything, one after the other."""
    outcome: Outcome = ([], [])
    for compute in computed:
        collect(outcome, compute())
    return outcome


def collect(outcome: Outcome, more: Outcome) -> Outcome:
    """Add one outcome to another."""
    outcome[0].extend(more[0])
    outcome[1].extend(more[1])
    return outcome


def _with(
    failed: list[Failed], inputs: Sequence[tuple[ReadItem, X]], embed: Callable[[Sequence[X]], TransformedItems]
) -> Outcome:
    return collect(([], list(failed)), _embed(inputs, embed))


def _embed(inputs: Sequence[tuple[ReadItem, X]], embed: Callable[[Sequence[X]], TransformedItems]) -> Outcome:
    """Embed all inputs at once; on an error, each half separately, down to the item at fault."""
    if not inputs:
        return [], []
    try:
        made = embed([x for _, x in inputs])
    except ProviderUnavailable:  # no text is at fault
        raise
    except RegraftError as error:
        if len(inputs) == 1:
            row = inputs[0][0]
            # An invalid vector stays invalid, but a model that failed may only have lacked memory.
            return [], [Failed(row.id, row.seq, error.message, retry=isinstance(error, InvalidVersionFolder))]
        half = len(inputs) // 2
        return collect(_embed(inputs[:half], embed), _embed(inputs[half:], embed))
    rows = [row for row, _ in inputs]
    keys, seqs = [row.id for row in rows], [row.seq for row in rows]
    return [EmbeddedItems(keys, seqs, made.vectors_ND, made.side_NS, made.variance_N)], []
