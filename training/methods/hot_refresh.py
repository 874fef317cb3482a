"""Hot-Refresh (Zhang 2022, arXiv 2201.09724): regression-alleviating compatible training.

Decided where the source is silent: every other-class sample of the batch is a negative (the public code can keep the
hardest only), temperature 0.05 and weight 1 as in its code. Its order of backfilling belongs to serving.
"""

from __future__ import annotations

from torch import Tensor

from training.gather import gather_batch
from training.losses import regression_alleviating
from training.method import EmbeddedBatch, MethodContext
from training.methods.compatible import Compatible


class HotRefresh(Compatible):
    """Base loss + weight * regression-alleviating contrast.

    Args:
        context: see `MethodContext`.
        weight: of the contrast.
        temperature: of the cosines.
    """

    def __init__(self, context: MethodContext, *, weight: float = 1.0, temperature: float = 0.05) -> None:
        super().__init__(context, "hot_refresh", weight)
        self.temperature = temperature

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """Whether the own old embedding is nearer than old and new embeddings of other classes."""
        batch = gather_batch(batch)
        return regression_alleviating(*self.pair(batch), batch.label_B, self.temperature)
