"""OCA, orthogonal compatible aligned representations (Ricci 2024, arXiv 2408.08793): new dimensions for new classes.

The backbone gives h = [h_bct | h_e], n + d numbers, made unit as in the authors' code. h_bct is aligned with the old
space; h_perp = Q h, Q orthogonal, is classified with all of h. What is stored is h; its first n components search old
items. Q, which starts at random, and the heads are not exported.

Shape suffixes: B batch, N old dimension, C classes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from index.errors import InvalidArgument
from index.version import EdgeKind
from training.losses.losses import cosine_alignment, linear_logits
from training.method import EmbeddedBatch, MethodContext, Step
from training.methods.compatible import MEAN_LOGITS, check_choice, check_spaces, cosine_scale
from training.networks.orthogonal import Orthogonal


class Oca(nn.Module):
    """CE(W, h_perp) + a CE(P, h_bct) + b mean(1 - cos(h_bct, P_y)); eq. 5 has the sign of the last term wrong.

    P holds the mean unit old embedding of each class of the new data. Label smoothing reaches both cross-entropies.

    Args:
        context: `dim` is n + d.
        influence_weight: a; the authors' code weighs the terms 5 : 10 : 5, so 2. The paper prints 10.
        alignment_weight: b; 1 by their code, 5 by the paper.
        logits: of P. `unit`: h is a unit vector throughout. `raw`: the paper's letter, h and the means as they are.
            `cosine`: h as it is, `scale` times the cosines.
        scale: of the cosine logits; 0: sqrt(2) log(C - 1), see `cosine_scale`.

    Raises:
        InvalidArgument: no extra dimension is left, an unknown kind of logits, or see `check_spaces`.
    """

    trains_encoder = True
    edge_kind = EdgeKind.TRUNCATE
    edge: nn.Module | None = None

    def __init__(
        self,
        context: MethodContext,
        *,
        influence_weight: float = 2.0,
        alignment_weight: float = 1.0,
        logits: str = "unit",
        scale: float = 0.0,
    ) -> None:
        super().__init__()
        old = context.require_old("oca")
        check_spaces(context, old, raw=logits == "raw")
        if context.dim <= old.dim:
            raise InvalidArgument(
                f"oca's dim must be the old dimension plus extra ones, so above {old.dim}, not {context.dim}",
                pointer="/dim",
            )
        check_choice("logits", logits, MEAN_LOGITS)
        self.transform = nn.Identity()
        self.unit = logits == "unit"
        self.rotation = Orthogonal(context.dim, random=True)
        self.classifier = context.classifier(context.dim)
        self.influence_weight, self.alignment_weight = influence_weight, alignment_weight
        self.scale = cosine_scale(scale, context.classes) if logits == "cosine" else None
        self.register_buffer("mean_CN", old.class_means(raw=logits == "raw"))

    def forward(self, batch: EmbeddedBatch) -> Step:
        """The three terms."""
        mean_CN = self.get_buffer("mean_CN")
        h_BD = F.normalize(batch.new_BD) if self.unit else batch.new_BD
        h_bct_BN = h_BD[:, : mean_CN.shape[1]]
        base = self.classifier(self.rotation(h_BD), batch.label_B)
        logits_BC = linear_logits(h_bct_BN, mean_CN, scale=self.scale)
        influence = F.cross_entropy(logits_BC, batch.label_B, label_smoothing=self.classifier.label_smoothing)
        alignment = cosine_alignment(h_bct_BN, mean_CN[batch.label_B])
        loss = base + self.influence_weight * influence + self.alignment_weight * alignment
        return Step(loss, {"base": base, "influence": influence, "alignment": alignment})

    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """W Q: the head W on Q h as one on h."""
        weight, bias = self.classifier.weights()
        return weight @ self.rotation.matrix().detach(), bias
