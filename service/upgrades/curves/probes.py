"""The queries that a backfill's curve is measured with: chosen once, the same at every mark, embedded once a process.

They come from where a gate takes its sample. Shapes: Q queries, D dimension.
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

from index.decoding import Decoder
from index.errors import InvalidArgument, RegraftError
from index.evaluation.metrics import MEAN_AP
from index.filter import value_at, value_text
from index.space import Vectors
from service.registry.registry import LoadedVersion, Registry
from service.registry.stored_contents import embeds
from service.schemas import Body, FieldPath, Number, Seed
from service.store.blobs import Blobs
from service.store.sql_arrays import blocks
from service.store.tables import item
from service.upgrades.gates.measuring import RECALL
from service.upgrades.gates.samples import (
    READ_BLOCK,
    Entry,
    UnknownEvaluation,
    draw,
    embed,
    evaluation_row,
    read_embeddings,
    read_entries,
)

FULL_RANKINGS = (MEAN_AP, RECALL)
"""Metrics that need every item of every query's ranking."""
MAX_PLACES = 50_000_000
"""Places in the rankings of one mark, queries times items, beyond which a full ranking is asked for fewer queries."""

Chosen = list[tuple[int, str | None]]
"""Number and image of each query: of the item it is, or of its entry in the evaluation set."""


