"""Store a batch of items: new ones are added; existing ones get another embedding, are replaced or refused (`store`).

An embedding is added to an item's others. An image or a text replaces them, as they were computed from the old one. In
both cases the item must then hold an embedding that queries of the current version reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import Connection, case, delete, select

from index.errors import NoRoute, RegraftError
from index.metadata.metadata import Item
from index.space import Vectors
from index.version import Origin
from service.errors import ItemExists, UnknownItem
from service.registry.loaded_version import LoadedVersion
from service.registry.placement import placement_of
from service.registry.registry import Registry
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.items import NewItem, group_alike, items_named, rows_of, set_metadata, stacked, store_items
from service.store.rows import ItemRow
from service.store.sql.arrays import key_table
from service.store.sql.partitioned import in_gallery
from service.store.tables import embedding
from service.store.vectors.codec import is_same_vector


class UpdateMode(StrEnum):
    """How a batch treats existing and new items, see `store`."""

    UPSERT = "upsert"
    REPLACE = "replace"
    INSERT_ONLY = "insert_only"
    UPDATE_ONLY = "update_only"


@dataclass(frozen=True)
class ExistingItem:
    """An existing live item: its row, and version id -> origin and vector (None: not read) of its embeddings."""

    row: ItemRow
    held: Mapping[int, tuple[str, bytes | None]]


class AddedItems(NamedTuple):
    """A batch of only new items, with embeddings of one version and origin, and with consecutive feed numbers.

    Attributes:
        place: the version and the origin of their embeddings.
        vectors: their embeddings (N, D).
        items: key -> item (N,), in the order of their feed numbers.
        seqs: the first and the last feed number.
        current: the version that was current when they were stored.
    """

    place: tuple[str, str]
    vectors: Vectors
    items: dict[int, Item]
    seqs: tuple[int, int]
    current: LoadedVersion


@dataclass
class StoredItems:
    """The outcome of a batch: items by outcome, errors by the id of refused items, and blobs that no row refers to.

    `added`: the batch, if all its items are new, of one origin, and all or none have side-information.
    """

    new: list[NewItem] = field(default_factory=list)
    updated: list[NewItem] = field(default_factory=list)
    replaced: list[NewItem] = field(default_factory=list)
    refused: dict[str, RegraftError] = field(default_factory=dict)
    orphans: list[str] = field(default_factory=list)
    added: AddedItems | None = None

    @property
    def count(self) -> int:
        """How many items were stored."""
        return len(self.new) + len(self.updated) + len(self.replaced)


def store(
    connection: Connection,
    registry: Registry,
    gallery_id: int,
    current: LoadedVersion,
    version: LoadedVersion,
    items: Sequence[NewItem],
    first_seq: int,
    *,
    mode: UpdateMode,
) -> StoredItems:
    """Write items of different ids, each with an embedding by `version`.

    The caller holds the lock of the gallery, whose current version is `current`; `first_seq` is from `take_seq` for
    len(items). Modes: `replace`: nothing of an existing item stays; `insert_only`: existing items are refused;
    `update_only`: items that do not exist are refused.
    """
    rows = {row.external_id: row for row in rows_of(connection, gallery_id, [i.external_id for i in items])}
    existing = existing_items(connection, gallery_id, rows.values(), version.id)
    if existing or version is not current:
        registry.sync_edges()  # no edge is removed until the commit: that takes the lock of every gallery
    for version_id in {held for known in existing.values() for held in known.held}:
        registry.by_id(version_id)  # loads versions that another process has registered
    stored = _sorted(items, existing, placement_of(registry, current).reached, current, version, mode)
    complete = [*stored.new, *stored.replaced]
    stored.orphans = store_items(connection, gallery_id, version.id, complete, first_seq, rows)
    stored.orphans += [new.blob for new in items if new.external_id in stored.refused and new.blob is not None]
    updated = [(existing[new.external_id], new) for new in stored.updated]
    _put_beside(connection, gallery_id, version.id, updated, first_seq + len(complete))
    if not rows and len(stored.new) == len(items):
        stored.added = _added(connection, gallery_id, current, version, items, first_seq)
    return stored


def _sorted(
    items: Sequence[NewItem],
    existing: Mapping[str, ExistingItem],
    reached: AbstractSet[int],
    current: LoadedVersion,
    version: LoadedVersion,
    mode: UpdateMode,
) -> StoredItems:
    """The items by what becomes of them; `reached`: the ids of versions that queries of the current one reach."""
    stored, is_reached = StoredItems(), version.id in reached
    for new in items:
        known = existing.get(new.external_id)
        if known is not None and mode is UpdateMode.INSERT_ONLY:
            stored.refused[new.external_id] = ItemExists(pointer="/id")
        elif known is None and mode is UpdateMode.UPDATE_ONLY:
            stored.refused[new.external_id] = UnknownItem("the gallery has no item of this id", pointer="/id")
        elif not is_reached if known is None else reached.isdisjoint(_versions_after(known, new, version.id, mode)):
            stored.refused[new.external_id] = _unreachable(current, version)
        elif known is None:
            stored.new.append(new)
        elif _replaces_all(new, mode):
            metadata = new.metadata if mode is UpdateMode.REPLACE or new.metadata is not None else known.row.metadata
            stored.replaced.append(new._replace(metadata=metadata))
        else:
            stored.updated.append(new)
    return stored


def _added(
    connection: Connection,
    gallery_id: int,
    current: LoadedVersion,
    version: LoadedVersion,
    new: Sequence[NewItem],
    first_seq: int,
) -> AddedItems | None:
    if len(group_alike(new)) > 1:
        return None
    items = items_named(connection, gallery_id, first_seq, [one.external_id for one in new])
    seqs = (first_seq, first_seq + len(new) - 1)
    return AddedItems((version.name, new[0].origin), stacked([one.vector for one in new]), items, seqs, current)


def existing_items(
    connection: Connection, gallery_id: int, known: Iterable[ItemRow], version_id: int
) -> dict[str, ExistingItem]:
    """The live items among `known`, by id, with their vectors by one version."""
    rows = {row.id: row for row in known if not row.deleted}
    if not rows:
        return {}
    vector = case((embedding.c.version_id == version_id, embedding.c.vector))
    conditions = (in_gallery(embedding, gallery_id), embedding.c.item_id.in_(key_table(connection, list(rows)).keys))
    held: dict[int, dict[int, tuple[str, bytes | None]]] = {key: {} for key in rows}
    columns = (embedding.c.item_id, embedding.c.version_id, embedding.c.origin, vector)
    for key, held_id, origin, stored in connection.execute(select(*columns).where(*conditions)):
        held[key][held_id] = origin, stored
    return {row.external_id: ExistingItem(row, held[key]) for key, row in rows.items()}


def _replaces_all(new: NewItem, mode: UpdateMode) -> bool:
    """Whether none of the item's embeddings stays."""
    return mode is UpdateMode.REPLACE or new.blob is not None


