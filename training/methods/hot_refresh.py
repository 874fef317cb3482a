"""Hot-Refresh (Zhang 2022, arXiv 2201.09724): regression-alleviating compatible training.

Its public code compares forms of the loss, all on unit vectors: `contrast` and `triplet`, each also with new embeddings
of other classes as negatives (its own contribution, the default), `l2`, and BCT with such negatives (`alleviate=true`
of method bct). Weight 1 is its code's, whose other defaults are temperature 0.01 and the 10 hardest negatives of each
kind, as in the command that it documents: that is `temperature=0.01 hardest=10`. Decided here: every other-class sample
of the batch is a negative, temperature 0.05. Its order of backfilling belongs to serving.
"""

from __future__ import annotations

from torch import Tensor

from training.losses.contrasts import regression_alleviating, triplet
from training.losses.gather import gather_batch
from training.losses.losses import cosine_alignment
from training.method import EmbeddedBatch, MethodContext
from training.methods.compatible import Compatible, check_choice

FORMS = ("contrast", "triplet", "l2")


class HotRefresh(Compatible):
    """Base loss + weight * a loss on the similarities of new and old embeddings.

    Args:
        context: see `MethodContext`.
        weight: of the latter.
        temperature: of the cosines of `contrast`.
        form: `contrast`, `triplet` or `l2` (1/2 |u - u_old|^2).
        among_new: new embeddings of other classes are negatives too.
        hardest: only this many nearest negatives of each kind count; 0: all.
        margin: of `triplet`, between distances of unit vectors.
    """

    def __init__(
        self,
        context: MethodContext,
        *,
        weight: float = 1.0,
        temperature: float = 0.05,
        form: str = "contrast",
        among_new: bool = True,
        hardest: int = 0,
        margin: float = 0.8,
    ) -> None:
        super().__init__(context, "hot_refresh", weight)
        check_choice("form", form, FORMS)
        self.form, self.temperature, self.margin = form, temperature, margin
        self.among_new, self.hardest = among_new, hardest

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """Contrast of a new embedding's own old one with old and new embeddings of other classes."""
        batch = gather_batch(batch)
        new_BN, old_BN = self.pair(batch)
        if self.form == "l2":
            return cosine_alignment(new_BN, old_BN)
        loss, degree = (regression_alleviating, self.temperature) if self.form == "contrast" else (triplet, self.margin)
        return loss(new_BN, old_BN, batch.label_B, degree, self.among_new, self.hardest)
