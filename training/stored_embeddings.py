"""An old version without torch weights: its embeddings, of text say, come from a file or from its encoder.onnx.

So a text tower can be the old version of an image model (BT2's change of modality, Zhou 2023, arXiv 2211.03989): each
image goes with the old embedding of its caption, or of its class's name. `old` is the tower's version folder (its card
says dimension and space), `old_embeddings` an .npz of one of two forms:

    classes (K,) names or numbers, embeddings (K, N)    one for each class
    train (S, N), query (Q, N), gallery (G, N)          one for each image of the data source, in its order, before any
                                                        share is taken; no gallery where both sides are one list

A version folder without weights but with an encoder.onnx needs no file: its encoder makes the embeddings of the images
once, and they are cached in `EMBEDDING_CACHE`.

Shape suffixes: K classes, S, Q, G images, N old dimension.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.durable import whole_file
from index.errors import InvalidArgument, InvalidVector, Unwritable
from index.space import Vectors, check_vectors, space_from_json
from index.version import CARD, Version
from index.version_folder.folder import load_given_version
from training.data.images import Data, ImageSet
from training.data.npz import open_npz
from training.trained import WEIGHTS

EMBEDDING_CACHE = Path("runs/embeddings")
"""Folder of the embeddings made by encoders, a file for each encoder, preprocessing and set of images."""
PER_CLASS, PER_IMAGE = ("classes", "embeddings"), ("train", "query")
POINTER = "/old_embeddings"
BLOCK = 256
"""Images that an encoder reads at a time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredVersion:
    """The old version beside a file of its embeddings; it has no head, and stores no side-information.

    Raises:
        InvalidArgument: a method could not use it.
    """

    version: Version
    side_dim = 0
    psi = None

    def __post_init__(self) -> None:
        if WEIGHTS in self.version.card.files:
            raise InvalidArgument(
                f"{self.version.name} embeds images itself with its {WEIGHTS}; omit old_embeddings", pointer=POINTER
            )
        if self.version.card.side_dim:
            raise InvalidArgument(
                f"{self.version.name} has side-information, which a file of embeddings cannot have", pointer="/old"
            )
        if space_from_json(self.version.card.space) != space_from_json({"kind": self.space}):
            raise InvalidArgument(f"{self.version.name} must have curvature 1 to be trained against", pointer="/old")

    @property
    def dim(self) -> int:
        """N."""
        return self.version.card.dim

    @property
    def space(self) -> str:
        """Name of its space."""
        return str(self.version.card.space["kind"])

    def embed(self, images: ImageSet) -> Vectors:
        """(S, N) the embeddings that come with the images, from `with_file_embeddings`."""
        assert images.stored is not None
        return images.stored


def open_stored(folder: str) -> StoredVersion:
    """The old version of a recipe that has `old_embeddings`.

    Raises:
        InvalidArgument: there is none, or it cannot be used.
        InvalidVersionFolder: the folder does not match its card.
    """
    if not folder or not (Path(folder) / CARD).is_file():
        raise InvalidArgument(
            f"old_embeddings requires their version: set old=FOLDER with a {CARD}, not {folder!r}", pointer="/old"
        )
    return StoredVersion(load_given_version(Path(folder)))


def with_file_embeddings(data: Data, path: Path, version: Version) -> Data:
    """Give every image the old embedding that a file holds for it.

    Args:
        data: as its source gave it.
        path: the .npz.
        version: whose embeddings they are.

    Raises:
        InvalidArgument: not such a file, or embeddings of other classes, images or dimensions; says what is missing.
        InvalidVector: embeddings that are not valid in the version's space.
    """
    with open_npz(path, "old_embeddings", POINTER) as held:
        arrays = {name: held[name] for name in held}
    sets = {"train": data.train, "query": data.query, "gallery": data.gallery}
    per_class, per_image = (set(names) <= set(arrays) for names in (PER_CLASS, PER_IMAGE))
    if per_class == per_image:
        forms = " or ".join(" and ".join(names) for names in (PER_CLASS, (*PER_IMAGE, "gallery")))
        raise InvalidArgument(f"{path} holds {', '.join(arrays) or 'nothing'}, not {forms}", pointer=POINTER)
    vectors = {
        name: _checked(array, version, path, name) for name, array in arrays.items() if name in {"embeddings", *sets}
    }
    if per_class:
        names = [_class_name(name) for name in arrays["classes"].reshape(-1).tolist()]
        stored = {part: _of_classes(names, vectors["embeddings"], images, data, path) for part, images in sets.items()}
    else:
        vectors = {"gallery": vectors["query"], **vectors} if data.same else vectors
        stored = {part: _of_images(vectors, part, images, path) for part, images in sets.items()}
    sets = {part: replace(images, stored=stored[part]) for part, images in sets.items()}
    gallery = sets["query" if data.same else "gallery"]
    return replace(data, train=sets["train"], query=sets["query"], gallery=gallery, stored=version.name)


