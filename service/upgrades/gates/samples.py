"""The embedded sample of a gate (`Sample`): items of the gallery (`service.upgrades.gates.sides`) or an evaluation set.

All N entries are items, and the first Q of them are also queries; a query is left out of its own ranking. In an
evaluation set every entry is both, unless entries name relevant items of the gallery
(`service.upgrades.gates.relevance`): then they are only queries. Arrays are (N, dimension).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, and_, false, select

from index.encoders.decoding import Decoder
from index.encoders.encoder import BATCH, Embedded
from index.errors import InvalidArgument, RegraftError
from index.evaluation.relevance import LabelRelevance, ListedRelevance, Relevance, label_codes
from index.metadata.filter import value_at, value_text
from index.space import Vectors
from service.backfills.waiting import embeddable
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.registry.stored_contents import InputRequest, read_inputs, time_each
from service.registry.stored_contents import embed as embed_inputs
from service.store.galleries.random_items import RandomItems
from service.store.image_store.blobs import Blobs
from service.store.rows import EvaluationRow, all_of, first_of
from service.store.sql.arrays import blocks
from service.store.tables import evaluation, evaluation_embedding, evaluation_entry, item
from service.store.vectors.codec import STORED, from_bytes

READ_BLOCK = 1_000
TIMED = 50
"""Images that each encoder is timed on, one at a time."""


class UnknownEvaluation(RegraftError):
    """The gallery has no evaluation set of this number."""

    status = 404
    code = "unknown_evaluation"


@dataclass(frozen=True)
class Entry:
    """One entry: the blob key of its image or text (None: it has none), its label and its slice as JSON texts.

    `number` is the key of its item, or its position in the evaluation set; `name` is the item's id. `relevant`: ids of
    the relevant items, if the evaluation set names them.
    """

    number: int
    blob: str | None
    label: str | None
    slice: str | None
    name: str = ""
    relevant: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuerySide:
    """Q queries that are not items, and the items that are relevant to them.

    Attributes:
        entries: (Q,) their entries.
        vectors: version name -> its embeddings of them (Q, D).
        relevant_numbers: (Q, K) numbers of the relevant entries on the gallery side, -1 where there are fewer.
        missing: how many named items do not exist.
    """

    entries: Sequence[Entry]
    vectors: Mapping[str, Vectors]
    relevant_numbers: NDArray[np.int64]
    missing: int


@dataclass(frozen=True)
class Sample:
    """N embedded entries; the queries are the first `queries` of them, or those of `query_side`.

    Attributes:
        entries: (N,) the entries.
        embedded: version name -> its embeddings of the first entries: of all by the current version, by others at
            least of the queries.
        labels: (N,), None if they are unknown.
        slices: (Q,), None for a query in no slice.
        latency_ms: version name -> p50 and p99 of encoding one image or text, if any was timed.
        unreadable: how many entries were left out because their image or text is missing or cannot be read.
        queries: Q.
        unlabelled: how many entries were left out because they have no label and others do.
        whole: whether every item that can be compared is among the entries.
        exhaustive: whether also every item that can be a query is one, so that no stronger measurement exists.
        query_side: queries that are no entries; None: the first entries are the queries.
    """

    entries: Sequence[Entry]
    embedded: Mapping[str, Embedded]
    labels: Sequence[str] | None
    slices: Sequence[str | None]
    latency_ms: Mapping[str, Mapping[str, float]]
    unreadable: int
    queries: int
    unlabelled: int = 0
    whole: bool = True
    exhaustive: bool = True
    query_side: QuerySide | None = None

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def has_ground_truth(self) -> bool:
        """Whether labels or named items are the ground truth, and not a version's own ranking."""
        return self.labels is not None or self.query_side is not None

    @cached_property
    def label_codes(self) -> NDArray[np.int64] | None:
        """(N,) the labels as numbers; None if they are unknown."""
        return None if self.labels is None else label_codes(self.labels)

    @property
    def query_entries(self) -> Sequence[Entry]:
        """(Q,) the entries that are queries."""
        return self.entries[: self.queries] if self.query_side is None else self.query_side.entries

    @property
    def query_vectors(self) -> Mapping[str, Vectors]:
        """Version name -> its embeddings of the queries (Q, D)."""
        if self.query_side is not None:
            return self.query_side.vectors
        return {name: found.vectors[: self.queries] for name, found in self.embedded.items()}

    def self_numbers(self, items: int) -> NDArray[np.int64]:
        """(Q,) each query's own number among the first `items` entries; -1 if it is not among them."""
        if self.query_side is not None:
            return np.full(self.queries, -1)
        own = np.arange(self.queries)
        return np.where(own < items, own, -1)

    def relevance(self, items: int, queries: int | None = None) -> Relevance:
        """Which of the first `items` are relevant to the first `queries` (None: to all); needs `has_ground_truth`."""
        self_numbers = self.self_numbers(items)[:queries]
        if self.query_side is not None:
            listed = self.query_side.relevant_numbers[:queries]
            return ListedRelevance(np.where(listed < items, listed, -1), items, self_numbers)
        codes = self.label_codes
        assert codes is not None
        return LabelRelevance(codes[: len(self_numbers)], codes[:items], self_numbers)


