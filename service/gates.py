"""Gates: measure a version against the current one on the gallery's own labelled images, and keep the report.

Each of the N sampled items is also a query, and left out of its own ranking. Arrays of vectors are (N, dimension).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Path
from PIL.Image import Image
from pydantic import BaseModel, Field
from sqlalchemy import Connection, false, insert, select

from index.encoder import BATCH, Embedded, Encoder
from index.errors import InvalidArgument, InvalidImage, RegraftError
from index.evaluation import Retrieval, retrieval
from index.gate import gate
from index.graph import Route
from index.image import decode_image
from index.space import Vectors, space_from_json
from index.transform import load_transform
from index.version import EdgeKind
from service.catalog import Catalog, Registered
from service.errors import NoCurrentVersion
from service.repository import gallery_named
from service.runtime import Runtime, Service
from service.schemas import Body
from service.tables import gate_report, item

router = APIRouter(tags=["gates"])

READ_BLOCK = 1_000


class UnknownGate(RegraftError):
    """The gallery has no gate report of this number."""

    status = 404
    code = "unknown_gate"


class GateIn(Body):
    """What to measure: items that share a value of the metadata field `label` belong together."""

    version: str
    label: Annotated[str, Field(min_length=1)]
    sample: Annotated[int, Field(ge=2, le=100_000)] = 1000
    metric: Literal["cmc@1", "cmc@5", "mAP@1.0"] = "cmc@1"
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0


class ScoreOut(BaseModel):
    """A metric with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class GateOut(BaseModel):
    """A gate report: M(old/old), M(new/old) by `route`, and M(new/new), of `current` (old) and `version` (new).

    `unreadable` sampled images could not be decoded and are left out of `items`; `queries` of them had an item of
    their label to find.
    """

    id: int
    version: str
    current: str
    verdict: Literal["pass", "warn", "refuse"]
    metric: str
    old_old: ScoreOut
    new_old: ScoreOut
    new_new: ScoreOut | None
    difference: ScoreOut
    negative_flips: int
    gap_closed: float | None
    queries: int
    items: int
    unreadable: int
    route: list[str]
    label: str
    sample: int
    seed: int
    created: float


@dataclass(frozen=True)
class Labelled:
    """A sampled item: where its image lies, and its label."""

    blob: str
    label: str


@dataclass(frozen=True)
class Sample:
    """N images embedded by both versions, and their labels."""

    old: Embedded
    new: Embedded
    labels: Sequence[str]


@router.post("/galleries/{name}/gates", status_code=201)
def create(name: str, body: GateIn, service: Service) -> GateOut:
    """Compare a version with the current one on a sample of the gallery's labelled images."""
    service.catalog.sync()
    new = service.catalog.named(body.version)
    with service.database.read() as connection:
        gallery = gallery_named(connection, name)
        if gallery.current_id is None:
            raise NoCurrentVersion(f"gallery {name!r} has no current version to compare with: deploy without a gate")
        drawn = draw(connection, gallery.id, body.label, body.sample, body.seed)
    old = service.catalog.by_id(gallery.current_id)
    report = measure(service, old, new, drawn, body)
    with service.database.write() as connection:
        gallery_id = gallery_named(connection, name).id
        row = {"gallery_id": gallery_id, "version_id": new.id, "verdict": report["verdict"], "created": time.time()}
        stored = connection.execute(insert(gate_report).values(**row, report=report).returning(gate_report)).one()
    return GateOut(id=stored.id, created=stored.created, **stored.report)


@router.get("/galleries/{name}/gates/{number}")
def show(name: str, number: Annotated[int, Path(ge=1, lt=1 << 63)], service: Service) -> GateOut:
    """A gate report."""
    with service.database.read() as connection:
        mine = (gate_report.c.id == number, gate_report.c.gallery_id == gallery_named(connection, name).id)
        row = connection.execute(select(gate_report).where(*mine)).first()
    if row is None:
        raise UnknownGate(f"gallery {name!r} has no gate report {number}")
    return GateOut(id=row.id, created=row.created, **row.report)


def draw(connection: Connection, gallery_id: int, label: str, sample: int, seed: int) -> list[Labelled]:
    """Up to `sample` live items that hold an image and the metadata field `label`, in an order drawn by `seed`.

    Raises:
        InvalidArgument: there are fewer than two.
    """
    has_image = (item.c.gallery_id == gallery_id, item.c.deleted == false(), item.c.blob.is_not(None))
    ids = np.fromiter(connection.execute(select(item.c.id).where(*has_image).order_by(item.c.id)).scalars(), np.int64)
    drawn: list[Labelled] = []
    for block in _blocks(np.random.default_rng(seed).permutation(ids).tolist(), READ_BLOCK):
        rows = connection.execute(select(item.c.id, item.c.blob, item.c.metadata).where(item.c.id.in_(block)))
        found = {row.id: row for row in rows if row.metadata.get(label) is not None}
        drawn += [Labelled(found[i].blob, _label(found[i].metadata[label])) for i in block if i in found]
        if len(drawn) >= sample:
            break
    if len(drawn) < 2:
        raise InvalidArgument(
            f"a gate needs two items with an image and metadata field {label!r}; the gallery has {len(drawn)}",
            pointer="/label",
        )
    return drawn[:sample]


