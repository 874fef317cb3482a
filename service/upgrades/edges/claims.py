"""Verify edges that need no files, on embeddings of the same images or texts by both versions.

An `identity` claims that both versions are one model (a provider swap). Its embeddings are compared one by one, and the
largest distance decides (`verify`): an average would hide the inputs on which two models differ. `truncate` and
`zero_pad` claim that the new version was trained to begin with the old one's numbers; they are measured (`measure`).
Arrays of vectors are (images, dimension).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from index.edges.transform import Transform
from index.encoders.decoding import Decoder
from index.errors import InvalidArgument, RegraftError
from index.evaluation.metrics import retrieval
from index.evaluation.scores import scores
from index.space import Space, Vectors
from index.version import PROBE, Score
from index.version_folder.artifacts import read_arrays
from service.registry.loaded_version import LoadedVersion
from service.registry.paired_embeddings import draw_pairs
from service.schemas import Body, Name, Seed
from service.store.database.connections import Database
from service.store.galleries.gallery import gallery_named
from service.store.image_store.blobs import Blobs
from service.upgrades.edges.sampling import make_pairs

TOLERANCE = 0.01
"""Largest legal distance of two embeddings of an image, relative to the old one's length; a cosine of 0.99995."""

UNRELATED = 0.5
"""Versions whose embeddings of the probes have a lower cosine were hardly trained together: those of our examples have
0.93 to 0.99, others -0.14 to 0."""

PROBES, ITEMS = "probes", "items"


class NotIdentical(RegraftError):
    """The two versions embed the same images differently."""

    status = 422
    code = "not_identical"


class FindsNothing(RegraftError):
    """Queries of the new version do not find the same items among the old one's embeddings."""

    status = 422
    code = "finds_nothing"


class NothingToVerifyOn(RegraftError):
    """The claim cannot be verified, because there is nothing to compare."""

    status = 422
    code = "nothing_to_verify_on"


class VerifyIn(Body):
    """What to compare two versions on: `items` of a gallery, and the stored probes if both have an encoder."""

    gallery: Name | None = None
    items: Annotated[int, Field(ge=1, le=10_000)] = 100
    seed: Seed = 0


@dataclass(frozen=True)
class ComparedImages:
    """Embeddings of the same images or texts by both versions; `source`: PROBES or ITEMS."""

    source: str
    names: Sequence[str]
    new: Vectors
    old: Vectors


def verify(
    database: Database, blobs: Blobs, decoder: Decoder, new: LoadedVersion, old: LoadedVersion, request: VerifyIn
) -> tuple[dict[str, Any], dict[str, Score]]:
    """Compare two versions of one dimension and space.

    Returns:
        For each source, the number of images and the largest distance; and, for items, scores of how well an
        embedding by the new version retrieves the same item among embeddings by the old one.

    Raises:
        NotIdentical: gives the largest distance, and the image on which it was measured.
        NothingToVerifyOn: there are too few images to compare; says how to provide them.
    """
    compared = _comparisons(database, blobs, decoder, new, old, request)
    if not compared:
        raise NothingToVerifyOn(
            f"{new.name!r} and {old.name!r} have no encoders for the same input: name a gallery with items that "
            f"have embeddings by both",
            pointer="/verify/gallery",
        )
    evidence = {comparison.source: _compare(comparison) for comparison in compared}
    worst = max(evidence.values(), key=lambda result: result["distance"])
    if not worst["distance"] <= TOLERANCE:
        raise NotIdentical(
            f"{new.name!r} and {old.name!r} differ: on {worst['worst']!r} by {worst['distance']:.4g} of the old "
            f"embedding's length (cosine {worst['cosine']:.6f}), at most {TOLERANCE:g} is legal",
            pointer="/kind",
        )
    scores = next((_scores(comparison, old.space) for comparison in compared if comparison.source == ITEMS), {})
    return {"tolerance": TOLERANCE, **evidence}, scores


def measure(
    database: Database,
    blobs: Blobs,
    decoder: Decoder,
    new: LoadedVersion,
    old: LoadedVersion,
    request: VerifyIn,
    to_old: Transform,
) -> tuple[dict[str, Any], dict[str, Score]]:
    """As `verify`, for an edge whose queries are `to_old` of the new version's embeddings: the result may be empty.

    A `warning` is added unless items were compared.

    Raises:
        FindsNothing: on the items, it is no better than chance.
        InvalidArgument: one item alone, of which each query finds it.
        NothingToVerifyOn: there are fewer items to compare than requested.
    """
    if request.gallery is not None and request.items == 1:
        why = "among one item every query finds it: at least two are required"
        raise InvalidArgument(why, pointer="/verify/items")
    found = _comparisons(database, blobs, decoder, new, old, request)
    mapped = [replace(comparison, new=to_old(comparison.new)) for comparison in found]
    evidence = {comparison.source: _compare(comparison) for comparison in mapped}
    scores = next((_scores(comparison, old.space) for comparison in mapped if comparison.source == ITEMS), {})
    if not scores:
        return {**evidence, "warning": _unmeasured(new, old, evidence.get(PROBES))}, scores
    first, items = scores["cmc@1"], evidence[ITEMS]["images"]
    if not first.low > 1 / items:
        raise FindsNothing(
            f"of {items} items, {first.value:.0%} of the queries of {new.name!r} find their own item among the "
            f"embeddings by {old.name!r}, which chance does as well: {new.name!r} was not trained to begin with them",
            pointer="/kind",
        )
    return evidence, scores


