"""Fine-tuning baseline l2: new embeddings of old classes stay where they were (a baseline of BCT, arXiv 2003.11942).

Decided where the sources are silent: raw embeddings, the mean over samples of old classes, weight 1, and no start from
the old weights, since architectures may differ.
"""

from __future__ import annotations

from torch import Tensor

from training.losses import half_square
from training.method import EmbeddedBatch, MethodContext
from training.methods.compatible import Compatible


class L2(Compatible):
    """Base loss + weight * 1/2 |z - z_old|^2 over samples of old classes.

    Args:
        context: see `MethodContext`.
        weight: of the square.
    """

    def __init__(self, context: MethodContext, *, weight: float = 1.0) -> None:
        super().__init__(context, "l2", weight)

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """How far old classes have moved."""
        return half_square(*self.pair(batch), self.known(batch))
