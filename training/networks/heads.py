"""Classification heads: embedding -> logits. Called with labels a head applies its margin; without, it never does.

An old head used as a frozen reference is called without labels (BCT's influence term has no margin).
pytorch-metric-learning has CosFace and ArcFace as losses that own their weights and hide their logits; the influence
term needs the logits, so they stand here in plain torch and the tests hold them against that library.
Shape suffixes: B batch, D embedding dimension, C classes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.losses import lorentz
from training.losses.losses import cosines


class Softmax(nn.Linear):
    """z W^T + b."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__(dim, classes)

    def forward(self, z_BD: Tensor, label_B: Tensor | None = None) -> Tensor:
        """(B, D) -> (B, C); labels change nothing."""
        return super().forward(z_BD)


class NormSoftmax(nn.Module):
    """s cos(z, w_c): features and weights normalised, no bias (Zhai and Wu 2019, arXiv 1811.12649).

    Logits lie in [-s, s]. Scale 32 separates up to some thousands of classes.
    """

    def __init__(self, dim: int, classes: int, scale: float = 32.0, margin: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim))
        nn.init.xavier_normal_(self.weight)
        self.scale, self.margin = scale, margin

    def forward(self, z_BD: Tensor, label_B: Tensor | None = None) -> Tensor:
        """(B, D) -> (B, C)."""
        cosine_BC = cosines(z_BD, self.weight)
        if label_B is not None and self.margin:
            own_B1 = label_B[:, None]
            cosine_BC = cosine_BC.scatter(1, own_B1, self.with_margin(cosine_BC.gather(1, own_B1)))
        return self.scale * cosine_BC

    def with_margin(self, cosine: Tensor) -> Tensor:
        """Cosines to the own class, any shape -> the same, made harder."""
        return cosine


class CosFace(NormSoftmax):
    """s (cos(z, w_y) - m) for the own class (Wang 2018, arXiv 1801.09414, eq. 4)."""

    def __init__(self, dim: int, classes: int, scale: float = 32.0, margin: float = 0.4) -> None:
        super().__init__(dim, classes, scale, margin)

    def with_margin(self, cosine: Tensor) -> Tensor:
        """Cosines to the own class, any shape -> cosine - m."""
        return cosine - self.margin


class ArcFace(NormSoftmax):
    """s cos(angle(z, w_y) + m) for the own class (Deng 2019, arXiv 1801.07698, eq. 3).

    Beyond angle pi - m, where cos(angle + m) would rise again, it goes on as cos(angle) - m sin(m), which keeps the
    logit falling with the angle (the authors' code and pytorch-metric-learning do the same).
    """

    def __init__(self, dim: int, classes: int, scale: float = 64.0, margin: float = 0.5) -> None:
        super().__init__(dim, classes, scale, margin)

    def with_margin(self, cosine: Tensor) -> Tensor:
        """Cosines to the own class, any shape -> cosine of the angle plus m."""
        # cos(a + m) has an infinite slope in cos a at a = 0: a sine kept above 1e-3 bounds it by about 500.
        sine = (1 - cosine.square()).clamp(min=1e-6).sqrt()
        harder = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        return torch.where(
            cosine >= math.cos(math.pi - self.margin), harder, cosine - self.margin * math.sin(self.margin)
        )


class LorentzMLR(nn.Module):
    """Signed distances to C hyperplanes of the hyperboloid, times |z_c| (HBCT, Bui 2025, arXiv 2506.05826, eq. 9).

    In the Euclidean reparametrisation a hyperplane is a direction z_c in R^D and an offset a_c along it:
    logit_c(x) = |z_c| / sqrt(K) asinh(sqrt(K) alpha_c / |z_c|),
    alpha_c = cosh(sqrt(K) a_c) <z_c, x> - sinh(sqrt(K) a_c) |z_c| t(x), with x the space part and t(x) the time part.
    """

    def __init__(self, dim: int, classes: int, curvature: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, dim).uniform_(-(dim**-0.5), dim**-0.5))
        self.offset = nn.Parameter(torch.zeros(classes))
        self.curvature = curvature

    def forward(self, z_BD: Tensor, label_B: Tensor | None = None) -> Tensor:
        """Space parts (B, D) -> logits (B, C); labels change nothing."""
        return lorentz.hyperplane_logits(z_BD, self.weight, self.offset, self.curvature)


HEADS: dict[str, Callable[[int, int], nn.Module]] = {
    "softmax": Softmax,
    "norm_softmax": NormSoftmax,
    "cosface": CosFace,
    "arcface": ArcFace,
    "lorentz_mlr": LorentzMLR,
}
"""name -> (dim, classes) -> head, called with raw embeddings (B, D), and labels (B,) for its margin: logits (B, C)."""


def linear_weight(name: str, weight_CD: Tensor) -> tuple[Tensor, float | None]:
    """The weight of a head, by name, as it reads unit embeddings; and s where its logits are s times cosines."""
    scale = inspect.signature(HEADS[name]).parameters.get("scale")
    return (weight_CD, None) if scale is None else (scale.default * F.normalize(weight_CD), scale.default)
