"""The sample of a gate on a gallery's own items: what `sides` has drawn, with the embeddings that are not stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from index.encoders.decoding import Decoder
from index.encoders.encoder import BATCH, Embedded
from service.registry.loaded_version import LoadedVersion
from service.registry.stored_contents import Input, InputRequest, Inputs, embed, embeds, read_inputs, time_each
from service.store.image_store.blobs import Blobs
from service.store.sql.arrays import blocks
from service.upgrades.gates.samples import TIMED, Entry, Sample, quantiles, too_few_readable
from service.upgrades.gates.sides import DrawnSides, EmbeddedRow


def embed_sides(
    blobs: Blobs,
    decoder: Decoder,
    drawn: DrawnSides,
    old: LoadedVersion,
    new: LoadedVersion,
    other_encoders: Sequence[LoadedVersion],
) -> Sample:
    """Compute the embeddings that are not stored: of queries by every version, of other items by those needed.

    An entry whose image or text cannot be read is no query, and no item either if its embedding by the old version is
    not stored or items of both versions are needed (`paired`).

    Raises:
        NoEncoder, NoTextEntrance: a needed version does not embed images, or texts.
        InvalidArgument: fewer than two queries are left.
    """
    known, unreadable, seconds = _computed(blobs, decoder, drawn, old, new, other_encoders)
    entries, queries, both = _comparable(drawn, known, unreadable, old)
    if queries < 2 and drawn.queries:
        raise too_few_readable("/label")
    embedded = {old.name: _stack(known, old, entries), new.name: _stack(known, new, entries[:both])}
    query_numbers = {entry.number for entry in entries[:queries]}
    complete = [
        version for version in other_encoders if query_numbers and query_numbers <= set(known.get(version.name, {}))
    ]
    embedded |= {version.name: _stack(known, version, entries[:queries]) for version in complete}
    return Sample(
        entries=entries,
        embedded=embedded,
        labels=None if any(entry.label is None for entry in entries) else [entry.label or "" for entry in entries],
        slices=[entry.slice for entry in entries[:queries]],
        latency_ms=quantiles(seconds),
        unreadable=len(unreadable),
        unlabelled=drawn.unlabelled,
        queries=queries,
        whole=drawn.whole,
        exhaustive=drawn.whole and drawn.exhausted,
    )


class _Computed(NamedTuple):
    """Version name -> number of an entry -> embedding; the unreadable entries; version name -> seconds per input."""

    known: dict[str, dict[int, EmbeddedRow]]
    unreadable: set[int]
    seconds: dict[str, list[float]]


def _computed(
    blobs: Blobs,
    decoder: Decoder,
    drawn: DrawnSides,
    old: LoadedVersion,
    new: LoadedVersion,
    other_encoders: Sequence[LoadedVersion],
) -> _Computed:
    """The stored embeddings, and those needed besides: computed batch by batch, while the two versions are timed."""
    known = {name: dict(rows) for name, rows in drawn.stored.items()}
    unreadable: set[int] = set()
    seconds: dict[str, list[float]] = {old.name: [], new.name: []}
    for block in blocks(drawn.entries, BATCH):
        missing = {entry.number: _missing(entry, drawn, known, old, new, other_encoders) for entry in block}
        timed = [version for version in (old, new) if _is_timed(version, seconds[version.name])]
        requests = {
            entry.number: InputRequest(entry.blob, _encoders_of(needed, timed, entry.blob))
            for entry in block
            if (needed := missing[entry.number])
        }
        images = dict(zip(requests, read_inputs(blobs, decoder, list(requests.values())), strict=True))
        for version in {v.name: v for needed in missing.values() for v in needed}.values():
            found = {n: images[n] for n, needed in missing.items() if version in needed}
            _encode(version, {n: inputs[version.name] for n, inputs in found.items() if inputs is not None}, known)
        for version in timed:
            seconds[version.name] += _time_images(version, images.values(), TIMED - len(seconds[version.name]))
        unreadable |= {number for number, inputs in images.items() if inputs is None}
    return _Computed(known, unreadable, seconds)


def _missing(
    entry: Entry,
    drawn: DrawnSides,
    known: Mapping[str, Mapping[int, EmbeddedRow]],
    old: LoadedVersion,
    new: LoadedVersion,
    other_encoders: Sequence[LoadedVersion],
) -> list[LoadedVersion]:
    """The versions whose embedding of an entry has to be computed."""
    versions = [old, *([new] if entry.number in drawn.both else [])]
    if entry.number in drawn.queries and entry.blob is not None:
        versions += [version for version in other_encoders if embeds(version.card, entry.blob)]
    return [version for version in versions if entry.number not in known.get(version.name, {})]


def _encoders_of(
    needed: Sequence[LoadedVersion], timed: Sequence[LoadedVersion], blob: str | None
) -> list[LoadedVersion]:
    """The needed versions and those of `timed` that can embed the blob, each once."""
    can_embed = [version for version in timed if blob is not None and embeds(version.card, blob)]
    return list({version.name: version for version in [*needed, *can_embed]}.values())


def _encode(version: LoadedVersion, inputs: Mapping[int, Input], known: dict[str, dict[int, EmbeddedRow]]) -> None:
    computed = embed(version, list(inputs.values()))
    rows = known.setdefault(version.name, {})
    for n, number in enumerate(inputs):
        rows[number] = (computed.vectors[n], None if computed.side is None else computed.side[n])


def _is_timed(version: LoadedVersion, seconds: Sequence[float]) -> bool:
    """Whether a version's encoder has to be timed on more inputs, even if all its embeddings are stored."""
    return len(seconds) < TIMED and version.can_embed("images", "texts")


def _time_images(version: LoadedVersion, images: Iterable[Inputs | None], limit: int) -> list[float]:
    return time_each(version, [inputs[version.name] for inputs in images if inputs and version.name in inputs][:limit])


def _comparable(
    drawn: DrawnSides, known: Mapping[str, Mapping[int, EmbeddedRow]], unreadable: set[int], old: LoadedVersion
) -> tuple[list[Entry], int, int]:
    """The comparable entries: Q queries, then others of both versions, then the rest; Q, and the number of both."""
    both, queries = drawn.both - unreadable, drawn.queries - unreadable
    usable = both if drawn.paired else known[old.name].keys()
    comparable = [entry for entry in drawn.entries if entry.number in known[old.name] and entry.number in usable]
    rank = [2 - (entry.number in both) - (entry.number in queries) for entry in comparable]
    order: NDArray[np.int64] = np.argsort(rank, kind="stable")
    return [comparable[n] for n in order.tolist()], rank.count(0), rank.count(0) + rank.count(1)


def _stack(
    known: Mapping[str, Mapping[int, EmbeddedRow]], version: LoadedVersion, entries: Sequence[Entry]
) -> Embedded:
    if not entries:
        return Embedded(np.empty((0, version.card.dim), np.float32), None)
    rows = [known[version.name][entry.number] for entry in entries]
    sides = [side for _, side in rows if side is not None]
    return Embedded(np.stack([vector for vector, _ in rows]), np.stack(sides) if len(sides) == len(rows) else None)
