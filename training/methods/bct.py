"""Backward-compatible training (BCT, Shen 2020, arXiv 2003.11942): new queries search old items as they are.

Loss = base + weight * influence (section 3): the frozen old head must classify the first n components of the new one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index.errors import InvalidArgument
from training.losses import UNKNOWN, distillation, fit_dim, known_cross_entropy, linear_logits, synthesise_head
from training.method import EmbeddedBatch, MethodContext, Old
from training.methods.compatible import Compatible

INFLUENCES = ("old", "synthesised", "distill")
LOGITS = ("cosine", "raw")


class Bct(Compatible):
    """Base loss plus influence loss. `bct+d`: a recipe whose `dim` exceeds the old one by d.

    Args:
        context: see `MethodContext`.
        influence: what the old head judges. `old`: samples of the classes it knows. `synthesised`: every sample, the
            mean old embedding of each class it does not know appended as a row. `distill`: every sample, by how far
            its distribution on the new embedding is from that on the old one.
        logits: `cosine` (`scale` times the cosines) or `raw` (the old head as it is, as in the public code; on small
            data it can fall below the old model).
        scale: of the cosine logits.
        weight: lambda.
    """

    def __init__(
        self,
        context: MethodContext,
        *,
        influence: str = "synthesised",
        logits: str = "cosine",
        scale: float = 16.0,
        weight: float = 1.0,
    ) -> None:
        super().__init__(context, "bct", weight)
        for name, value, legal in (("influence", influence, INFLUENCES), ("logits", logits, LOGITS)):
            if value not in legal:
                raise InvalidArgument(f"{name} must be one of {', '.join(legal)}, not {value!r}", pointer=f"/{name}")
        old = context.require_old("bct")
        self.influence = influence
        self.scale = scale if logits == "cosine" else None
        if influence == "synthesised":
            head_KN, bias_K, label_C = _synthesised(old)
        else:
            head_KN, bias_K, label_C = *old.head(f"influence={influence}"), old.label_C
        if influence == "old" and bool((label_C == UNKNOWN).all()):
            raise InvalidArgument("the old head knows none of the new classes; use influence=synthesised or distill")
        self.bias_K: Tensor | None
        self.register_buffer("head_KN", head_KN)
        self.register_buffer("bias_K", bias_K)
        self.register_buffer("label_C", label_C)

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """How the old head judges the new embedding."""
        new_BK = self.old_logits(fit_dim(batch.new_BD, self.old_dim))
        if self.influence != "distill":
            return known_cross_entropy(new_BK, self.get_buffer("label_C")[batch.label_B])
        assert batch.old_BN is not None
        return distillation(new_BK, self.old_logits(batch.old_BN))

    def old_logits(self, z_BN: Tensor) -> Tensor:
        """(B, N) embeddings -> (B, K) logits of the old head, without its margin."""
        return linear_logits(z_BN, self.get_buffer("head_KN"), self.bias_K, self.scale)


def _synthesised(old: Old) -> tuple[Tensor, Tensor | None, Tensor]:
    """The old head with a row for every new class that it does not know, and the row of each class."""
    known_KN, bias_K = (old.mean_CN[:0], None) if old.weight_KN is None else (old.weight_KN, old.bias_K)
    missing_C = (old.label_C == UNKNOWN) | (old.weight_KN is None)
    head, bias = synthesise_head(known_KN, bias_K, old.mean_CN[missing_C])
    appended_C = len(known_KN) + torch.cumsum(missing_C, 0) - 1
    return head, bias, torch.where(missing_C, appended_C, old.label_C)
