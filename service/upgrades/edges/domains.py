"""How far queries are from the pairs that an edge was fitted on: `index.evaluation.domain`, asked of a stored edge."""

from __future__ import annotations

from typing import Annotated, Any

from numpy.typing import NDArray
from pydantic import Field
from sqlalchemy import Connection, and_, false, select

from index.errors import InvalidArgument, RegraftError
from index.evaluation.domain import DomainCoverage, check_domain, read_domain
from index.space import Vectors, check_vectors
from index.version import EDGE_DOMAIN
from service.registry.paired_embeddings import OWN
from service.registry.registry import LoadedVersion, Registry
from service.schemas import Body, KindName, Name, Seed
from service.store.database import Database
from service.store.drawing import Drawing
from service.store.embeddings import says_itself
from service.store.partitioned import in_gallery
from service.store.repository import gallery_named
from service.store.sql_arrays import blocks
from service.store.tables import embedding, item
from service.store.vector_codec import from_bytes, is_whole
from service.store.vector_reader import read_vectors
from service.upgrades.edges.changes import find


class NoDomain(RegraftError):
    """Nothing is kept of what this edge was fitted on."""

    status = 409
    code = "no_domain"


class DomainIn(Body):
    """An edge, and the gallery whose items stand for queries where none are sent."""

    new: Name
    old: Name
    kind: KindName
    gallery: Name | None = None
    sample: Annotated[int, Field(ge=1, le=100_000)] = 1000
    seed: Seed = 0


def check(database: Database, registry: Registry, asked: DomainIn, given: NDArray[Any] | None = None) -> DomainCoverage:
    """Compare queries by the edge's new version with the pairs it was fitted on.

    `given`: queries (Q, M); without them those of the gallery's items that hold embeddings which the version itself
    made.

    Raises:
        UnknownVersion, UnknownEdge, UnknownGallery: there is no such version, edge or gallery.
        NoDomain: the edge was not fitted, or elsewhere.
        InvalidArgument: there is nothing to compare.
        InvalidVector: a query is none of the version's; names the row.
    """
    registry.sync_edges()
    new = registry.named(asked.new)
    registry.named(asked.old)
    declared = find(registry, (asked.new, asked.old, asked.kind))
    declared.check()
    folder, expected = declared.edge.folder, declared.edge.hashes.get(EDGE_DOMAIN)
    if folder is None or expected is None:
        raise NoDomain(
            f"the {asked.kind} edge {asked.new} -> {asked.old} says nothing of what it was fitted on: only edges that "
            "were fitted at the service do",
            pointer="/kind",
        )
    queries = _queries(database, new, asked) if given is None else _checked(given, new)
    with registry.opening(declared.edge):
        domain = read_domain(folder, new.card.dim, expected)
    return check_domain(domain, queries, new.space)


def _checked(given: NDArray[Any], new: LoadedVersion) -> Vectors:
    if not len(given):
        raise InvalidArgument("there is no query to check", pointer="/vectors")
    return check_vectors(given, new.card.dim, new.space, pointer="/vectors")


def _queries(database: Database, new: LoadedVersion, asked: DomainIn) -> Vectors:
    if asked.gallery is None:
        raise InvalidArgument("send vectors, or name a gallery whose items stand for queries", pointer="/gallery")
    with database.read() as connection:
        rows = _drawn(connection, gallery_named(connection, asked.gallery).id, new, asked)
    if not rows:
        why = f"no item of gallery {asked.gallery!r} holds an embedding that {new.name!r} made"
        raise InvalidArgument(why, pointer="/gallery")
    return from_bytes(rows, new.card.dim)


def _drawn(connection: Connection, gallery_id: int, new: LoadedVersion, asked: DomainIn) -> list[bytes]:
    mine = (embedding.c.version_id == new.id, embedding.c.origin.in_(OWN), in_gallery(embedding, gallery_id))
    able = and_(item.c.gallery_id == gallery_id, item.c.deleted == false(), says_itself(new.id))
    rows: list[bytes] = []
    for block in blocks(Drawing(connection, able, asked.seed).first(asked.sample)):
        found = connection.execute(select(embedding.c.vector).where(embedding.c.item_id.in_(block), *mine)).scalars()
        rows += [row for row in read_vectors(connection, found.all()) if is_whole(row, new.card.dim)]
    return rows