def measure(
    service: Runtime, old: Registered, new: Registered, drawn: Sequence[Labelled], asked: GateIn
) -> dict[str, Any]:
    """The report of a gate, as it is stored.

    Raises:
        InvalidArgument: no two of the drawn items that can be read share a label.
        NoEncoder: one of the versions takes embeddings only.
    """
    sample = embed(service, drawn, old.encoder(), new.encoder())
    kinds, old_old, new_old, new_new = compare(service.catalog, old, new, sample)
    if not old_old.valid.any():
        raise InvalidArgument(
            f"no two readable images share a value of metadata field {asked.label!r}", pointer="/label"
        )
    return {
        **asked.model_dump(),
        **gate(old_old, new_old, new_new, asked.metric, seed=asked.seed).as_json(),
        "current": old.name,
        "route": list(kinds),
        "items": len(sample.labels),
        "unreadable": len(drawn) - len(sample.labels),
    }


def embed(service: Runtime, drawn: Sequence[Labelled], old: Encoder, new: Encoder) -> Sample:
    """Encode the sampled images by both versions; those that cannot be read are left out."""
    labels: list[str] = []
    parts: tuple[list[Embedded], list[Embedded]] = ([], [])
    for block in _blocks(drawn, BATCH):
        readable = [(image, d.label) for d in block if (image := _read(service, d.blob)) is not None]
        labels += [label for _, label in readable]
        for encoder, embedded in zip((old, new), parts, strict=True):
            embedded.append(encoder.encode([image for image, _ in readable]))
    return Sample(_joined(parts[0]), _joined(parts[1]), labels)


def compare(
    catalog: Catalog, old: Registered, new: Registered, sample: Sample
) -> tuple[tuple[str, ...], Retrieval, Retrieval, Retrieval]:
    """Leave-one-out rankings of the sample: the kinds of edges new/old went by, old/old, new/old and new/new."""
    queries, items = sample.new.vectors, sample.old.vectors
    old_old = _rank(items, items, sample.labels, old)
    new_new = _rank(queries, queries, sample.labels, new)
    # A slerp edge to a third version would ask an encoder that has not seen the sample: the next best route counts.
    route = catalog.graph().route(new.name, old.name, frozenset({new.name, old.name}))
    if route is not None and not route.dual:
        reached = _rank(_transformed(catalog, route, queries, items), items, sample.labels, old)
        return route.kinds, old_old, reached, new_new
    if forward := catalog.graph().forward(old.name, new.name):
        moved = load_transform(forward, new.card, old.card)(items, sample.old.side)
        return (forward.kind.value,), old_old, _rank(queries, moved, sample.labels, new), new_new
    # By `dual` the old encoder embeds the query: the same ranking, never worse and never better.
    return (EdgeKind.DUAL.value,), old_old, old_old, new_new


def _transformed(catalog: Catalog, route: Route, queries: Vectors, old_queries: Vectors) -> Vectors:
    for edge in route.edges:
        transform = load_transform(edge, catalog.named(edge.new).card, catalog.named(edge.old).card)
        queries = transform(queries, old_queries)
    return queries


def _rank(queries: Vectors, items: Vectors, labels: Sequence[str], version: Registered) -> Retrieval:
    space = space_from_json(dict(version.card.space))
    return retrieval(queries, labels, items, labels, space, remove_self=np.arange(len(labels)))


def _read(service: Runtime, blob: str) -> Image | None:
    try:
        return decode_image(service.blobs.read(blob), max_pixels=service.settings.max_image_pixels)
    except (FileNotFoundError, InvalidImage):
        return None


def _joined(parts: Sequence[Embedded]) -> Embedded:
    side = [p.side for p in parts if p.side is not None]
    return Embedded(np.concatenate([p.vectors for p in parts]), np.concatenate(side) if side else None)


def _label(value: Any) -> str:
    """Any JSON value as something that sorts: 1 and "1" stay different."""
    return json.dumps(value, sort_keys=True)


def _blocks(values: Sequence[Any], size: int) -> Iterator[Any]:
    return (values[start : start + size] for start in range(0, len(values), size))
