"""The 1,797 handwritten digits inside scikit-learn, split as in the papers' open-class setting; needs no torch.

old_train   100 images of the digits 0 to 4          what `v1` is trained on
new_train   900 images of all ten digits             what every `v2` is trained on; holds old_train, as in BCT
query       320 images, gallery 577 images           all ten digits; seen by no training, nor by each other
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OLD_DIGITS = 5
OLD_TRAIN = 100
NEW_TRAIN = 900
QUERIES = 320


@dataclass(frozen=True)
class Digits:
    """One part of the split: images (N, 8, 8) uint8, white on black, and labels (N,) int64, 0 to 9."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DigitsSplit:
    """The four parts; `gallery`, `query` and `new_train` share no image."""

    old_train: Digits
    new_train: Digits
    gallery: Digits
    query: Digits


def load_digits_split(seed: int = 0) -> DigitsSplit:
    """Shuffle the digits by `seed` and cut them; the same seed gives the same images everywhere."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    # The file holds ink counts from 0 to 16.
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    new, query, gallery = np.split(order, [NEW_TRAIN, NEW_TRAIN + QUERIES])
    old = new[labels[new] < OLD_DIGITS][:OLD_TRAIN]
    return DigitsSplit(*(Digits(images[part], labels[part]) for part in (old, new, gallery, query)))
