"""HBCT (Bui 2025, arXiv 2506.05826): compatible training in hyperbolic space, by entailment cones of old embeddings.

z -> z / sqrt(dim) -> norm clipped at zeta -> exponential map. Each update clips further out (1.0, 1.2, 1.4, ...), which
leaves room inside the entailment cone of every old point. Without an old version only the base loss is trained: that
makes the hyperbolic first version that HBCT needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.errors import InvalidArgument
from index.version import EdgeKind
from training.losses import lorentz
from training.losses.contrasts import entailment, info_nce, rince, rince_of_cosines
from training.losses.gather import gather_batch
from training.method import EmbeddedBatch, MethodContext, Step
from training.methods.compatible import adacos_scale, check_choice

CURVATURE = 1.0
"""K of the exported space."""

HEAD_STARTS = ("drawn", "adacos")
LEAST_ROOM = 1e-3
"""By how much zeta must exceed the distances of old embeddings, which differ from their own zeta by rounding."""
CONTRASTS = ("rince", "cosine", "info_nce", "none")


class Lift(nn.Module):
    """Raw embeddings -> space parts, see `training.losses.lorentz.lift`."""

    def __init__(self, zeta: float) -> None:
        super().__init__()
        self.zeta = zeta

    def forward(self, z_BD: Tensor) -> Tensor:
        """(B, D) -> (B, D), at most zeta from the origin."""
        return lorentz.lift(z_BD, self.zeta, CURVATURE)


class Hbct(nn.Module):
    """Base loss + weight * (entailment + contrast); the recipe's head is lorentz_mlr, its space lorentz.

    Args:
        context: see `MethodContext`.
        zeta: largest distance from the origin; 0.2 more than the old version's.
        head_start: length of the head's first rows: `drawn`, 0.58 on average, or `adacos`, the scale that so many
            classes want. Embeddings end at zeta, so only long rows make large logits: docs/decisions/0059.
        weight: of both compatibility losses.
        entail: False leaves the entailment loss out (an ablation).
        contrast: `rince`, or as ablations `cosine` (RINCE on cosines, its form for SimCLR), `info_nce` or `none`.
        temperature: of the contrast.
        density: beta of RINCE.
        boundary: eps, the cones' width.

    Raises:
        InvalidArgument: either space is not lorentz, old and new dimensions differ, or old embeddings reach zeta.
    """

    trains_encoder = True
    edge: nn.Module | None = None

    def __init__(
        self,
        context: MethodContext,
        *,
        zeta: float = 1.2,
        head_start: str = "drawn",
        weight: float = 0.3,
        entail: bool = True,
        contrast: str = "rince",
        temperature: float = 0.5,
        density: float = 0.01,
        boundary: float = 0.1,
    ) -> None:
        super().__init__()
        check_choice("head_start", head_start, HEAD_STARTS)
        _check(context, zeta, contrast)
        self.edge_kind = EdgeKind.IDENTITY if context.old else None
        self.transform = Lift(zeta)
        self.classifier = context.classifier(context.dim)
        if head_start == "adacos":
            _set_row_norms(self.classifier.head.get_parameter("weight"), adacos_scale(context.classes))
        self.weight, self.boundary = weight, boundary
        self.entail = entail
        self.contrast: Callable[[Tensor, Tensor], Tensor] | None = {
            "rince": lambda new, old: rince(new, old, CURVATURE, temperature, density),
            "cosine": lambda new, old: rince_of_cosines(new, old, CURVATURE, temperature, density),
            "info_nce": lambda new, old: info_nce(new, old, CURVATURE, temperature),
            "none": None,
        }[contrast]

    def forward(self, batch: EmbeddedBatch) -> Step:
        """Base loss of the lifted embedding, and the compatibility losses against the old one."""
        base = self.classifier(self.transform(batch.new_BD), batch.label_B)
        terms = self.compatibility(batch)
        return Step(base + self.weight * sum(terms.values()), {"base": base, **terms})

    def compatibility(self, batch: EmbeddedBatch) -> dict[str, Tensor]:
        """The compatibility losses by name; none without an old version."""
        if batch.old_BN is None:
            return {}
        batch = gather_batch(batch)
        assert batch.old_BN is not None
        new_BD, terms = self.transform(batch.new_BD), {}
        if self.entail:
            terms["entailment"] = entailment(new_BD, batch.old_BN, CURVATURE, self.boundary)
        if self.contrast is not None:
            terms["contrast"] = self.contrast(new_BD, batch.old_BN)
        return terms

    def head_weights(self) -> None:
        """None: the head is not linear."""


@torch.no_grad()
def _set_row_norms(rows_CD: Tensor, norm: float) -> None:
    rows_CD.copy_(norm * F.normalize(rows_CD))


def _check(context: MethodContext, zeta: float, contrast: str) -> None:
    check_choice("contrast", contrast, CONTRASTS)
    if context.space != "lorentz":
        raise InvalidArgument(f"hbct needs space=lorentz, not {context.space}", pointer="/space")
    if context.old is not None and context.old.space != "lorentz":
        raise InvalidArgument(
            "hbct needs a hyperbolic old version (space=lorentz): train one with method hbct and no old version",
            pointer="/old",
        )
    if context.old is not None and context.old.dim != context.dim:
        raise InvalidArgument(
            f"hbct needs the old version's dimension {context.old.dim}, not {context.dim}", pointer="/dim"
        )
    if context.old is not None and zeta < context.old.reach + LEAST_ROOM:
        raise InvalidArgument(
            f"zeta must be above {context.old.reach:.2f}, the largest distance of an old embedding from the origin; "
            f"it is {zeta}, and HBCT clips each update 0.2 further out",
            pointer="/zeta",
        )
