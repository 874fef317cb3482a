"""The queries of a backfill's curve: chosen once, the same at every mark, embedded once per process.

They are drawn like the sample of a gate. Shapes: Q queries, D dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from sqlalchemy import Connection, false, func, select

from index.encoders.decoding import Decoder
from index.errors import InvalidArgument, RegraftError
from index.evaluation.metrics import MEAN_AP
from index.metadata.filter import value_at, value_text
from index.space import Vectors
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.registry.stored_contents import embeds
from service.schemas import Body, FieldPath, Number, Seed
from service.store.image_store.blobs import Blobs
from service.store.sql.arrays import blocks
from service.store.tables import item
from service.upgrades.gates.measuring import RECALL
from service.upgrades.gates.relevance import check_no_label
from service.upgrades.gates.samples import (
    READ_BLOCK,
    Entry,
    UnknownEvaluation,
    draw,
    embed,
    evaluation_row,
    read_embeddings,
    read_entries,
    too_few_readable,
)

FULL_RANKINGS = (MEAN_AP, RECALL)
"""Metrics that need every item of every query's ranking."""
MAX_PLACES = 50_000_000
"""Queries times items that one mark may rank in full; if they are more, fewer queries are drawn."""

ChosenQueries = list[tuple[int, str | None]]
"""Number and blob of each query: of its item, or of its entry in the evaluation set."""


class CurveIn(Body):
    """What to measure while a backfill runs: queries by the target version over the gallery in its current state.

    The queries are at most `sample` entries of the evaluation set `evaluation`, or else items of the gallery, drawn by
    `seed`. An item is relevant to a query if its metadata field `label` has the query's label: that of the entry, or
    the same field of the query's item; or if the entry names it, and then there is no `label`. Without labels and
    relevant items, only `recall@k` can be measured: of the first `k` sampled items by the target version alone, the
    share that is also found. The metric is measured at 0, 1, ... `marks` of `marks` equal steps.
    """

    label: FieldPath | None = None
    evaluation: Number | None = None
    sample: Annotated[int, Field(ge=2, le=10_000)] = 1000
    metric: Literal["cmc@1", "cmc@5", "mAP@1.0", "recall@k"] | None = None
    k: Annotated[int, Field(ge=1, le=1000)] = 10
    seed: Seed = 0
    marks: Annotated[int, Field(ge=1, le=100)] = 20

    @property
    def measured(self) -> str:
        """The requested metric; by default cmc@1, or recall@k without labels and evaluation set."""
        return self.metric or (RECALL if self.label is None and self.evaluation is None else "cmc@1")

    @property
    def labelled(self) -> bool:
        """Whether labels, or named relevant items, are the ground truth."""
        return self.measured != RECALL


@dataclass(frozen=True)
class Probes:
    """Q queries.

    Attributes:
        entries: (Q,) their entries.
        vectors: version -> its embeddings of them (Q, D).
        stored: whether they are items of the gallery, which are left out of their own rankings.
    """

    entries: Sequence[Entry]
    vectors: Mapping[str, Vectors]
    stored: bool

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """(Q,) each query's own item key; -1 if it is no item."""
        return np.array([entry.number if self.stored else -1 for entry in self.entries], np.int64)

    @property
    def labels(self) -> list[str]:
        """(Q,) their labels."""
        return [entry.label or "" for entry in self.entries]

    def restricted_to(self, entries: Sequence[Entry]) -> Probes:
        """The queries among `entries`, those that still exist, with their current labels."""
        now = {entry.number: entry for entry in entries}
        rows = [row for row, entry in enumerate(self.entries) if entry.number in now]
        vectors = {version: made[rows] for version, made in self.vectors.items()}
        return replace(self, entries=[now[self.entries[row].number] for row in rows], vectors=vectors)


def check(request: CurveIn, *, relevant: bool) -> None:
    """Raise InvalidArgument where fields do not go together; `relevant`: the evaluation set names relevant items."""
    if not request.labelled and request.evaluation is not None:
        why = "recall@k compares items of the gallery with each other: omit evaluation, or use another metric"
        raise InvalidArgument(why, pointer="/metric")
    if relevant:
        check_no_label(request.label)
    if request.labelled and request.label is None and not relevant:
        why = f"metric {request.measured!r} requires label: the metadata field with the label of each item"
        raise InvalidArgument(why, pointer="/label")