def draw(
    connection: Connection, gallery_id: int, target: LoadedVersion, label: str | None, sample: int, seed: int
) -> list[Entry]:
    """Up to `sample` live items that have the metadata field `label`, in an order drawn by `seed`.

    Each has an image or text that the target embeds.

    Raises:
        InvalidArgument: there are fewer than two.
    """
    eligible = and_(item.c.gallery_id == gallery_id, item.c.deleted == false(), embeddable(target.id))
    drawn: list[Entry] = []
    for block in RandomItems(connection, eligible, seed).in_blocks(READ_BLOCK):
        rows = connection.execute(select(item.c.id, item.c.blob, item.c.metadata).where(item.c.id.in_(block)))
        found = {row.id: row for row in rows if label is None or value_at(row.metadata, label) is not None}
        drawn += [Entry(i, found[i].blob, field_text(found[i].metadata, label), None) for i in block if i in found]
        if len(drawn) >= sample:
            break
    if len(drawn) < 2:
        raise too_few_items(f"an image or a text that {target.name!r} embeds", label, len(drawn))
    return drawn[:sample]


def too_few_items(needed: str, label: str | None, found: int) -> InvalidArgument:
    """The error if a gallery has fewer than two items with what they need and, if given, the metadata field `label`."""
    labelled = f" and metadata field {label!r}" if label else ""
    why = f"a measurement requires two items with {needed}{labelled}; the gallery has {found}"
    return InvalidArgument(why, pointer="/label")


def too_few_readable(pointer: str) -> InvalidArgument:
    """The error if fewer than two images or texts can be read."""
    return InvalidArgument("fewer than two images of the sample can be read", pointer=pointer)


def evaluation_row(connection: Connection, gallery_id: int, number: int) -> EvaluationRow:
    """The row of a gallery's evaluation set. Raises UnknownEvaluation."""
    conditions = (evaluation.c.id == number, evaluation.c.gallery_id == gallery_id)
    row = first_of(EvaluationRow, connection.execute(select(evaluation).where(*conditions)))
    if row is None:
        raise UnknownEvaluation(f"the gallery has no evaluation set {number}")
    return row


def evaluation_rows(connection: Connection, gallery_id: int) -> list[EvaluationRow]:
    """Every evaluation set of a gallery, oldest first."""
    statement = select(evaluation).where(evaluation.c.gallery_id == gallery_id)
    return all_of(EvaluationRow, connection.execute(statement.order_by(evaluation.c.id)))


def read_entries(
    connection: Connection, evaluation_id: int, slice_field: str | None, label: str | None = None
) -> list[Entry]:
    """The entries of an evaluation set, labelled by their metadata field `label`; None: by their own labels.

    Raises:
        InvalidArgument: no entry has that field.
    """
    statement = select(evaluation_entry).where(evaluation_entry.c.evaluation_id == evaluation_id)
    entries = []
    for row in connection.execute(statement.order_by(evaluation_entry.c.number)):
        own_label = None if row.label is None else value_text(row.label)
        label_text = own_label if label is None else field_text(row.metadata, label)
        slice_text, relevant = field_text(row.metadata, slice_field), tuple(row.relevant or ())
        entries.append(Entry(row.number, row.blob, label_text, slice_text, str(row.number), relevant))
    if label is not None and all(entry.label is None for entry in entries):
        raise InvalidArgument(f"label: no entry has the metadata field {label!r}", pointer="/label")
    return entries


