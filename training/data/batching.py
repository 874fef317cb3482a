"""Order of the images in batches, and their augmentation: both follow from seed, epoch and batch number alone.

So a training that was killed resumes as if it had not been, whatever had been drawn or prefetched when it died, and
with any number of worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from index.errors import InvalidArgument, RegraftError
from training.data.images import ImageDataset, ImageSet
from training.recipes import Recipe

TrainingBatch = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Images (B, C, H, W), labels (B,), and cached outputs of other models (B, N), by name."""


@dataclass(frozen=True)
class Draw:
    """One batch: its rows, and the seed of its augmentation."""

    rows: list[int]
    seed: int


class EpochBatchSampler(Sampler[Draw]):
    """Yields the batches of one epoch after the other. A last batch that is not full is dropped.

    The processes of one training share each batch equally, so their number does not change which images are in a batch.

    Args:
        count: number of images; fewer than `size` make one batch.
        size: images in a batch, over all processes.
        seed: decides everything, together with the epoch.
        rank: this process.
        world: processes.

    Raises:
        InvalidArgument: the processes cannot share a batch equally.
    """

    def __init__(self, count: int, size: int, seed: int, rank: int = 0, world: int = 1) -> None:
        if size % world or count < world:
            raise InvalidArgument(
                f"batch_size must be a multiple of the {world} processes that share it, not {size}",
                pointer="/batch_size",
            )
        self.count, self.size, self.seed, self.rank, self.world = count, size, seed, rank, world
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass draws; Lightning calls this before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return max(1, self.count // self.size)

    def __iter__(self) -> Iterator[Draw]:
        row_S = np.random.default_rng([self.seed, self.epoch]).permutation(self.count)
        share = min(self.size, self.count) // self.world
        for place in range(len(self)):
            first = place * self.size + self.rank * share
            rows = row_S[first : first + share].tolist()
            yield Draw(rows, mix_seeds(self.seed, self.epoch, place, self.rank))


class BatchDataset(Dataset[TrainingBatch | RegraftError]):
    """A batch for each `Draw`, or the error that there is none, for `BatchLoader` to raise.

    Args:
        tensors: the images.
        cached: embeddings (S, N) of all of them, by name, to go with each batch.
        views: how often each image is in a batch, each time augmented anew: the batch as a whole, then again.
        skip_images: no model needs the images, so none is decoded: they are (B, 0).
    """

    def __init__(
        self, tensors: ImageDataset, cached: Mapping[str, Tensor], views: int = 1, *, skip_images: bool = False
    ) -> None:
        self.tensors, self.cached, self.views, self.skip_images = tensors, cached, views, skip_images

    def __getitem__(self, draw: Draw) -> TrainingBatch | RegraftError:
        try:
            return self.batch(draw)
        except RegraftError as error:
            return error

    def batch(self, draw: Draw) -> TrainingBatch:
        """The batch. Raises InvalidImage where an image cannot be decoded."""
        rows = draw.rows * self.views
        cached = {name: made_SN[rows] for name, made_SN in self.cached.items()}
        if self.skip_images:
            return torch.empty(len(rows), 0), self.tensors.labels[rows], cached
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(draw.seed)
            image_BCHW, label_B = self.tensors.__getitems__(rows)
        return image_BCHW, label_B, cached


class BatchLoader(DataLoader[TrainingBatch | RegraftError]):
    """Loads a `BatchDataset`, and raises its workers' errors as they are.

    torch raises an error of a worker with the worker's stack trace in place of its message.
    """

    def __iter__(self) -> Iterator[TrainingBatch]:  # type: ignore[override]  # torch wants its own, private class
        return map(_raised, super().__iter__())


def _raised(loaded: TrainingBatch | RegraftError) -> TrainingBatch:
    if isinstance(loaded, RegraftError):
        raise loaded
    return loaded


def training_batches(
    images: ImageSet,
    recipe: Recipe,
    cached: Mapping[str, Tensor],
    rank: int = 0,
    world: int = 1,
    epoch: int = 0,
    views: int = 1,
    *,
    skip_images: bool = False,
) -> BatchLoader:
    """The batches that train a recipe in one process, from an epoch on; see `EpochBatchSampler` and `BatchDataset`."""
    tensors = ImageDataset(images, recipe.preprocess, recipe.augment)
    order = EpochBatchSampler(len(tensors), recipe.batch_size, recipe.seed, rank, world)
    order.set_epoch(epoch)
    return BatchLoader(
        BatchDataset(tensors, cached, views, skip_images=skip_images),
        batch_size=None,
        sampler=order,
        num_workers=recipe.workers,
        persistent_workers=recipe.workers > 0,
        generator=torch.Generator(),  # its own, so that starting a pass draws from nobody else's
    )


def mix_seeds(*numbers: int) -> int:
    """One seed from several numbers, each of which changes it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
