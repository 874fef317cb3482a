"""Data: images with labels, their splits, and batches of tensors made of them.

A source of `training.sources` gives `Data`: images to train on, and query and gallery sets to evaluate on, of the same
classes or of others. A label is the number of a class within its source; class names are compared between versions.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from index.encoders.image import decode_image
from index.errors import InvalidArgument, InvalidImage
from index.space import Vectors
from index.version import Preprocess
from training.data.transforms import find_augmentation, pixels, sizing

MAX_PRELOADED_BYTES = 1 << 30
"""Images that take at most this much memory at the encoder's size are decoded once and kept."""
DIGEST_BYTES = 16
ClassName = str | int
"""A folder's name, or a number where the source has no names."""


class ImageSequence(Sequence[Image.Image]):
    """A sequence of images that are decoded on access."""

    def __init__(self) -> None:
        self._preloaded: dict[Preprocess, Tensor] = {}

    @overload
    def __getitem__(self, row: int) -> Image.Image: ...
    @overload
    def __getitem__(self, row: slice) -> Self: ...
    def __getitem__(self, row: int | slice) -> Image.Image | Self:
        return self.take(np.arange(len(self))[row]) if isinstance(row, slice) else self.open(row)

    @abstractmethod
    def open(self, row: int) -> Image.Image:
        """Decode one image.

        Raises:
            InvalidImage: it cannot be decoded; names its file.
        """

    @abstractmethod
    def take(self, rows: NDArray[np.int64]) -> Self:
        """The images at these rows; decodes nothing."""

    @abstractmethod
    def content(self, row: int) -> bytes:
        """Bytes that identify this image, for a fingerprint. Raises InvalidImage where it cannot be read."""

    def preloaded(self, spec: Preprocess) -> Tensor | None:
        """All images at the encoder's size, uint8 (N, C, H, W); None where they exceed `MAX_PRELOADED_BYTES`."""
        if len(self) * spec.channels * spec.height * spec.width > MAX_PRELOADED_BYTES:
            return None
        if spec not in self._preloaded:
            size = sizing(spec)
            self._preloaded[spec] = torch.stack([size(self[row]) for row in range(len(self))])
        return self._preloaded[spec]