class CurveIn(Body):
    """What to measure while a backfill runs: queries by the target version over the gallery as it is.

    The queries are entries of the evaluation set `evaluation`, or else items of the gallery, at most `sample` of them,
    drawn by `seed`. An item is right for a query when its metadata field `label` holds the query's label: the entry's,
    or the same field of the item that asks; or where the entry names it as relevant, and then there is no `label`.
    Without either only `recall@k` can be measured: the share of the first `k`
    of the sampled items, as the target version alone would rank them. The metric is taken at 0, 1, ... `marks` of
    `marks` equal steps.
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
        """The metric, chosen by what is there to measure it with where none is named."""
        return self.metric or (RECALL if self.label is None and self.evaluation is None else "cmc@1")

    @property
    def labelled(self) -> bool:
        """Whether labels say what is right."""
        return self.measured != RECALL


@dataclass(frozen=True)
class Probes:
    """Q queries.

    Attributes:
        entries: (Q,) what they are.
        vectors: version -> its embeddings of them (Q, D).
        stored: whether they are items of the gallery, which must not find themselves.
    """

    entries: Sequence[Entry]
    vectors: Mapping[str, Vectors]
    stored: bool

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """(Q,) the item that each is, -1 where it is none."""
        return np.array([entry.number if self.stored else -1 for entry in self.entries], np.int64)

    @property
    def labels(self) -> list[str]:
        """(Q,) their labels."""
        return [entry.label or "" for entry in self.entries]

    def among(self, entries: Sequence[Entry]) -> Probes:
        """Those that are still there, with the labels they have now."""
        now = {entry.number: entry for entry in entries}
        rows = [row for row, entry in enumerate(self.entries) if entry.number in now]
        vectors = {version: made[rows] for version, made in self.vectors.items()}
        return replace(self, entries=[now[self.entries[row].number] for row in rows], vectors=vectors)


def check(asked: CurveIn, *, relevant: bool) -> None:
    """Raise InvalidArgument where the fields do not go together; `relevant`: the set names what is right."""
    if not asked.labelled and asked.evaluation is not None:
        why = "recall@k compares items of the gallery with each other: leave evaluation out, or name another metric"
        raise InvalidArgument(why, pointer="/metric")
    if relevant and asked.label is not None:
        raise InvalidArgument("the evaluation set names relevant items: leave label out", pointer="/label")
    if asked.labelled and asked.label is None and not relevant:
        why = f"metric {asked.measured!r} needs label: the metadata field that says which items are right"
        raise InvalidArgument(why, pointer="/label")


def choose(connection: Connection, gallery_id: int, target: LoadedVersion, asked: CurveIn) -> Chosen:
    """Draw the queries: of the gallery, images and texts that the target embeds.

    Raises:
        UnknownEvaluation: the gallery has no such evaluation set.
        InvalidArgument: fields that do not go together, an entry without label, or fewer than two items to draw from.
    """
    entries = []
    if asked.evaluation is not None:
        entries = read_entries(connection, evaluation_row(connection, gallery_id, asked.evaluation).id, None)
    relevant = any(entry.relevant for entry in entries)
    check(asked, relevant=relevant)
    size = _affordable(connection, gallery_id, asked)
    if asked.evaluation is None:
        drawn = draw(connection, gallery_id, target, asked.label, size, asked.seed)
    else:
        if not relevant and any(entry.label is None for entry in entries):
            raise InvalidArgument("every entry of the evaluation set needs a label", pointer="/evaluation")
        drawn = [entries[n] for n in np.random.default_rng(asked.seed).permutation(len(entries))[:size]]
    if not asked.labelled and len(drawn) <= asked.k:
        why = f"k is {asked.k}; it must be below {len(drawn)}, the number of items there are to draw"
        raise InvalidArgument(why, pointer="/k")
    return sorted((entry.number, entry.blob) for entry in drawn)


def read(connection: Connection, gallery_id: int, asked: CurveIn, chosen: Chosen) -> list[Entry]:
    """The chosen queries that are still there: an item that was deleted, replaced or lost its label is no more.

    Raises:
        UnknownEvaluation: the evaluation set was deleted.
    """
    blob_of = dict(chosen)
    if asked.evaluation is not None:
        found = read_entries(connection, evaluation_row(connection, gallery_id, asked.evaluation).id, None)
        return [entry for entry in found if entry.number in blob_of]
    entries: list[Entry] = []
    for block in blocks(list(blob_of), READ_BLOCK):
        mine = select(item.c.id, item.c.blob, item.c.metadata).where(item.c.id.in_(block), item.c.deleted == false())
        for row in connection.execute(mine.order_by(item.c.id)):
            value = value_at(row.metadata, asked.label) if asked.label else None
            if row.blob == blob_of[row.id] and (value is not None or asked.label is None):
                entries.append(Entry(row.id, row.blob, None if value is None else value_text(value), None))
    return entries


def brought(
    connection: Connection, registry: Registry, gallery_id: int, asked: CurveIn, target: LoadedVersion
) -> Probes | None:
    """The queries of an evaluation set that came as embeddings; None: there are images to be embedded.

    Raises:
        UnknownEvaluation: the evaluation set was deleted.
        InvalidArgument: it holds no embeddings by the target.
    """
    if asked.evaluation is None:
        return None
    row = evaluation_row(connection, gallery_id, asked.evaluation)
    if row.kind != "embeddings":
        return None
    entries = read_entries(connection, row.id, None)
    held = read_embeddings(connection, registry, row.id, entries, [target])
    return Probes(entries, {version: found.vectors for version, found in held.embedded.items()}, stored=False)


def embedded(
    blobs: Blobs, decoder: Decoder, asked: CurveIn, entries: Sequence[Entry], needed: Sequence[LoadedVersion]
) -> Probes:
    """The queries that can be read, embedded by every version that is needed.

    Texts are left out while items are reached through a version that embeds images only, and the other way round.

    Raises:
        InvalidArgument: fewer than two can be read.
        NoEncoder, NoTextEntrance: there are none that each of the versions embeds.
    """
    able = [entry for entry in entries if all(embeds(version.card, entry.blob or "") for version in needed)]
    made = embed(blobs, decoder, able or entries, needed, timed=0)
    if len(made) < 2:
        raise InvalidArgument("fewer than two images of the sample can be read", pointer="/sample")
    return Probes(made.entries, {v: found.vectors for v, found in made.embedded.items()}, asked.evaluation is None)


def needed(registry: Registry, target: LoadedVersion, live: Collection[str]) -> list[LoadedVersion]:
    """The versions that have to embed image queries to reach items of the `live` versions; the target first."""
    return [target, *map(registry.named, sorted(registry.needed(target.name, live) - {target.name}))]


@contextmanager
def inside(field: str) -> Iterator[None]:
    """Errors about a field of the object in `field` point there."""
    try:
        yield
    except RegraftError as error:
        own = "/evaluation" if isinstance(error, UnknownEvaluation) else error.pointer
        error.pointer = field + own
        raise


def _affordable(connection: Connection, gallery_id: int, asked: CurveIn) -> int:
    """How many queries to draw: where full rankings are needed and the gallery is big, fewer than were asked for."""
    if asked.measured not in FULL_RANKINGS:
        return asked.sample
    live = select(func.count()).where(item.c.gallery_id == gallery_id, item.c.deleted == false())
    return min(asked.sample, max(2, MAX_PLACES // max(connection.execute(live).scalar_one(), 1)))
