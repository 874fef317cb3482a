"""Trainings that diverge, which would otherwise write a version that embeds everything alike."""

from __future__ import annotations

import numpy as np

from index.errors import RegraftError
from index.space import Vectors


class Diverged(RegraftError):
    """The loss or embeddings of a training are no longer finite."""

    status = 422
    code = "diverged"

    def __init__(self, sign: str) -> None:
        super().__init__(f"{sign}: the training diverged; try a lower rate or lower weights of the method's losses")


def check_finite(embeddings_ND: Vectors) -> None:
    """Raise Diverged unless the trained model's embeddings are finite."""
    if not np.isfinite(embeddings_ND).all():
        raise Diverged("embeddings are not finite")