def is_encoder_only(folder: str) -> bool:
    """Whether this is the folder of a version that has an encoder.onnx, but no torch weights of a training here."""
    if not folder or not (Path(folder) / CARD).is_file():
        return False
    card = load_given_version(Path(folder)).card
    return WEIGHTS not in card.files and bool(card.encoder)


def with_encoder_embeddings(data: Data, version: Version) -> Data:
    """Give every image its embedding by a version's encoder.onnx, or the cached one.

    Raises:
        NoEncoder: the encoder cannot run here.
    """
    from index.encoders.encoder import Encoder

    card = version.card
    settings = json.dumps([card.preprocess.as_json() if card.preprocess else {}, card.space], sort_keys=True)
    encoder_key = f"{card.encoder[:16]}-{hashlib.sha256(settings.encode()).hexdigest()[:16]}"
    encoder: list[Encoder] = []  # loaded when it is needed

    def embedded(images: ImageSet) -> ImageSet:
        path = EMBEDDING_CACHE / f"{encoder_key}-{images.fingerprint[:16]}.npy"
        stored = _cached(path, (len(images), card.dim))
        if stored is None:
            if not encoder:
                encoder.append(Encoder(version))
            rows = [range(first, min(first + BLOCK, len(images))) for first in range(0, len(images), BLOCK)]
            made = [encoder[0].encode([images.images[row] for row in block]).vectors for block in rows]
            stored = np.concatenate(made)
            _keep(path, stored)
        return replace(images, stored=stored)

    train, query = embedded(data.train), embedded(data.query)
    gallery = query if data.same else embedded(data.gallery)
    return replace(data, train=train, query=query, gallery=gallery, stored=version.name)


def _cached(path: Path, shape: tuple[int, int]) -> Vectors | None:
    """The embeddings in a file of the cache; None where there is none, or a damaged one."""
    try:
        kept = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return kept if isinstance(kept, np.ndarray) and kept.shape == shape else None


def _keep(path: Path, stored_SN: Vectors) -> None:
    """Write embeddings into the cache, whole or not at all; where that fails, they will be made again."""
    try:
        with whole_file(path) as part, part.open("wb") as file:
            np.save(file, stored_SN)
    except Unwritable as error:
        _log.warning("the old embeddings are not kept: %s", error)


def _checked(array: NDArray[Any], version: Version, path: Path, name: str) -> Vectors:
    """Embeddings of a file as valid vectors of the version's space; InvalidVector names the file, array and row."""
    pointer = f"{POINTER}/{name}"
    try:
        return check_vectors(array, version.card.dim, space_from_json(version.card.space), pointer=pointer)
    except InvalidVector as error:
        place = error.pointer.removeprefix(f"{POINTER}/")
        raise InvalidVector(f"{path}, {place}: {error}", pointer=error.pointer) from error


def _class_name(given: object) -> str:
    return given.decode(errors="replace") if isinstance(given, bytes) else str(given)


def _of_classes(given: list[str], embeddings_KN: Vectors, images: ImageSet, data: Data, path: Path) -> Vectors:
    """(S, N) the embedding of each image's class. Classes are told apart by name, numbers as they are written."""
    if len(set(given)) != len(given) or len(given) != len(embeddings_KN):
        raise InvalidArgument(
            f"{path} must have one embedding for each class, not {len(embeddings_KN)} for {len(set(given))} names",
            pointer=POINTER,
        )
    row = {name: number for number, name in enumerate(given)}
    wanted = {int(label): str(data.name(int(label))) for label in np.unique(images.labels)}
    if missing := [name for name in wanted.values() if name not in row]:
        raise InvalidArgument(
            f"{path} has no embedding of {len(missing)} classes: {_some(missing)}; it names {_some(given)}",
            pointer=POINTER,
        )
    return np.asarray(embeddings_KN[[row[wanted[int(label)]] for label in images.labels]])


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _of_images(vectors: dict[str, Vectors], part: str, images: ImageSet, path: Path) -> Vectors:
    if part not in vectors or len(vectors[part]) != len(images):
        count = len(vectors[part]) if part in vectors else "no"
        raise InvalidArgument(
            f"{path} has {count} embeddings for the {len(images)} {part} images", pointer=f"{POINTER}/{part}"
        )
    return vectors[part]
