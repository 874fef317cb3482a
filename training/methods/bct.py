"""Backward-compatible training (BCT, Shen 2020, arXiv 2003.11942): new queries search old items as they are.

Loss = base + weight * influence (section 3): a frozen classifier of the old space must classify the first n components
of the new embedding. By default that is the public form (BT2's and OCA's code): rows are the mean unit old embeddings
of all classes, the new embedding is a unit vector, the weight is 10.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from index.errors import InvalidArgument
from training.losses.gather import gather_batch
from training.losses.losses import UNKNOWN, distillation, fit_dim, known_cross_entropy, linear_logits, synthesise_head
from training.method import EmbeddedBatch, MethodContext, OldSummary
from training.methods.compatible import Compatible, check_choice, check_raw_logits, cosine_scale

INFLUENCES = ("old", "synthesised", "distill")
LOGITS = ("unit", "head", "cosine", "raw")


class Bct(Compatible):
    """Base loss plus influence loss. `bct+d`: a recipe whose `dim` exceeds the old one by d.

    Args:
        context: see `MethodContext`.
        influence: what the influence loss is over. `old`: samples of classes that the old head knows. `synthesised`:
            all samples, with the mean old embedding of each class that it does not know appended as a row. `distill`:
            all samples, by the KL divergence of its class distributions on the old and the new embedding.
        logits: `unit` (unit embeddings on the mean unit old embedding of every class, without the old head), `head`
            (unit embeddings on the old head, as it was trained), `cosine` (`scale` times the cosines with its rows) or
            `raw` (the paper's letter: raw embeddings on the old head; on small data it can fall below the old model).
        scale: of the cosine logits; 0: sqrt(2) log(K - 1) for K rows, see `cosine_scale`.
        weight: lambda, of the influence loss.
        alleviate: the new head's logits of other classes are negatives too (`bct_ract` of Hot-Refresh's public code,
            Zhang 2022, arXiv 2201.09724); not for `distill`.
    """

    def __init__(
        self,
        context: MethodContext,
        *,
        influence: str = "synthesised",
        logits: str = "unit",
        scale: float = 0.0,
        weight: float = 10.0,
        alleviate: bool = False,
    ) -> None:
        super().__init__(context, "bct", weight, raw=logits == "raw")
        check_choice("influence", influence, INFLUENCES)
        check_choice("logits", logits, LOGITS)
        if alleviate and influence == "distill":
            raise InvalidArgument("alleviate requires labels: influence old or synthesised", pointer="/alleviate")
        old = context.require_old("bct")
        if logits == "raw":
            check_raw_logits(old)
        self.influence, self.alleviate = influence, alleviate
        self.unit = logits in {"unit", "head"}
        if logits == "unit":
            head_KN, bias_K, label_C = _class_means(old, influence)
        elif influence == "synthesised":
            head_KN, bias_K, label_C = _synthesised(old, raw=logits == "raw")
        else:
            head_KN, bias_K, label_C = *old.head(f"influence={influence}"), old.label_C
        if influence == "old" and bool((label_C == UNKNOWN).all()):
            raise InvalidArgument("the old head has none of the new classes; use influence=synthesised or distill")
        self.scale = cosine_scale(scale, len(head_KN)) if logits == "cosine" else None
        self.bias_K: Tensor | None
        self.register_buffer("head_KN", head_KN)
        self.register_buffer("bias_K", bias_K)
        self.register_buffer("label_C", label_C)

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """Cross-entropy, or KL divergence, of the old classifier on the new embedding."""
        if self.influence == "old":
            batch = gather_batch(batch)
        new_BK = self.old_logits(fit_dim(batch.new_BD, self.old_dim))
        if self.influence == "distill":
            assert batch.old_BN is not None
            return distillation(new_BK, self.old_logits(batch.old_BN))
        if self.alleviate:
            others_BC = self.classifier.head(batch.new_BD).scatter(1, batch.label_B[:, None], -torch.inf)
            new_BK = torch.cat([new_BK, others_BC], dim=1)
        # Label smoothing would give a share of the label to masked logits, which are minus infinity.
        smoothing = 0.0 if self.alleviate else self.classifier.label_smoothing
        return known_cross_entropy(new_BK, self.get_buffer("label_C")[batch.label_B], smoothing)

    def old_logits(self, z_BN: Tensor) -> Tensor:
        """(B, N) embeddings -> (B, K) logits of the old classifier, without a margin."""
        input_BN = F.normalize(z_BN) if self.unit else z_BN
        return linear_logits(input_BN, self.get_buffer("head_KN"), self.bias_K, self.scale)


def _class_means(old: OldSummary, influence: str) -> tuple[Tensor, None, Tensor]:
    """The mean unit old embedding of every class as rows, and each class's row; UNKNOWN leaves a class out of `old`."""
    means_CN = old.class_means(raw=False)
    row_C = torch.arange(len(means_CN))
    known_C = old.label_C != UNKNOWN
    return means_CN, None, torch.where(known_C, row_C, UNKNOWN) if influence == "old" else row_C


def _synthesised(old: OldSummary, raw: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The old head with a row appended for every class that it does not know, and the row of each class."""
    means_CN = old.class_means(raw)
    known_KN, bias_K = (means_CN[:0], None) if old.weight_KN is None else (old.weight_KN, old.bias_K)
    missing_C = (old.label_C == UNKNOWN) | (old.weight_KN is None)
    if old.head_scale is not None:
        means_CN = old.head_scale * F.normalize(means_CN)
    head, bias = synthesise_head(known_KN, bias_K, means_CN[missing_C])
    appended_C = len(known_KN) + torch.cumsum(missing_C, 0) - 1
    return head, bias, torch.where(missing_C, appended_C, old.label_C)
