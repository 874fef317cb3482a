"""What a batch holds follows from seed, epoch and place alone, and processes share it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from index.errors import InvalidArgument
from training.data.batching import EpochBatchSampler, mix_seeds, training_batches
from training.recipes import find_recipe
from training.sources import load_data

RECIPE = replace(find_recipe("digits_independent"), augment="shift", batch_size=300)
IMAGES = load_data("digits_new", "").train


def rows(order: EpochBatchSampler, epoch: int) -> list[list[int]]:
    order.set_epoch(epoch)
    return [draw.rows for draw in order]


def test_an_epoch_draws_every_image_at_most_once_in_full_batches() -> None:
    drawn = rows(EpochBatchSampler(10, 3, seed=0), 0)

    assert [len(batch) for batch in drawn] == [3, 3, 3]
    assert len({row for batch in drawn for row in batch}) == 9


def test_fewer_images_than_a_batch_make_one_batch() -> None:
    assert [sorted(batch) for batch in rows(EpochBatchSampler(5, 8, seed=0), 3)] == [[0, 1, 2, 3, 4]]


def test_seed_and_epoch_decide_the_order_whatever_was_drawn_before() -> None:
    first, again = EpochBatchSampler(50, 5, seed=1), EpochBatchSampler(50, 5, seed=1)
    rows(first, 0)

    assert rows(first, 2) == rows(again, 2)
    assert rows(first, 2) != rows(first, 1)
    assert rows(first, 2) != rows(EpochBatchSampler(50, 5, seed=2), 2)


def test_processes_share_each_batch_of_one_process() -> None:
    whole = rows(EpochBatchSampler(30, 6, seed=0), 4)
    shares = [rows(EpochBatchSampler(30, 6, 0, rank, 3), 4) for rank in range(3)]

    assert [[row for part in parts for row in part] for parts in zip(*shares, strict=True)] == whole


def test_processes_share_a_last_small_set_equally() -> None:
    shares = [rows(EpochBatchSampler(5, 8, 0, rank, 2), 0) for rank in range(2)]

    assert [[len(batch) for batch in share] for share in shares] == [[2], [2]]
    assert not set(shares[0][0]) & set(shares[1][0])


def test_a_batch_that_processes_cannot_share_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="batch_size must be a multiple of the 2 processes"):
        EpochBatchSampler(30, 5, 0, 0, 2)


def test_augmentation_follows_from_the_place_too_and_leaves_other_random_numbers_alone() -> None:
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)
    whole = list(training_batches(IMAGES, RECIPE, {}, epoch=2))
    assert torch.equal(torch.rand(3), undisturbed)

    torch.rand(7)
    again = list(training_batches(IMAGES, RECIPE, {}, epoch=2))

    assert len(whole) == 3
    for (image, label, _), (same_image, same_label, _) in zip(whole, again, strict=True):
        assert torch.equal(image, same_image)
        assert torch.equal(label, same_label)
    other = next(iter(training_batches(IMAGES, replace(RECIPE, seed=7), {}, epoch=2)))
    assert not torch.equal(whole[0][0], other[0])


def test_cached_embeddings_go_with_their_images() -> None:
    made_SN = torch.from_numpy(np.stack([IMAGES.labels, np.arange(len(IMAGES))], axis=1))
    _, label_B, cached = next(iter(training_batches(IMAGES, RECIPE, {"old": made_SN})))

    assert torch.equal(cached["old"][:, 0], label_B)
    assert len(cached["old"][:, 1].unique()) == 300


def test_every_number_changes_a_mixed_seed() -> None:
    assert (
        len({mix_seeds(0, 1, 2), mix_seeds(1, 1, 2), mix_seeds(0, 2, 2), mix_seeds(0, 1, 3), mix_seeds(2, 1, 0)}) == 5
    )


def test_kept_images_are_augmented_by_workers_to_the_same_batches() -> None:
    alone, helped = (list(training_batches(IMAGES, replace(RECIPE, workers=workers), {})) for workers in (0, 1))

    for (image, label, _), (same_image, same_label, _) in zip(alone, helped, strict=True):
        assert torch.equal(image, same_image)
        assert torch.equal(label, same_label)
