"""BT2, basis transformation (Zhou 2023, arXiv 2211.03989): the old space, the independent new space, and d dimensions.

The backbone gives phi1 (m + n numbers; m the independent new dimension, n the old one). What ships is

    phi2 = unit(f(phi1))               d numbers, f linear: what is new about old
    phi3 = unit(phi1[:m])              m numbers: learns to be the independent new embedding
    phi4 = C B1 phi3                   m numbers
    phi5 = B2 [phi2; phi4[:n - d]]     n numbers: learns to be the old embedding
    phi_new = [phi5; phi4[n - d:]]     m + d numbers, |phi_new|^2 = 1 + C^2

with B1, B2 orthogonal: phi3 can be read back from phi_new, so compatibility costs no accuracy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.errors import InvalidArgument
from index.version import EdgeKind
from training.losses.losses import cosine_alignment, linear_logits
from training.method import EmbeddedBatch, MethodContext, Step
from training.methods.compatible import MEAN_LOGITS, check_choice, check_spaces, cosine_scale
from training.networks.orthogonal import Orthogonal


class BasisTransformation(nn.Module):
    """phi1 -> phi_new: see the module's formulas.

    Args:
        old_dim: n.
        independent_dim: m.
        extra: d, between n - m and n.
        scale: C.
    """

    def __init__(self, old_dim: int, independent_dim: int, extra: int, scale: float) -> None:
        super().__init__()
        self.independent_dim, self.kept, self.scale = independent_dim, old_dim - extra, scale
        self.f = nn.Linear(independent_dim + old_dim, extra)
        self.b1, self.b2 = Orthogonal(independent_dim), Orthogonal(old_dim)

    def parts(self, phi1_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, m + n) -> phi3 (B, m), phi5 (B, n) and the rest of phi4 (B, m + d - n)."""
        phi2 = F.normalize(self.f(phi1_BD))
        phi3 = F.normalize(phi1_BD[:, : self.independent_dim])
        phi4 = self.scale * self.b1(phi3)
        phi5 = self.b2(torch.cat([phi2, phi4[:, : self.kept]], dim=1))
        return phi3, phi5, phi4[:, self.kept :]

    def forward(self, phi1_BD: Tensor) -> Tensor:
        """(B, m + n) -> phi_new (B, m + d)."""
        _, phi5, rest = self.parts(phi1_BD)
        return torch.cat([phi5, rest], dim=1)

    def inverse(self) -> Tensor:
        """The matrix (m, m + d) that gives phi3 back from phi_new."""
        b1, b2 = self.b1.matrix(), self.b2.matrix()
        undo_b2 = torch.eye(len(b2) + len(b1) - self.kept).to(b2)
        undo_b2[: len(b2), : len(b2)] = b2.T
        return b1.T @ undo_b2[self.f.out_features :] / self.scale


class Bt2(nn.Module):
    """CE(head, phi3) + a (1 - phi3.u_ind) + b CE(old class means, unit(phi5)) + c (1 - unit(phi5).u_old).

    Args:
        context: `dim` is m + n; needs an old version, and an independent one of dimension m.
        extra: d.
        scale: C.
        independent_weight: a.
        influence_weight: b.
        old_weight: c.
        logits: of the class means. `unit`: means of unit old embeddings. `raw`: of raw ones, the paper's letter (its
            models end in a normalisation). `cosine`: `logit_scale` times the cosines.
        logit_scale: of the cosine logits; 0: sqrt(2) log(C - 1), see `cosine_scale`.

    Raises:
        InvalidArgument: `dim` or `extra` cannot work (says which would), an unknown kind of logits, or see
            `check_spaces`.
    """

    trains_encoder = True
    edge_kind = EdgeKind.TRUNCATE
    edge: nn.Module | None = None

    def __init__(
        self,
        context: MethodContext,
        *,
        extra: int = 32,
        scale: float = 2.0,
        independent_weight: float = 1.0,
        influence_weight: float = 10.0,
        old_weight: float = 5.0,
        logits: str = "unit",
        logit_scale: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("logits", logits, MEAN_LOGITS)
        if not scale > 0:
            raise InvalidArgument(f"bt2's scale must be above 0, not {scale}", pointer="/scale")
        old = context.require_old("bt2")
        check_spaces(context, old)
        independent_dim = _independent_dim(context, old.dim, extra)
        self.transform = BasisTransformation(old.dim, independent_dim, extra, scale)
        self.classifier = context.classifier(independent_dim)
        self.weights = independent_weight, influence_weight, old_weight
        self.logit_scale = cosine_scale(logit_scale, context.classes) if logits == "cosine" else None
        self.register_buffer("mean_CN", old.class_means(raw=logits == "raw"))

    def forward(self, batch: EmbeddedBatch) -> Step:
        """The four terms; phi5 is read as a unit vector, as in the public code."""
        assert batch.old_BN is not None
        assert batch.independent_BM is not None
        phi3, phi5, _ = self.transform.parts(batch.new_BD)
        logits_BC = linear_logits(F.normalize(phi5), self.get_buffer("mean_CN"), scale=self.logit_scale)
        terms = {
            "base": self.classifier(phi3, batch.label_B),
            "independent": cosine_alignment(phi3, batch.independent_BM),
            "influence": F.cross_entropy(logits_BC, batch.label_B, label_smoothing=self.classifier.label_smoothing),
            "old": cosine_alignment(phi5, batch.old_BN),
        }
        weighted = [weight * term for weight, term in zip((1.0, *self.weights), terms.values(), strict=True)]
        return Step(torch.stack(weighted).sum(), terms)

    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """The head on phi3 as one on phi_new."""
        weight, bias = self.classifier.weights()
        return weight @ self.transform.inverse().detach(), bias


def _independent_dim(context: MethodContext, old_dim: int, extra: int) -> int:
    """Dimension m of the independent model that `dim` leaves.

    Raises:
        InvalidArgument: there is no such model, `dim` leaves none or another one, or d is outside n - m to n.
    """
    dim, given = context.dim, context.independent_dim
    if given == 0:
        raise InvalidArgument(
            "bt2 requires an independently trained new version: set independent=", pointer="/independent"
        )
    independent_dim = dim - old_dim
    if given is not None and given != independent_dim:
        raise InvalidArgument(
            f"bt2's dim must be the independent dimension {given} plus the old one {old_dim}, so {given + old_dim}, "
            f"not {dim}",
            pointer="/dim",
        )
    if independent_dim < 1:
        raise InvalidArgument(
            f"bt2's dim must be the independent dimension plus the old one, so above {old_dim}, not {dim}",
            pointer="/dim",
        )
    least = max(1, old_dim - independent_dim)
    if not least <= extra <= old_dim:
        raise InvalidArgument(
            f"bt2's extra must be {least} to {old_dim}, not {extra}: n - m <= extra <= n, with the old dimension "
            f"n = {old_dim} and the independent dimension m = {independent_dim}",
            pointer="/extra",
        )
    return independent_dim