def _versions_after(known: ExistingItem, new: NewItem, version_id: int, mode: UpdateMode) -> set[int]:
    """The versions of which the item will hold embeddings after this batch."""
    if _replaces_all(new, mode):
        return {version_id}
    if version_id not in known.held or _is_same(known, new, version_id):
        return {version_id, *known.held}
    # Transformed embeddings were computed from the replaced one: they are stale.
    return {version_id, *(key for key, (origin, _) in known.held.items() if origin != Origin.TRANSFORMED)}


def _is_same(known: ExistingItem, new: NewItem, version_id: int) -> bool:
    """Whether the item already holds this vector by the version, with an origin of the same kind."""
    origin, vector = known.held.get(version_id, ("", None))
    made_alike = (origin == Origin.TRANSFORMED) == (new.origin == Origin.TRANSFORMED)
    return made_alike and vector is not None and is_same_vector(vector, new.vector)


def _put_beside(
    connection: Connection,
    gallery_id: int,
    version_id: int,
    updated: Sequence[tuple[ExistingItem, NewItem]],
    first_seq: int,
) -> None:
    """Add embeddings, all of one origin, to existing items, replacing those by the same version; set their metadata."""
    if not updated:
        return
    changed = [(known, new) for known, new in updated if not _is_same(known, new, version_id)]
    replaced = key_table(connection, [known.row.id for known, _ in changed if version_id in known.held]).keys
    stale = (
        in_gallery(embedding, gallery_id),
        embedding.c.item_id.in_(replaced),
        embedding.c.origin == Origin.TRANSFORMED.value,
    )
    connection.execute(delete(embedding).where(*stale))
    if changed:
        keys, vectors = [known.row.id for known, _ in changed], stacked([new.vector for _, new in changed])
        put_embeddings(connection, gallery_id, version_id, changed[0][1].origin, keys, vectors)
    metadata = ((known.row, known.row.metadata if new.metadata is None else new.metadata) for known, new in updated)
    set_metadata(connection, metadata, first_seq)


def _unreachable(current: LoadedVersion, version: LoadedVersion) -> NoRoute:
    return NoRoute(
        f"no route leads from queries of the current version {current.name!r} to {version.name!r}, and the item has "
        f"no other reachable embedding: send one by {current.name!r} first, or add an edge",
        pointer="/embedding",
    )
