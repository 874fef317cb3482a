"""Fitting an edge on stored items: draw the pairs, fit on most of them, measure what is served on the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from sqlalchemy import Connection

from index.errors import InvalidArgument, RegraftError
from index.evaluation.adapters import few_pairs
from index.evaluation.fitting import (
    FITS,
    fit_adapter,
    fit_calibration_maps,
    intervals,
    legal_options,
    measure,
    split_pairs,
)
from index.transform import load_transform
from index.version import EDGE, Edge, EdgeKind
from service.registry.edge_records import EdgeOrigin, EdgeRecord
from service.registry.incoming import incoming_folder
from service.registry.paired_embeddings import PairedEmbeddings, draw_held
from service.registry.registry import LoadedVersion, Registry
from service.replica.replica import Replica
from service.schemas import Body, FieldPath, Name, Seed
from service.store.audit import ChangeContext
from service.store.database import Database
from service.store.repository import gallery_named
from service.upgrades.edges.changes import accept, check_free

MIN_PAIRS = 20
"""Below so many a fit means nothing; from here to `index.evaluation.adapters.FEW_PAIRS` it comes with a warning."""

MOST_COMPARED = 10_000
"""Choosing slerp's weight compares each item with each, once for each weight."""


class TooFewPairs(RegraftError):
    """Too few items hold embeddings by both versions."""

    status = 422
    code = "too_few_pairs"


class FitIn(Body):
    """An edge to be fitted; without `gallery` on the items of all, measured by the metadata field `label` if given."""

    new: Name
    old: Name
    kind: Literal["procrustes", "ridge", "low_rank", "slerp"]
    gallery: Name | None = None
    options: dict[str, float] = Field(default_factory=dict)
    # A fifth is held out: of 5,000 the 4,000 are left that Drift-Adapter finds enough.
    sample: Annotated[int, Field(ge=MIN_PAIRS, le=100_000)] = 5_000
    label: FieldPath | None = None
    seed: Seed = 0
    replace: bool = False


def fit(database: Database, registry: Registry, replica: Replica, asked: FitIn, context: ChangeContext) -> EdgeRecord:
    """Fit an edge, measure it as it will be served, and accept it unless it is a dry run.

    Raises:
        UnknownVersion, UnknownGallery: there is no such version or gallery.
        EdgeExists: there is one of this kind, and it is not to be replaced.
        TooFewPairs: says how many there are, and how to get more.
        InvalidArgument: an option or the kind cannot be used.
    """
    registry.sync()
    new, old = (registry.named(name) for name in (asked.new, asked.old))
    if new is old:
        raise InvalidArgument("new and old must be two versions", pointer="/old")
    if asked.kind == "slerp" and asked.sample > MOST_COMPARED:
        raise InvalidArgument(f"kind slerp takes a sample of at most {MOST_COMPARED}", pointer="/sample")
    kind = EdgeKind.SLERP if asked.kind == "slerp" else EdgeKind.MATRIX
    check_free(registry, (new.name, old.name, kind.value), asked.replace)
    options = _options(asked)
    with database.read() as connection:
        held, there = _draw(connection, new, old, asked)
    pairs = split_pairs(held.new, held.old, held.labels, asked.seed)
    if not pairs.matching.valid.any():
        raise InvalidArgument(
            f"no two of the {len(held.names)} items share a value of metadata field {asked.label!r}", pointer="/label"
        )
    try:
        adapter = fit_adapter(asked.kind, pairs, new.card, old.card, options)
    except InvalidArgument as error:
        below = "/options" if error.pointer.lstrip("/") in legal_options(FITS[asked.kind]) else ""
        raise InvalidArgument(error.message, pointer=below + error.pointer) from error
    with incoming_folder(registry.edges_folder) as folder:
        adapter.save(folder)
        edge = Edge(new.name, old.name, kind, old_encoder=old.card.encoder, folder=folder, support=len(pairs.new_SM))
        queries = load_transform(edge, new.card, old.card)(pairs.new_QM, pairs.old_QN)
        measured = measure(queries, pairs, old.card)
        edge = replace(
            edge,
            scores=intervals(measured),
            calibration=fit_calibration_maps(edge.kind, queries, pairs, new.card, old.card) if pairs.labelled else None,
        )
        write(edge, folder)
        made = {
            "fit": asked.kind,
            "options": options,
            "gallery": asked.gallery,
            "label": asked.label,
            "seed": asked.seed,
            "held": there,
            "fitted": edge.support,
            "queries": int(measured.valid.sum()),
            "old_old": {name: vars(s) for name, s in intervals(measure(pairs.old_QN, pairs, old.card)).items()}
            if pairs.labelled
            else None,
            "warning": few_pairs(edge.support),
        }
        return accept(
            database, registry, replica, EdgeRecord(edge, EdgeOrigin.FITTED, made), context, replacing=asked.replace
        )


def write(edge: Edge, folder: Path) -> None:
    """Write edge.json beside the edge's other files, so that the folder can travel like any edge."""
    (folder / EDGE).write_text(json.dumps(edge.as_json(), indent=2) + "\n")


def _draw(connection: Connection, new: LoadedVersion, old: LoadedVersion, asked: FitIn) -> tuple[PairedEmbeddings, int]:
    gallery_id = None if asked.gallery is None else gallery_named(connection, asked.gallery).id
    held, there = draw_held(
        connection, new, old, gallery_id=gallery_id, label=asked.label, sample=asked.sample, seed=asked.seed
    )
    if len(held.names) < MIN_PAIRS:
        where = "stored items" if asked.gallery is None else f"items of gallery {asked.gallery!r}"
        labelled = "" if asked.label is None else f", {len(held.names)} of them with metadata field {asked.label!r}"
        raise TooFewPairs(
            f"{there} {where} hold embeddings by both {new.name!r} and {old.name!r}{labelled}; a fit needs "
            f"{MIN_PAIRS}. {_how_to_get_more(new, old)}",
            pointer="/label" if there >= MIN_PAIRS else "/gallery",
        )
    return held, there


def _how_to_get_more(new: LoadedVersion, old: LoadedVersion) -> str:
    beside = f"Send embeddings by {new.name!r} of items that hold one by {old.name!r}, or the other way round"
    encoding = " or ".join(repr(version.name) for version in (new, old) if version.card.encoder)
    if not encoding:
        return beside
    return f"{beside}. Where items have images, a reencode backfill to {encoding} makes them once that is current"


def _options(asked: FitIn) -> Mapping[str, int | float]:
    """The options, each of the type of its default."""
    legal: dict[str, Any] = legal_options(FITS[asked.kind])
    options: dict[str, int | float] = {}
    for name, value in asked.options.items():
        default = legal.get(name)
        if default is None:
            known = ", ".join(f"{key}={value}" for key, value in legal.items()) or "none"
            raise InvalidArgument(
                f"kind {asked.kind} has no option {name!r}; legal: {known}", pointer=f"/options/{name}"
            )
        if isinstance(default, int) and value != int(value):
            raise InvalidArgument(f"option {name} must be a whole number, not {value:g}", pointer=f"/options/{name}")
        options[name] = type(default)(value)
    return options