class Files(ImageSequence):
    """Image files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def open(self, row: int) -> Image.Image:
        content = self.content(row)
        try:
            return decode_image(content)
        except InvalidImage as error:
            raise InvalidImage(f"{self.paths[row]}: {error}") from error

    def take(self, rows: NDArray[np.int64]) -> Self:
        return type(self)([self.paths[row] for row in rows])

    def content(self, row: int) -> bytes:
        try:
            return self.paths[row].read_bytes()
        except OSError as error:
            raise InvalidImage(f"{self.paths[row]}: {error}") from error


class Arrays(ImageSequence):
    """Images in memory: uint8 (N, H, W) or (N, H, W, 3)."""

    def __init__(self, images: NDArray[np.uint8]) -> None:
        super().__init__()
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def open(self, row: int) -> Image.Image:
        return Image.fromarray(self.images[row])

    def take(self, rows: NDArray[np.int64]) -> Self:
        return type(self)(self.images[rows])

    def content(self, row: int) -> bytes:
        image = self[row]
        return f"{image.mode}{image.size}".encode() + image.tobytes()


@dataclass(frozen=True)
class ImageSet:
    """Images and their labels (N,) int64.

    Args:
        images: the images.
        labels: their classes.
        stored: (N, D) their embeddings by an old version, where they come with the data, see
            `training.stored_embeddings`.
    """

    images: ImageSequence
    labels: NDArray[np.int64]
    stored: Vectors | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """sha256 over labels, images and old embeddings, in order."""
        return self._hashes[0]

    @property
    def digests(self) -> list[bytes]:
        """Of each image; equal where two images are the same file or have the same pixels in memory."""
        return self._hashes[1]

    @cached_property
    def _hashes(self) -> tuple[str, list[bytes]]:
        """`fingerprint` and `digests`, from one pass over the images, as it reads every one of them."""
        sha256, digests = hashlib.sha256(np.ascontiguousarray(self.labels).tobytes()), []
        for row in range(len(self)):
            content = self.images.content(row)
            sha256.update(content)
            digests.append(hashlib.sha256(content).digest()[:DIGEST_BYTES])
        if self.stored is not None:
            sha256.update(np.ascontiguousarray(self.stored).tobytes())
        return sha256.hexdigest(), digests

    def take(self, rows: NDArray[np.int64]) -> ImageSet:
        """The images at these rows."""
        stored = None if self.stored is None else self.stored[rows]
        return ImageSet(self.images.take(rows), self.labels[rows], stored)

    def keep_classes(self, count: int) -> ImageSet:
        """Only the first `count` classes by number, as in class-incremental protocols."""
        return self._of_classes(np.unique(self.labels)[:count])

    def keep_class_share(self, share: float, seed: int) -> ImageSet:
        """A random share of the classes, at least one; with the same seed a larger share holds all of a smaller one."""
        classes = np.unique(self.labels)
        return self._of_classes(_random_share(classes, share, seed))

    def keep_fraction(self, fraction: float, seed: int) -> ImageSet:
        """A random share of the images, at least one, as `keep_class_share` does."""
        return self.take(np.sort(_random_share(np.arange(len(self)), fraction, seed)))

    def dense(self) -> ImageSet:
        """The same images with labels 0 to C - 1, in the same order."""
        return replace(self, labels=np.unique(self.labels, return_inverse=True)[1].astype(np.int64))

    def _of_classes(self, classes: NDArray[np.int64]) -> ImageSet:
        return self.take(np.flatnonzero(np.isin(self.labels, classes)))


@dataclass(frozen=True)
class Data:
    """What a recipe trains on and is measured on.

    Args:
        train: the training images.
        query, gallery: the evaluation's two sides.
        same: query and gallery are the same images, so each query is left out of its own ranking.
        names: name of every label; None: labels are named by their number.
        skipped: number of files that were left out because they cannot be decoded.
        stored: name of the version whose embeddings come with the images, "" without one.
    """

    train: ImageSet
    query: ImageSet
    gallery: ImageSet
    same: bool = False
    names: Sequence[str] | None = None
    skipped: int = 0
    stored: str = ""

    @property
    def classes(self) -> list[ClassName]:
        """The classes trained on, in the order of their labels."""
        return [self.name(int(label)) for label in np.unique(self.train.labels)]

    def name(self, label: int) -> ClassName:
        """The class of a label."""
        return label if self.names is None else self.names[label]

    def split(self, classes: int | None = None, class_share: float = 1, fraction: float = 1, seed: int = 0) -> Data:
        """Train on the first classes, then on a share of those, then on a share of their images.

        The evaluation stays as it is.

        Raises:
            InvalidArgument: shares outside 0 to 1, more classes than there are, or what is left holds fewer than two.
        """
        for name, share in (("class_share", class_share), ("fraction", fraction)):
            if not 0 < share <= 1:
                raise InvalidArgument(f"{name} must be above 0 and at most 1, not {share}", pointer=f"/{name}")
        there = len(np.unique(self.train.labels))
        if classes is not None and classes > there:
            raise InvalidArgument(
                f"classes must be at most {there}, the number of classes of the training images, not {classes}",
                pointer="/classes",
            )
        train = self.train if classes is None else self.train.keep_classes(classes)
        train = train if class_share == 1 else train.keep_class_share(class_share, seed)
        train = train if fraction == 1 else train.keep_fraction(fraction, seed)
        left = len(np.unique(train.labels))
        if left < 2:
            raise InvalidArgument(
                f"training requires images of at least two classes; {len(train)} images of {left} are left",
                pointer="/data",
            )
        return replace(self, train=train)

    def queries_without_match(self) -> int:
        """The number of queries without an item of their class, other than the query itself."""
        classes, items = np.unique(self.gallery.labels, return_counts=True)
        findable = classes[items >= (2 if self.same else 1)]
        return int((~np.isin(self.query.labels, findable)).sum())


class ImageDataset(Dataset[tuple[Tensor, Tensor]]):
    """An `ImageSet` as a map-style dataset that makes whole batches of tensors.

    Args:
        images: the images.
        spec: preprocessing of the encoder's input.
        augment: a name of `training.data.transforms.AUGMENTATIONS`.

    Raises:
        InvalidArgument: an unknown augmentation.
    """

    def __init__(self, images: ImageSet, spec: Preprocess, augment: str = "none") -> None:
        self.images, self.spec = images, spec
        self.labels = torch.from_numpy(images.labels)
        self.augmentation = find_augmentation(augment)
        self.size = sizing(spec, self.augmentation)
        self.preloaded = None if self.augmentation.size else images.images.preloaded(spec)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        """(C, H, W) float32, and the label."""
        image_BCHW, label_B = self.__getitems__([row])
        return image_BCHW[0], label_B[0]

    def __getitems__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) float32, and the labels (B,); torch's DataLoader calls this for each batch."""
        if self.preloaded is None:
            sized_BCHW = torch.stack([self.size(self.images.images[row]) for row in rows])
        else:
            sized_BCHW = self.preloaded[rows]
        return pixels(sized_BCHW, self.spec, self.augmentation), self.labels[rows]


def batches(images: ImageSet, spec: Preprocess, size: int = 256) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches (B, C, H, W) and (B,) of images in order, preprocessed as in evaluation.

    Args:
        images: the images.
        spec: preprocessing of the encoder's input.
        size: B.
    """
    return DataLoader(ImageDataset(images, spec), batch_size=size, collate_fn=_identity)


def _identity(batch: Any) -> Any:
    """Collates nothing: `ImageDataset` gives whole batches."""
    return batch


def _random_share(values: NDArray[np.int64], share: float, seed: int) -> NDArray[np.int64]:
    order = np.random.default_rng(seed).permutation(len(values))
    return values[order[: max(1, round(share * len(values)))]]