def choose(connection: Connection, gallery_id: int, target: LoadedVersion, request: CurveIn) -> ChosenQueries:
    """Draw the queries from the evaluation set, or from the gallery's images and texts that the target embeds.

    Raises:
        UnknownEvaluation: the gallery has no such evaluation set.
        InvalidArgument: fields that do not go together, an entry without label, or fewer than two items to draw from.
    """
    entries = []
    if request.evaluation is not None:
        entries = read_entries(connection, evaluation_row(connection, gallery_id, request.evaluation).id, None)
    relevant = any(entry.relevant for entry in entries)
    check(request, relevant=relevant)
    size = _affordable(connection, gallery_id, request)
    if request.evaluation is None:
        drawn = draw(connection, gallery_id, target, request.label, size, request.seed)
    else:
        if not relevant and any(entry.label is None for entry in entries):
            raise InvalidArgument("every entry of the evaluation set must have a label", pointer="/evaluation")
        drawn = [entries[n] for n in np.random.default_rng(request.seed).permutation(len(entries))[:size]]
    if not request.labelled and len(drawn) <= request.k:
        why = f"k is {request.k}; it must be below {len(drawn)}, the number of sampled items"
        raise InvalidArgument(why, pointer="/k")
    return sorted((entry.number, entry.blob) for entry in drawn)


def read(connection: Connection, gallery_id: int, request: CurveIn, chosen: ChosenQueries) -> list[Entry]:
    """The chosen queries that still exist: not those whose item was deleted, replaced or lost its label.

    Raises:
        UnknownEvaluation: the evaluation set was deleted.
    """
    blob_of = dict(chosen)
    if request.evaluation is not None:
        found = read_entries(connection, evaluation_row(connection, gallery_id, request.evaluation).id, None)
        return [entry for entry in found if entry.number in blob_of]
    entries: list[Entry] = []
    for block in blocks(list(blob_of), READ_BLOCK):
        statement = select(item.c.id, item.c.blob, item.c.metadata).where(
            item.c.id.in_(block), item.c.deleted == false()
        )
        for row in connection.execute(statement.order_by(item.c.id)):
            value = value_at(row.metadata, request.label) if request.label else None
            if row.blob == blob_of[row.id] and (value is not None or request.label is None):
                entries.append(Entry(row.id, row.blob, None if value is None else value_text(value), None))
    return entries


def uploaded(
    connection: Connection, registry: Registry, gallery_id: int, request: CurveIn, target: LoadedVersion
) -> Probes | None:
    """The queries of an evaluation set of embeddings; None: the queries are images or texts, to be embedded.

    Raises:
        UnknownEvaluation: the evaluation set was deleted.
        InvalidArgument: it holds no embeddings by the target.
    """
    if request.evaluation is None:
        return None
    row = evaluation_row(connection, gallery_id, request.evaluation)
    if row.kind != "embeddings":
        return None
    entries = read_entries(connection, row.id, None)
    sample = read_embeddings(connection, registry, row.id, entries, [target])
    return Probes(entries, {version: found.vectors for version, found in sample.embedded.items()}, stored=False)


def embed_queries(
    blobs: Blobs, decoder: Decoder, request: CurveIn, entries: Sequence[Entry], versions: Sequence[LoadedVersion]
) -> Probes:
    """Embed the readable queries by every version that is needed.

    Queries that one of these versions does not embed, such as texts by an encoder of images, are left out.

    Raises:
        InvalidArgument: fewer than two can be read.
        NoEncoder, NoTextEntrance: no query can be embedded by all of these versions.
    """
    embeddable = [entry for entry in entries if all(embeds(version.card, entry.blob or "") for version in versions)]
    sample = embed(blobs, decoder, embeddable or entries, versions, timed=0)
    if len(sample) < 2:
        raise too_few_readable("/sample")
    return Probes(
        sample.entries, {v: found.vectors for v, found in sample.embedded.items()}, request.evaluation is None
    )


def needed_versions(registry: Registry, target: LoadedVersion, serving: Collection[str]) -> list[LoadedVersion]:
    """The versions that must embed queries to reach items of the versions `serving`; the target first."""
    return [target, *map(registry.named, sorted(registry.needed(target.name, serving) - {target.name}))]


@contextmanager
def errors_within(field: str) -> Iterator[None]:
    """Prefix the JSON pointers of errors with `field`, the pointer of the object that they are about."""
    try:
        yield
    except RegraftError as error:
        pointer = "/evaluation" if isinstance(error, UnknownEvaluation) else error.pointer
        error.pointer = field + pointer
        raise


def _affordable(connection: Connection, gallery_id: int, request: CurveIn) -> int:
    """How many queries to draw: fewer than requested if full rankings of a large gallery are needed."""
    if request.measured not in FULL_RANKINGS:
        return request.sample
    live = select(func.count()).where(item.c.gallery_id == gallery_id, item.c.deleted == false())
    return min(request.sample, max(2, MAX_PLACES // max(connection.execute(live).scalar_one(), 1)))
