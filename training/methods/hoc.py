"""HOC (Biondi 2024, arXiv 2405.02581): higher-order compatibility by contrast between old and new embeddings.

Decided here: the recipe's head trains, not a fixed d-simplex, as in HBCT's comparison. The paper minimises lambda base
+ (1 - lambda) contrast with lambda 0.1; divided by lambda that is weight 9, which leaves the learning rate of the base
loss as the recipe says. The anchor is the old embedding and same-class pairs are left out of the sum (see the loss).
"""

from __future__ import annotations

from torch import Tensor

from training.losses.contrasts import masked_alignment
from training.losses.gather import gather_batch
from training.method import EmbeddedBatch, MethodContext
from training.methods.compatible import Compatible


class Hoc(Compatible):
    """Base loss + weight * contrast of each old embedding with new ones.

    Args:
        context: see `MethodContext`.
        weight: (1 - lambda) / lambda of eq. 3.
        sharpness: mu, the inverse temperature of the cosines.
    """

    def __init__(self, context: MethodContext, *, weight: float = 9.0, sharpness: float = 10.0) -> None:
        super().__init__(context, "hoc", weight)
        self.sharpness = sharpness

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """Contrast of an old embedding's own new one with new embeddings of other classes."""
        batch = gather_batch(batch)
        return masked_alignment(*self.pair(batch), batch.label_B, self.sharpness)
