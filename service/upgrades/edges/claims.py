"""The provider swap: is a version the same model under another name? Checked before an `identity` edge is accepted.

Both versions' embeddings of the same images are compared, image by image. The worst one decides: an average would hide
the images on which two models part. Arrays of vectors are (images, dimension).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from index.artifacts import read_arrays
from index.decoding import Decoder
from index.encoder import BATCH
from index.errors import RegraftError
from index.evaluation.fitting import intervals
from index.evaluation.metrics import retrieval
from index.space import Space, Vectors
from index.version import PROBE, Score
from service.registry.paired_embeddings import PicturedRow, draw_held, pictured
from service.registry.registry import LoadedVersion
from service.registry.stored_contents import InputRequest, Inputs, embed, embeds, read_inputs
from service.schemas import Body, Name, Seed
from service.store.blobs import Blobs
from service.store.database import Database
from service.store.repository import gallery_named

TOLERANCE = 0.01
"""Largest legal distance of two embeddings of an image, relative to the old one's length; a cosine of 0.99995."""

PROBES, ITEMS = "probes", "items"


class NotIdentical(RegraftError):
    """The two versions do not embed the same images alike."""

    status = 422
    code = "not_identical"


class NothingToVerifyOn(RegraftError):
    """A claim that nothing could be compared on is not accepted."""

    status = 422
    code = "nothing_to_verify_on"


class VerifyIn(Body):
    """What to compare two versions on: `items` of a gallery, beside the stored probes where both have an encoder."""

    gallery: Name | None = None
    items: Annotated[int, Field(ge=1, le=10_000)] = 100
    seed: Seed = 0


@dataclass(frozen=True)
class Twin:
    """The same images by both versions: `source` says where they come from."""

    source: str
    names: Sequence[str]
    new: Vectors
    old: Vectors


def verify(
    database: Database, blobs: Blobs, decoder: Decoder, new: LoadedVersion, old: LoadedVersion, asked: VerifyIn
) -> tuple[dict[str, Any], dict[str, Score]]:
    """Compare two versions of one dimension and space.

    Returns:
        What was compared and how far apart it was at worst; and, of items, how well the embedding by the new version
        finds the item's own among those by the old one.

    Raises:
        NotIdentical: gives the measured disagreement, and the image on which it is greatest.
        NothingToVerifyOn: says what is missing.
    """
    twins = [
        twin for twin in (_probes(new, old), _items(database, blobs, decoder, new, old, asked)) if twin is not None
    ]
    if not twins:
        raise NothingToVerifyOn(
            f"{new.name!r} and {old.name!r} have no encoders that read the same input: name a gallery with items that "
            f"hold embeddings by both",
            pointer="/verify/gallery",
        )
    evidence = {twin.source: _compare(twin) for twin in twins}
    worst = max(evidence.values(), key=lambda found: found["distance"])
    if not worst["distance"] <= TOLERANCE:
        raise NotIdentical(
            f"{new.name!r} and {old.name!r} differ: on {worst['worst']!r} by {worst['distance']:.4g} of the old "
            f"embedding's length (cosine {worst['cosine']:.6f}), at most {TOLERANCE:g} is legal",
            pointer="/kind",
        )
    scores = next((_scores(twin, old.space) for twin in twins if twin.source == ITEMS), {})
    return {"tolerance": TOLERANCE, **evidence}, scores


def _compare(twin: Twin) -> dict[str, Any]:
    new, old = (np.asarray(x, np.float64) for x in (twin.new, twin.old))
    lengths = np.linalg.norm(old, axis=1)
    tiny = np.finfo(np.float64).tiny
    distances = np.linalg.norm(new - old, axis=1) / np.maximum(lengths, tiny)
    at = int(np.argmax(distances))
    cosine = float(new[at] @ old[at] / max(np.linalg.norm(new[at]) * lengths[at], tiny))
    return {"images": len(new), "distance": float(distances[at]), "cosine": cosine, "worst": twin.names[at]}


def _scores(twin: Twin, space: Space) -> dict[str, Score]:
    own = np.arange(len(twin.names))
    return intervals(retrieval(twin.new, own, twin.old, own, space))


def _probes(new: LoadedVersion, old: LoadedVersion) -> Twin | None:
    """Both versions' stored probes by both encoders; None where one has no encoder or they read another input."""
    if not new.card.encoder or not old.card.encoder or new.card.preprocess != old.card.preprocess:
        return None
    spec = new.encoder().spec
    shape: dict[str, tuple[int, ...]] = {"image": (1, spec.channels, spec.height, spec.width)}
    images = np.concatenate([_probe(version, shape) for version in (new, old)])
    made = [version.encoder().encode_arrays(images).vectors for version in (new, old)]
    return Twin(PROBES, [f"probe of {new.name}", f"probe of {old.name}"], made[0], made[1])


def _probe(version: LoadedVersion, shape: dict[str, tuple[int, ...]]) -> Vectors:
    return read_arrays(version.version.folder / PROBE, PROBE, shape)["image"]


def _items(
    database: Database, blobs: Blobs, decoder: Decoder, new: LoadedVersion, old: LoadedVersion, asked: VerifyIn
) -> Twin | None:
    """Exactly as many items as asked for: those that hold both embeddings, then those that both can embed."""
    if asked.gallery is None:
        return None
    encodes = bool((new.card.encoder and old.card.encoder) or (new.card.text and old.card.text))
    with database.read() as connection:
        gallery_id = gallery_named(connection, asked.gallery).id
        held, _ = draw_held(
            connection, new, old, gallery_id=gallery_id, label=None, sample=asked.items, seed=asked.seed
        )
        rows = pictured(connection, gallery_id, asked.items + len(held.names), asked.seed) if encodes else ()
    names, new_parts, old_parts = list(held.names), [held.new], [held.old]
    known = set(names)
    versions = (new, old) if encodes else ()
    for readable in _readable(blobs, decoder, [row for row in rows if row.external_id not in known], versions):
        some = readable[: asked.items - len(names)]
        if len(names) == asked.items:
            break
        if not some:
            continue
        names += [name for name, _ in some]
        for version, parts in ((new, new_parts), (old, old_parts)):
            parts.append(embed(version, [inputs[version.name] for _, inputs in some]).vectors)
    if len(names) < asked.items:
        raise NothingToVerifyOn(
            f"gallery {asked.gallery!r} has {len(names)} items that hold embeddings by both {new.name!r} and "
            f"{old.name!r} or an image or text that both can encode; {asked.items} were asked for",
            pointer="/verify/items",
        )
    return Twin(ITEMS, names, np.concatenate(new_parts), np.concatenate(old_parts))


def _readable(
    blobs: Blobs, decoder: Decoder, rows: Sequence[PicturedRow], versions: Sequence[LoadedVersion]
) -> Iterator[list[tuple[str, Inputs]]]:
    """Names and encoder inputs in batches; images that cannot be read are left out."""
    for start in range(0, len(rows), BATCH):
        block = [row for row in rows[start : start + BATCH] if all(embeds(v.card, row.blob) for v in versions)]
        read = read_inputs(blobs, decoder, [InputRequest(row.blob, versions) for row in block])
        named = zip((row.external_id for row in block), read, strict=True)
        yield [(name, inputs) for name, inputs in named if inputs is not None]