def _unmeasured(new: LoadedVersion, old: LoadedVersion, probes: dict[str, Any] | None) -> str:
    warning = "this edge has no measured scores: any measured edge is preferred"
    if probes is not None and probes["cosine"] < UNRELATED:
        return (
            f"{warning}. On a probe image, the first {old.card.dim} numbers of {new.name!r} and the embedding by "
            f"{old.name!r} have a cosine of {probes['cosine']:.2f}: unless the one was trained to begin with the "
            "other's numbers, queries find nothing along this edge. Remove it, or verify it on items of a gallery"
        )
    return (
        f"{warning}. Unless {new.name!r} was trained to begin with the numbers of {old.name!r}, queries find nothing "
        "along it: verify it on items of a gallery"
    )


def _compare(comparison: ComparedImages) -> dict[str, Any]:
    new, old = (np.asarray(x, np.float64) for x in (comparison.new, comparison.old))
    lengths = np.linalg.norm(old, axis=1)
    tiny = np.finfo(np.float64).tiny
    distances = np.linalg.norm(new - old, axis=1) / np.maximum(lengths, tiny)
    worst = int(np.argmax(distances))
    cosine = float(new[worst] @ old[worst] / max(np.linalg.norm(new[worst]) * lengths[worst], tiny))
    return {"images": len(new), "distance": float(distances[worst]), "cosine": cosine, "worst": comparison.names[worst]}


def _comparisons(
    database: Database, blobs: Blobs, decoder: Decoder, new: LoadedVersion, old: LoadedVersion, request: VerifyIn
) -> list[ComparedImages]:
    found = (_probes(new, old), _items(database, blobs, decoder, new, old, request))
    return [comparison for comparison in found if comparison is not None]


def _scores(comparison: ComparedImages, space: Space) -> dict[str, Score]:
    own = np.arange(len(comparison.names))
    return scores(retrieval(comparison.new, own, comparison.old, own, space))


def _probes(new: LoadedVersion, old: LoadedVersion) -> ComparedImages | None:
    """Both versions' stored probes, embedded by both encoders; None if a version has no encoder or inputs differ."""
    if not new.card.encoder or not old.card.encoder or new.card.preprocess != old.card.preprocess:
        return None
    spec = new.encoder().spec
    shape: dict[str, tuple[int, ...]] = {"image": (1, spec.channels, spec.height, spec.width)}
    images = np.concatenate([_probe(version, shape) for version in (new, old)])
    vectors = [version.encoder().encode_arrays(images).vectors for version in (new, old)]
    return ComparedImages(PROBES, [f"probe of {new.name}", f"probe of {old.name}"], vectors[0], vectors[1])


def _probe(version: LoadedVersion, shape: dict[str, tuple[int, ...]]) -> Vectors:
    return read_arrays(version.version.folder / PROBE, PROBE, shape)["image"]


def _items(
    database: Database, blobs: Blobs, decoder: Decoder, new: LoadedVersion, old: LoadedVersion, request: VerifyIn
) -> ComparedImages | None:
    """As many items as requested: those that hold both embeddings, then those whose missing ones can be computed."""
    if request.gallery is None:
        return None
    with database.read() as connection:
        gallery_id = gallery_named(connection, request.gallery).id
        pairs, _ = draw_pairs(
            connection, new, old, gallery_id=gallery_id, label=None, sample=request.items, seed=request.seed
        )
    if missing := request.items - len(pairs.names):
        more = make_pairs(
            database, blobs, decoder, (new, old), gallery_id=gallery_id, label=None, count=missing, seed=request.seed
        )
        pairs = pairs.with_more(more)
    if len(pairs.names) < request.items:
        raise NothingToVerifyOn(
            f"gallery {request.gallery!r} has {len(pairs.names)} items with embeddings by both {new.name!r} and "
            f"{old.name!r}, or with an image or text that those can encode by which an embedding is missing; "
            f"{request.items} are required",
            pointer="/verify/items",
        )
    return ComparedImages(ITEMS, pairs.names, pairs.new, pairs.old)
