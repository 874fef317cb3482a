"""More like this: stored items as queries, by the embeddings they hold or, where they hold none, by what they are."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from index.encoder import BATCH
from index.query_plan import Encode
from index.space import Vectors
from service.errors import NoImage, UnknownItem
from service.registry.embedding import pointing
from service.registry.placement import places_of
from service.registry.stored_contents import embed, make_input
from service.replica.feed import usable
from service.replica.loaded import LoadedGallery
from service.runtime import Runtime
from service.store.blob_keys import is_text
from service.store.embeddings import held_by
from service.store.vector_codec import DamagedEmbedding, from_bytes

Similar = tuple[Sequence[str], str, Encode, frozenset[str], Sequence[int], Mapping[int, int]]
"""The fields of a `service.http.search_request.QueryBatch`."""


@dataclass(frozen=True)
class QueryItem:
    """An item that is a query: where it stands, key, last feed number, its content, version, what it holds."""

    pointer: str
    key: int
    seq: int
    blob: str | None
    active: str
    held: Mapping[str, Vectors]


def embed_items(service: Runtime, live: LoadedGallery, ids: Sequence[str]) -> Iterator[Similar]:
    """Items as queries that do not find themselves, put together where the same versions can embed them.

    An item asks as the current version if it holds an embedding of that or has an image, else as its active version,
    whose edges then decide what it reaches.

    Raises:
        UnknownItem: names the first id that the gallery does not hold.
    """
    groups: defaultdict[tuple[str, frozenset[str]], list[QueryItem]] = defaultdict(list)
    for stored in _read(service, live, ids):
        able = frozenset(stored.held) | _able(service, stored.blob)
        asking = live.current.name if live.current and live.current.name in able else stored.active
        groups[asking, able].append(stored)
    for (asking, able), members in groups.items():
        encode = functools.cache(functools.partial(_encode, service, members))
        written = {member.key: member.seq for member in members}
        yield [m.pointer for m in members], asking, encode, able, [m.key for m in members], written


def _able(service: Runtime, blob: str | None) -> frozenset[str]:
    """The versions that can embed an image or a text."""
    if blob is None:
        return frozenset()
    return service.registry.text_encoders() if is_text(blob) else service.registry.encoders()


def _read(service: Runtime, live: LoadedGallery, ids: Sequence[str]) -> Iterator[QueryItem]:
    with service.database.read() as connection:
        found = held_by(connection, live.id, ids)
    places = places_of(service.registry, live.current)
    for number, external_id in enumerate(ids):
        rows = found.get(external_id)
        if not rows:
            raise UnknownItem(f"the gallery holds no item {external_id!r}", pointer=f"/items/{number}")
        versions = [service.registry.by_id(row.version_id) for row in rows]
        held = {
            version.name: from_bytes([row.vector], version.card.dim)[0]
            for version, row in zip(versions, rows, strict=True)
            if usable([row.id], [row.vector], version.card.dim)[0]
        }
        first = rows[0]
        if not held and first.blob is None:
            why = f"what item {external_id!r} holds is damaged: `regraft doctor` names it"
            raise DamagedEmbedding(why, pointer=f"/items/{number}")
        serving = [version.id for version in versions if version.name in held] or [version.id for version in versions]
        active = service.registry.by_id(places.best(serving)).name
        yield QueryItem(f"/items/{number}", first.id, first.seq, first.blob, active, held)


def _encode(service: Runtime, members: Sequence[QueryItem], version: str) -> Vectors:
    """What each member holds of a version, or else what the version makes of its image or text."""
    missing = [member for member in members if version not in member.held]
    made: dict[str, Vectors] = {}
    for start in range(0, len(missing), BATCH):
        block = missing[start : start + BATCH]
        asking = service.registry.named(version)
        inputs = []
        for member in block:
            with pointing(member.pointer):
                inputs.append(make_input(asking, member.blob or "", _content(service, member), service.decoder))
        vectors = embed(asking, inputs).vectors
        made.update(zip((member.pointer for member in block), vectors, strict=True))
    return np.stack([made[m.pointer] if m.pointer in made else m.held[version] for m in members])


def _content(service: Runtime, member: QueryItem) -> bytes:
    assert member.blob is not None
    content = service.blobs.fetch(member.blob)
    if content is None:
        kind = "text" if is_text(member.blob) else "image"
        raise NoImage(f"the {kind} of this item is gone, and it holds no embedding of the version that asks")
    return content
