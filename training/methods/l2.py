"""Fine-tuning baseline l2: a penalty on the distance between new and old embeddings.

Two forms are in use. HBCT's baseline (arXiv 2506.05826), which passes in its table, penalises all samples: the default,
on unit vectors, where 1/2 |u - u_old|^2 = 1 - cos, with weight 10 (see docs/results/training.md). BCT's eq. 3 (arXiv
2003.11942), which fails in its own table, penalises samples of old classes: over=old, unit=false, weight 1. Decided
where the sources are silent: no start from the old weights, since architectures may differ.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from training.losses.gather import gather_batch
from training.losses.losses import half_squared_distance
from training.method import EmbeddedBatch, MethodContext
from training.methods.compatible import Compatible


class L2(Compatible):
    """Base loss + weight * 1/2 |u - u_old|^2.

    Args:
        context: see `MethodContext`.
        weight: of the square.
        over: `all` samples, or those of `old` classes.
        unit: False compares raw embeddings.
    """

    def __init__(self, context: MethodContext, *, weight: float = 10.0, over: str = "all", unit: bool = True) -> None:
        super().__init__(context, "l2", weight, raw=not unit)
        self.check_over(over)
        self.over, self.unit = over, unit

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """Half the squared distance between new and old embeddings."""
        batch = gather_batch(batch)
        new_BN, old_BN = self.pair(batch)
        if self.unit:
            new_BN, old_BN = F.normalize(new_BN), F.normalize(old_BN)
        return half_squared_distance(new_BN, old_BN, self.known(batch) if self.over == "old" else None)
