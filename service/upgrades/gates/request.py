"""What a gate measures on: the request (`GateIn`), and the sample that it asks for (`take_sample`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field
from sqlalchemy import Connection

from index.encoders.decoding import Decoder
from index.errors import InvalidArgument
from service.registry.loaded_version import LoadedVersion
from service.registry.registry import Registry
from service.registry.stored_contents import embeds
from service.schemas import Body, FieldPath, Name, Number, Seed
from service.store.database.connections import Database
from service.store.image_store.blobs import Blobs
from service.upgrades.gates.embedded_sides import embed_sides
from service.upgrades.gates.maps import Place
from service.upgrades.gates.measuring import RECALL, TAR, default_metric, moves_with_side
from service.upgrades.gates.relevance import check_no_label, live_keys, with_queries
from service.upgrades.gates.samples import (
    Entry,
    Sample,
    embed,
    evaluation_row,
    read_embeddings,
    read_entries,
    too_few_readable,
    with_labels,
)
from service.upgrades.gates.sides import DrawnSides, DrawOptions, draw_sides


class GateIn(Body):
    """What to measure on: the evaluation set `evaluation`, else items of the gallery.

    Up to `sample` items, drawn by `seed`, are queries over the whole gallery, or over a sample if it is too large.
    Items with the same value of the metadata field `label` are relevant to each other. Entries of an evaluation set
    have their own labels, unless `label` is given, or name the relevant items of the gallery, over which they are then
    queries; all of them are, so that `sample` is refused. `far` and `k` are refused with metrics that do not use them;
    the default of these three is legal everywhere. Without labels and relevant items, only `recall@k` can be measured.
    `slice` is a metadata field; the metric is also measured for each of its values. A field is a key, or a path of keys
    such as `outer.inner`.
    """

    version: Name
    label: FieldPath | None = None
    evaluation: Number | None = None
    slice: FieldPath | None = None
    sample: Annotated[int, Field(ge=2, le=100_000)] = 1000
    metric: Literal["cmc@1", "cmc@5", "mAP@1.0", "TAR@FAR", "recall@k"] | None = None
    far: Annotated[float, Field(gt=0, lt=1)] = 0.01
    k: Annotated[int, Field(ge=1, le=1000)] = 10
    seed: Seed = 0


def take_sample(
    database: Database,
    registry: Registry,
    contents: tuple[Blobs, Decoder],
    gallery_id: int,
    pair: tuple[LoadedVersion, LoadedVersion],
    places: Sequence[Place],
    request: GateIn,
) -> Sample:
    """The sample to measure on, embedded by both versions, and by others whose items also need a calibration.

    Raises:
        UnknownEvaluation: the gallery has no such evaluation set, or it was deleted meanwhile.
        InvalidArgument: fewer than two entries can be used, none has the slice's field, embeddings are missing, or an
            option has no effect.
        NoEncoder: one of the two versions has no encoder.
    """
    old, new = pair
    others = dict.fromkeys(v for v, _ in places if v not in pair and v.can_embed("images", "texts"))
    if request.evaluation is not None:
        return _of_evaluation(database, registry, contents, gallery_id, pair, list(others), request)
    _check_effects(request, labelled=request.label is not None)
    options = DrawOptions(
        request.label,
        request.slice,
        request.sample,
        request.seed,
        paired=_uses_own_ranking(request),
        with_side=moves_with_side(registry, old, new),
    )
    with database.read() as connection:
        drawn = draw_sides(connection, gallery_id, old, new, options)
    _check_slice(request, drawn.entries)
    return embed_sides(*contents, drawn, old, new, list(others))


def _of_evaluation(
    database: Database,
    registry: Registry,
    contents: tuple[Blobs, Decoder],
    gallery_id: int,
    pair: tuple[LoadedVersion, LoadedVersion],
    others: Sequence[LoadedVersion],
    request: GateIn,
) -> Sample:
    """The entries of an evaluation set; if they name relevant items, as queries over the gallery's items."""
    assert request.evaluation is not None
    old, new = pair
    with database.read() as connection:
        evaluation = evaluation_row(connection, gallery_id, request.evaluation)
        entries = read_entries(connection, evaluation.id, request.slice, request.label)
        relevant = any(entry.relevant for entry in entries)
        used = entries if relevant or request.metric == RECALL else with_labels(entries)
        _check_effects(request, labelled=relevant or all(entry.label is not None for entry in used))
        _check_slice(request, used)
        drawn = _draw_relevant(connection, registry, gallery_id, pair, entries, request) if relevant else None
        stored = evaluation.kind == "embeddings"
        sample = read_embeddings(connection, registry, evaluation.id, used, pair) if stored else None
    if sample is None:
        blob = used[0].blob
        sample = embed(*contents, used, [*pair, *(v for v in others if blob is not None and embeds(v.card, blob))])
        if sample.unreadable:
            with database.read() as connection:  # deleted meanwhile, with its images
                evaluation_row(connection, gallery_id, evaluation.id)
    if len(sample) < 2:
        raise too_few_readable("/label")
    if drawn is not None:
        return with_queries(sample, embed_sides(*contents, drawn, old, new, ()))
    return replace(sample, unlabelled=len(entries) - len(used))


def _draw_relevant(
    connection: Connection,
    registry: Registry,
    gallery_id: int,
    pair: tuple[LoadedVersion, LoadedVersion],
    entries: Sequence[Entry],
    request: GateIn,
) -> DrawnSides:
    """The sides for entries that name relevant items: those items first, then others."""
    check_no_label(request.label)
    first = list(live_keys(connection, gallery_id, entries).values())
    with_side = moves_with_side(registry, *pair)
    options = DrawOptions(None, None, 0, request.seed, with_side=with_side, outside_queries=len(entries), first=first)
    return draw_sides(connection, gallery_id, *pair, options)


def _uses_own_ranking(request: GateIn) -> bool:
    """Whether the new version's own ranking is the ground truth, and has to be over the same items."""
    return (request.metric or default_metric(request.label is not None)) == RECALL


def _check_effects(request: GateIn, *, labelled: bool) -> None:
    """Refuse an option that this gate does not use, unless it has its default, which a client may always send."""
    metric, default = request.metric or default_metric(labelled), GateIn.model_fields
    for name, used_by in (("far", TAR), ("k", RECALL)):
        if metric != used_by and getattr(request, name) != default[name].default:
            why = f"{name} is only legal with metric {used_by}, and this gate measures {metric}"
            raise InvalidArgument(why, pointer=f"/{name}")
    if request.evaluation is not None and request.sample != default["sample"].default:
        why = "sample is only legal without evaluation, every entry of which is a query"
        raise InvalidArgument(why, pointer="/sample")


def _check_slice(request: GateIn, entries: Sequence[Entry]) -> None:
    if request.slice is not None and all(entry.slice is None for entry in entries):
        raise InvalidArgument(f"slice: no entry has the metadata field {request.slice!r}", pointer="/slice")
