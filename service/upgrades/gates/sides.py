"""Draw the two sides of a gate on a gallery's own items: queries, and the whole gallery if that is affordable.

`embedded_sides` then computes the embeddings that are not stored: of queries by the new version, and of items that hold
no embedding by the old one. Affordable means that at most MAX_PAIRS pairs of a query and an item are compared, and each
version has to embed at most MAX_EMBEDDED items. Beyond that the gallery side is a sample, too: the first items in an
order drawn by the seed, at least as many as queries are requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from sqlalchemy import Connection, and_, false, select

from index.errors import InvalidArgument, NoEncoder, RegraftError
from index.space import Vectors
from index.version import Origin
from service.registry.loaded_version import LoadedVersion
from service.registry.stored_contents import embeds
from service.store.galleries.random_items import RandomItems
from service.store.image_store.keys import is_text
from service.store.sql.arrays import blocks
from service.store.sql.partitioned import in_gallery
from service.store.tables import embedding, item
from service.store.vectors.codec import from_bytes, is_usable
from service.store.vectors.reader import read_vectors
from service.upgrades.gates.samples import READ_BLOCK, Entry, field_text, too_few_items

MAX_PAIRS = 100_000_000
"""Pairs of a query and an item that are compared: 1,000 queries against 100,000 items."""

MAX_EMBEDDED = 4_000
"""Most items of the gallery side that each version embeds because their embeddings are not stored."""

EmbeddedRow = tuple[Vectors, Vectors | None]
"""An embedding (D,) and its side-information (S,)."""


@dataclass
class DrawnSides:
    """Entries in the order drawn, and their stored embeddings.

    Attributes:
        queries: numbers of the entries that are queries.
        both: numbers of the entries to be embedded by both versions, the queries among them.
        stored: version name -> number of an entry -> its stored embedding.
        unlabelled: how many items were left out because they have no label.
        whole: whether every item that can be compared is among the entries.
        exhausted: whether every item that can be a query is one.
        paired: whether only items that the new version embeds too can be used.
    """

    entries: list[Entry] = field(default_factory=list)
    queries: set[int] = field(default_factory=set)
    both: set[int] = field(default_factory=set)
    stored: dict[str, dict[int, EmbeddedRow]] = field(default_factory=dict)
    unlabelled: int = 0
    whole: bool = True
    exhausted: bool = True
    paired: bool = False


@dataclass(frozen=True)
class DrawOptions:
    """What to draw: up to `sample` queries by `seed`; `label` and `slice` are metadata fields.

    `paired`: only items that the new version embeds too can be used. `with_side`: only embeddings by the old version
    that have side-information. `outside_queries`: the number of queries from an evaluation set; 0: items are the
    queries. `first`: keys of items to draw before all others.
    """

    label: str | None
    slice: str | None
    sample: int
    seed: int
    paired: bool = False
    with_side: bool = False
    outside_queries: int = 0
    first: Sequence[int] = ()


def draw_sides(
    connection: Connection, gallery_id: int, old: LoadedVersion, new: LoadedVersion, options: DrawOptions
) -> DrawnSides:
    """Draw items of a gallery as queries and as items.

    Raises:
        InvalidArgument: fewer than two items can be queries, or none can be compared.
        NoEncoder: fewer than two can be queries, as the new version embeds neither images nor texts.
    """
    drawn = DrawnSides(stored={old.name: {}, new.name: {}}, paired=options.paired)
    max_items = (
        MAX_PAIRS // options.outside_queries
        if options.outside_queries
        else max(options.sample, MAX_PAIRS // options.sample)
    )
    query_count = 0 if options.outside_queries else options.sample
    computed = dict.fromkeys(drawn.stored, 0)
    for entry in _entries(connection, gallery_id, (old, new), options, drawn):
        has_old, has_new = (entry.number in drawn.stored[version.name] for version in (old, new))
        can_query = has_new or _can_embed(new, entry.blob)
        can_old = _can_embed(old, entry.blob) and not (options.with_side and is_text(entry.blob or ""))
        if not (has_old or can_old) or (options.paired and not can_query):
            continue
        room = has_new or computed[new.name] < MAX_EMBEDDED
        if len(drawn.queries) < query_count:
            room = True
            drawn.queries.update([entry.number] if can_query else [])
        elif _is_unaffordable(
            len(drawn.entries), max_items, has_old or computed[old.name] < MAX_EMBEDDED, room or not options.paired
        ):
            drawn.whole = drawn.exhausted = False
            break
        else:
            drawn.exhausted = drawn.exhausted and not can_query
        if can_query and room:
            drawn.both.add(entry.number)
            computed[new.name] += not has_new
        computed[old.name] += not has_old
        drawn.entries.append(entry)
    if options.outside_queries and not drawn.entries:
        raise InvalidArgument(
            f"no item of the gallery has an embedding by {old.name!r} to compare", pointer="/evaluation"
        )
    if len(drawn.queries) < 2 and not options.outside_queries:
        raise _too_few_queries(new, options.label, len(drawn.queries), old if options.with_side else None)
    return drawn


def _too_few_queries(new: LoadedVersion, label: str | None, found: int, side_by: LoadedVersion | None) -> RegraftError:
    """`side_by`: the version whose side-information they need, too."""
    own = f"an embedding by {new.name!r}"
    if side_by is not None:
        own = f"side-information by {side_by.name!r} and {own}"
    inputs = " or ".join([*["an image"] * bool(new.card.encoder), *["a text"] * new.card.text])
    if inputs:
        return too_few_items(f"{own}, or {inputs} that it embeds", label, found)
    return NoEncoder(f"version {new.name!r} has no encoder: {too_few_items(own, label, found).message}")


def _is_unaffordable(items: int, max_items: int, old_has_room: bool, new_has_room: bool) -> bool:
    """Whether one more item is not affordable."""
    return items >= max_items or not (old_has_room and new_has_room)


def _entries(
    connection: Connection, gallery_id: int, versions: Sequence[LoadedVersion], options: DrawOptions, drawn: DrawnSides
) -> Iterator[Entry]:
    """Live items in the order drawn; their stored embeddings are added to `drawn`."""
    live, first = and_(item.c.gallery_id == gallery_id, item.c.deleted == false()), set(options.first)
    blocks_drawn = RandomItems(connection, live, options.seed).in_blocks(READ_BLOCK)
    others = ([key for key in block if key not in first] for block in blocks_drawn)
    for block in chain(blocks(options.first, READ_BLOCK), others):
        columns = (item.c.id, item.c.blob, item.c.metadata, item.c.external_id)
        rows = {row.id: row for row in connection.execute(select(*columns).where(item.c.id.in_(block)))}
        labels = {key: field_text(row.metadata, options.label) for key, row in rows.items()}
        eligible = [key for key in block if options.label is None or labels[key] is not None]
        drawn.unlabelled += len(block) - len(eligible)
        for version in versions:
            embeddable = {key for key in eligible if _can_embed(version, rows[key].blob)}
            side_required = options.with_side and version is versions[0]
            drawn.stored[version.name] |= _stored(
                connection, gallery_id, version, eligible, embeddable, side_required=side_required
            )
        for row in map(rows.__getitem__, eligible):
            slice_text = field_text(row.metadata, options.slice)
            yield Entry(row.id, row.blob, labels[row.id], slice_text, row.external_id)


def _can_embed(version: LoadedVersion, blob: str | None) -> bool:
    """Whether an item has an image or text that the version embeds."""
    return blob is not None and embeds(version.card, blob)


def _stored(
    connection: Connection,
    gallery_id: int,
    version: LoadedVersion,
    ids: Sequence[int],
    embeddable: set[int],
    *,
    side_required: bool,
) -> dict[int, EmbeddedRow]:
    """Stored embeddings by a version, except those that it can make better itself, of the items `embeddable`.

    These are embedded again instead of using what an edge made, or what lacks the version's side-information, which an
    item edge needs. `side_required`: nothing without it is used at all.
    """
    conditions = (in_gallery(embedding, gallery_id), embedding.c.version_id == version.id, embedding.c.item_id.in_(ids))
    rows = [
        row
        for row in connection.execute(
            select(embedding.c.item_id, embedding.c.origin, embedding.c.vector, embedding.c.side).where(*conditions)
        )
        if row.origin != Origin.TRANSFORMED or row.item_id not in embeddable
    ]
    side_dim = version.card.side_dim
    if side_dim:
        rows = [row for row in rows if row.side is not None or not (side_required or row.item_id in embeddable)]
    stored = zip(rows, read_vectors(connection, [row.vector for row in rows]), strict=True)
    held = [(row, vector) for row, vector in stored if is_usable(vector, version.card.dim)]
    vectors = from_bytes([vector for _, vector in held], version.card.dim)
    sides = [from_bytes([row.side], side_dim)[0] if row.side is not None and side_dim else None for row, _ in held]
    return {row.item_id: (vectors[n], sides[n]) for n, (row, _) in enumerate(held)}