def with_labels(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries that have a label; all entries if fewer than two have one."""
    labelled = [entry for entry in entries if entry.label is not None]
    return labelled if len(labelled) >= 2 else entries


def embed(
    blobs: Blobs, decoder: Decoder, entries: Sequence[Entry], versions: Sequence[LoadedVersion], timed: int = TIMED
) -> Sample:
    """Encode the entries' images and texts by each version; unreadable entries are left out.

    `timed` of them are also encoded one at a time, to measure latencies. Entries that name relevant items are queries,
    so their texts get the prompt of queries.

    Raises:
        NoEncoder, NoTextEntrance: one of the versions does not embed images, or texts.
        StoreUnreachable: the store of images does not answer.
    """
    parts: dict[str, list[Embedded]] = {version.name: [] for version in versions}
    readable_entries: list[Entry] = []
    seconds: dict[str, list[float]] = {version.name: [] for version in versions}
    for block in blocks(entries, BATCH):
        requests = [InputRequest(entry.blob, versions, "query" if entry.relevant else "item") for entry in block]
        read = list(zip(read_inputs(blobs, decoder, requests), block, strict=True))
        readable = [inputs for inputs, _ in read if inputs is not None]
        for version in versions:
            inputs = [item_inputs[version.name] for item_inputs in readable]
            parts[version.name].append(embed_inputs(version, inputs))
            seconds[version.name] += time_each(version, inputs[: timed - len(seconds[version.name])])
        readable_entries += [entry for inputs, entry in read if inputs is not None]
    embedded = {name: _joined(found) for name, found in parts.items()}
    return _sample(embedded, readable_entries, quantiles(seconds), len(entries) - len(readable_entries))


def read_embeddings(
    connection: Connection,
    registry: Registry,
    evaluation_id: int,
    entries: Sequence[Entry],
    needed: Sequence[LoadedVersion],
) -> Sample:
    """The stored embeddings of these entries of an evaluation set without images.

    Raises:
        InvalidArgument: the set holds no embeddings of a needed version.
    """
    statement = select(evaluation_embedding).where(evaluation_embedding.c.evaluation_id == evaluation_id)
    versions = {row.version_id: row.vectors for row in connection.execute(statement)}
    if missing := [version.name for version in needed if version.id not in versions]:
        available = ", ".join(sorted(registry.by_id(v).name for v in versions))
        lacking = " and ".join(map(repr, missing))
        why = f"evaluation {evaluation_id} has no embeddings by {lacking} (only by: {available})"
        raise InvalidArgument(why, pointer="/evaluation")
    rows = [entry.number for entry in entries]
    embedded = {}
    for version in map(registry.by_id, versions):
        stored = versions[version.id]
        vectors = from_bytes([stored], len(stored) // STORED.itemsize).reshape(-1, version.card.dim)
        embedded[version.name] = Embedded(vectors[rows], None)
    return _sample(embedded, entries, {}, 0)


def _sample(
    embedded: Mapping[str, Embedded],
    entries: Sequence[Entry],
    latency_ms: Mapping[str, Mapping[str, float]],
    unreadable: int,
) -> Sample:
    labels = [entry.label for entry in entries if entry.label is not None]
    slices = [entry.slice for entry in entries]
    all_labels = labels if len(labels) == len(entries) else None
    return Sample(entries, embedded, all_labels, slices, latency_ms, unreadable, len(entries))


def field_text(metadata: Mapping[str, Any], name: str | None) -> str | None:
    """A metadata field as text, by `value_text`; None if there is none."""
    found = None if name is None else value_at(metadata, name)
    return None if found is None else value_text(found)


def quantiles(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Version name -> p50 and p99 in milliseconds, for versions that were timed."""
    return {
        name: {"p50": 1000 * float(np.quantile(took, 0.5)), "p99": 1000 * float(np.quantile(took, 0.99))}
        for name, took in seconds.items()
        if took
    }


def _joined(parts: Sequence[Embedded]) -> Embedded:
    side = [p.side for p in parts if p.side is not None]
    return Embedded(np.concatenate([p.vectors for p in parts]), np.concatenate(side) if side else None)
