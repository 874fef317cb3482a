"""Measure how far queries are from the pairs that a stored edge was fitted on; see `check`."""

from __future__ import annotations

from typing import Annotated, Any

from numpy.typing import NDArray
from pydantic import Field
from sqlalchemy import Connection, and_, false, select

from index.errors import InvalidArgument, RegraftError
from index.evaluation.domain import DomainCoverage, check_domain, read_domain
from index.space import Vectors, check_vectors
from index.version import EDGE_DOMAIN
from service.registry.loaded_version import LoadedVersion
from service.registry.paired_embeddings import OWN
from service.registry.registry import Registry
from service.schemas import Body, KindName, Name, Seed
from service.store.database.connections import Database
from service.store.galleries.embeddings import has_own_embedding
from service.store.galleries.gallery import gallery_named
from service.store.galleries.random_items import RandomItems
from service.store.sql.arrays import blocks
from service.store.sql.partitioned import in_gallery
from service.store.tables import embedding, item
from service.store.vectors.codec import from_bytes, is_usable
from service.store.vectors.reader import read_vectors
from service.upgrades.edges.changes import find


class NoDomain(RegraftError):
    """The edge does not describe what it was fitted on."""

    status = 409
    code = "no_domain"


class DomainIn(Body):
    """An edge, and the gallery whose items serve as queries if none are sent."""

    new: Name
    old: Name
    kind: KindName
    gallery: Name | None = None
    sample: Annotated[int, Field(ge=1, le=100_000)] = 1000
    seed: Seed = 0


def check(
    database: Database, registry: Registry, request: DomainIn, sent: NDArray[Any] | None = None
) -> DomainCoverage:
    """Compare queries by the edge's new version with the pairs it was fitted on.

    `sent`: queries (Q, M); None: embeddings of the gallery's items that the version itself made.

    Raises:
        UnknownVersion, UnknownEdge, UnknownGallery: there is no such version, edge or gallery.
        NoDomain: the edge was not fitted, or not by this service.
        InvalidArgument: there are no queries.
        InvalidVector: a query is not valid for the version; names the row.
    """
    registry.sync_edges()
    new = registry.named(request.new)
    registry.named(request.old)
    edge_record = find(registry, (request.new, request.old, request.kind))
    edge_record.check()
    folder, expected = edge_record.edge.folder, edge_record.edge.hashes.get(EDGE_DOMAIN)
    if folder is None or expected is None:
        raise NoDomain(
            f"the {request.kind} edge {request.new} -> {request.old} does not describe what it was fitted on; only "
            "edges that were fitted at the service do",
            pointer="/kind",
        )
    queries = _queries(database, new, request) if sent is None else _checked(sent, new)
    with registry.opening(edge_record.edge):
        domain = read_domain(folder, new.card.dim, expected)
    return check_domain(domain, queries, new.space)


def _checked(sent: NDArray[Any], new: LoadedVersion) -> Vectors:
    if not len(sent):
        raise InvalidArgument("vectors must have at least one query", pointer="/vectors")
    return check_vectors(sent, new.card.dim, new.space, pointer="/vectors")


def _queries(database: Database, new: LoadedVersion, request: DomainIn) -> Vectors:
    if request.gallery is None:
        raise InvalidArgument("either vectors or gallery is required", pointer="/gallery")
    with database.read() as connection:
        rows = _drawn(connection, gallery_named(connection, request.gallery).id, new, request)
    if not rows:
        why = f"no item of gallery {request.gallery!r} has an embedding by {new.name!r}"
        raise InvalidArgument(why, pointer="/gallery")
    return from_bytes(rows, new.card.dim)


def _drawn(connection: Connection, gallery_id: int, new: LoadedVersion, request: DomainIn) -> list[bytes]:
    conditions = (embedding.c.version_id == new.id, embedding.c.origin.in_(OWN), in_gallery(embedding, gallery_id))
    eligible = and_(item.c.gallery_id == gallery_id, item.c.deleted == false(), has_own_embedding(new.id))
    rows: list[bytes] = []
    for block in blocks(RandomItems(connection, eligible, request.seed).first(request.sample)):
        vectors = connection.execute(
            select(embedding.c.vector).where(embedding.c.item_id.in_(block), *conditions)
        ).scalars()
        rows += [row for row in read_vectors(connection, vectors.all()) if is_usable(row, new.card.dim)]
    return rows
