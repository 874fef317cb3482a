"""Stored items as queries ("more like this"), by the embeddings they hold, else by their image or text."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from index.encoders.encoder import BATCH
from index.errors import shortened
from index.query.query_plan import Encode
from index.space import Vectors
from service.errors import NoImage, UnknownItem
from service.registry.embedding import errors_at
from service.registry.placement import placement_of
from service.registry.stored_contents import embed, make_input
from service.replica.loaded import LoadedGallery
from service.runtime import Runtime
from service.store.galleries.embeddings import embeddings_by_id
from service.store.image_store.keys import is_text
from service.store.vectors.codec import DamagedEmbedding, from_bytes, is_usable

Similar = tuple[Sequence[str], str, Encode, frozenset[str], Sequence[int], Mapping[int, int]]
"""The fields of a `service.http.search.request.QueryBatch`."""


@dataclass(frozen=True)
class QueryItem:
    """An item as a query: its JSON pointer, key, last feed number, blob, active version, and embeddings by version."""

    pointer: str
    key: int
    seq: int
    blob: str | None
    active: str
    embeddings: Mapping[str, Vectors]


def embed_items(service: Runtime, loaded: LoadedGallery, ids: Sequence[str]) -> Iterator[Similar]:
    """Items as queries that do not find themselves, grouped by the versions that can embed them.

    An item is a query by the current version if that has embedded it or can, else by its active version, whose edges
    then decide which items it reaches. If its image or text is lost, it has only its embeddings.

    Raises:
        UnknownItem: the gallery does not hold an item; names the first.
        StoreUnreachable: the image store does not answer; no image counts as lost.
    """
    groups: defaultdict[tuple[str, frozenset[str]], list[QueryItem]] = defaultdict(list)
    for query in _read(service, loaded, ids):
        encoders = frozenset(query.embeddings) | _encoders(service, query.blob)
        version = loaded.current.name if loaded.current and loaded.current.name in encoders else query.active
        needed = {version} | loaded.gallery.needed_encoders(version, encoders)
        if query.embeddings and not needed <= query.embeddings.keys() and _is_lost(service, query.blob):
            encoders = frozenset(query.embeddings)
            version = version if version in encoders else query.active
        groups[version, encoders].append(query)
    for (version, encoders), members in groups.items():
        encode = functools.cache(functools.partial(_encode, service, members))
        written = {member.key: member.seq for member in members}
        yield [m.pointer for m in members], version, encode, encoders, [m.key for m in members], written


def _encoders(service: Runtime, blob: str | None) -> frozenset[str]:
    """The versions that can embed an image or a text."""
    if blob is None:
        return frozenset()
    return service.registry.text_encoders() if is_text(blob) else service.registry.encoders()


def _is_lost(service: Runtime, blob: str | None) -> bool:
    """Whether an image or text is missing. Raises StoreUnreachable."""
    if blob is None or service.blobs.exists(blob):
        return False
    service.blobs.check()
    return True


def _read(service: Runtime, loaded: LoadedGallery, ids: Sequence[str]) -> Iterator[QueryItem]:
    with service.database.read() as connection:
        found = embeddings_by_id(connection, loaded.id, ids)
    held = {row.version_id for rows in found.values() for row in rows}
    placement = placement_of(service.registry, loaded.current, held)
    for number, external_id in enumerate(ids):
        rows = found.get(external_id)
        if not rows:
            raise UnknownItem(f"the gallery has no item {shortened(external_id)!r}", pointer=f"/items/{number}")
        versions = [service.registry.by_id(row.version_id) for row in rows]
        embeddings = {
            version.name: from_bytes([row.vector], version.card.dim)[0]
            for version, row in zip(versions, rows, strict=True)
            if is_usable(row.vector, version.card.dim)
        }
        first = rows[0]
        if not embeddings and first.blob is None:
            why = f"the stored data of item {external_id!r} are damaged: see `regraft doctor`"
            raise DamagedEmbedding(why, pointer=f"/items/{number}")
        serving = [version.id for version in versions if version.name in embeddings] or [
            version.id for version in versions
        ]
        active = service.registry.by_id(placement.best(serving)).name
        yield QueryItem(f"/items/{number}", first.id, first.seq, first.blob, active, embeddings)


def _encode(service: Runtime, members: Sequence[QueryItem], version: str) -> Vectors:
    """Each member's embedding by a version: the one it holds, else computed from its image or text."""
    missing = [member for member in members if version not in member.embeddings]
    computed: dict[str, Vectors] = {}
    for start in range(0, len(missing), BATCH):
        block = missing[start : start + BATCH]
        encoder = service.registry.named(version)
        inputs = []
        for member in block:
            with errors_at(member.pointer):
                inputs.append(make_input(encoder, member.blob or "", _content(service, member), service.decoder))
        vectors = embed(encoder, inputs).vectors
        computed.update(zip((member.pointer for member in block), vectors, strict=True))
    return np.stack([computed[m.pointer] if m.pointer in computed else m.embeddings[version] for m in members])


def _content(service: Runtime, member: QueryItem) -> bytes:
    assert member.blob is not None
    content = service.blobs.fetch(member.blob)
    if content is None:
        kind = "text" if is_text(member.blob) else "image"
        raise NoImage(f"the {kind} of this item is missing, and it has no embedding by the query's version")
    return content
