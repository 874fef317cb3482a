"""Losses as pure functions of tensors: nothing here knows a model, a batch or the loop.

Shape suffixes: B batch, D new dimension, N old dimension, C classes, S samples of a whole dataset.
`new_*` carries gradients, `old_*` is what the frozen old model gave and is detached here, whatever the caller did.
Every loss is a mean over the samples it concerns and 0 (still differentiable) when it concerns none. A contrastive
loss takes the whole batch; across processes, gather first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from index.errors import InvalidArgument
from training import lorentz
from training.precision import full_precision

UNKNOWN = -1
"""The old label of a sample whose class the old head does not know."""


def fit_dim(z_BD: Tensor, n: int) -> Tensor:
    """The first n components, filled with zeros when there are fewer: (B, D) -> (B, n).

    An old head padded with zeros for d extra dimensions gives on z exactly what the old head gives on `fit_dim(z, n)`
    (BCT, Shen 2020, arXiv 2003.11942, section 4: different feature dimensions).
    """
    return z_BD[:, :n] if z_BD.shape[1] >= n else F.pad(z_BD, (0, n - z_BD.shape[1]))


def linear_logits(z_BN: Tensor, weight_CN: Tensor, bias_C: Tensor | None = None, scale: float | None = None) -> Tensor:
    """(B, C) logits of a linear head: as it is (`scale` None), else `scale` times the cosines, without bias."""
    if scale is None:
        return F.linear(z_BN, weight_CN, bias_C)
    return scale * cosines(z_BN, weight_CN)


@full_precision
def cosines(x_BD: Tensor, y_CD: Tensor) -> Tensor:
    """(B, C) cosines of all pairs; a zero row has cosine 0 with everything."""
    return F.linear(F.normalize(x_BD), F.normalize(y_CD))


def class_means(z_SN: Tensor, label_S: Tensor, classes: int) -> Tensor:
    """(C, N) mean embedding of each class.

    Raises:
        InvalidArgument: a class has no sample; names the first.
    """
    count_C = torch.bincount(label_S, minlength=classes)
    if (count_C == 0).any():
        empty = int((count_C == 0).nonzero()[0])
        raise InvalidArgument(f"class {empty} of {classes} has no sample, so it has no mean embedding")
    total_CN = z_SN.new_zeros(classes, z_SN.shape[1]).index_add_(0, label_S, z_SN)
    return total_CN / count_C[:, None]


def class_radii(z_SN: Tensor, label_S: Tensor, centre_CN: Tensor) -> Tensor:
    """(C,) distance of each class's farthest sample from its centre; 0 for a class without a sample."""
    away_S = torch.linalg.vector_norm(z_SN - centre_CN[label_S], dim=1)
    radius_C: Tensor = away_S.new_zeros(len(centre_CN)).scatter_reduce_(0, label_S, away_S, "amax")
    return radius_C


def known_cross_entropy(logits_BC: Tensor, old_label_B: Tensor) -> Tensor:
    """Cross-entropy averaged over the samples whose class the head knows (`old_label` other than UNKNOWN).

    BCT's influence loss in its forms `old` (the old head knows some classes) and `synthesised` (mean old embeddings
    appended as rows, so that it knows all): BCT, Shen 2020, arXiv 2003.11942, section 3.
    """
    total = F.cross_entropy(logits_BC, old_label_B, ignore_index=UNKNOWN, reduction="sum")
    return total / (old_label_B != UNKNOWN).sum().clamp(min=1)


def synthesise_head(weight_CN: Tensor, bias_C: Tensor | None, mean_XN: Tensor) -> tuple[Tensor, Tensor | None]:
    """Append the mean old embeddings of X new classes to the old head: (C, N) -> (C + X, N), their bias 0.

    BCT, Shen 2020, arXiv 2003.11942, section 3 (synthesised classifier weights).
    """
    weight = torch.cat([weight_CN, mean_XN]).detach()
    return weight, None if bias_C is None else torch.cat([bias_C, bias_C.new_zeros(len(mean_XN))]).detach()


def distillation(
    new_logits_BC: Tensor, old_logits_BC: Tensor, keep_B: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """KL(old || new) of the class distributions times temperature^2, averaged over kept samples; none to the old side.

    BCT's form `distill`: the frozen old head on the old and on the new embedding (Shen 2020, arXiv 2003.11942, section
    3). LwF: the old classifier's outputs as target (Li and Hoiem 2016, arXiv 1606.09282, eq. 2), temperature 2.
    """
    new_BC = F.log_softmax(new_logits_BC / temperature, dim=1)
    old_BC = F.log_softmax(old_logits_BC.detach() / temperature, dim=1)
    return temperature**2 * _kept_mean(F.kl_div(new_BC, old_BC, reduction="none", log_target=True).sum(1), keep_B)


def cosine_alignment(new_BN: Tensor, old_BN: Tensor) -> Tensor:
    """Mean of 1 - cos(new, old), in [0, 2]; no gradient to `old`.

    OCA's higher-order term with `old` = the class prototypes P_y (Ricci 2024, arXiv 2408.08793, eq. 5, whose printed
    sign is wrong); BT2's alignment terms with unit vectors (Zhou 2023, arXiv 2211.03989).
    """
    return (1 - F.cosine_similarity(new_BN, old_BN.detach())).mean()


def half_square(new_BN: Tensor, old_BN: Tensor, keep_B: Tensor | None = None) -> Tensor:
    """1/2 |new - old|^2 averaged over kept samples (those of old classes): the fine-tuning baseline l2."""
    return _kept_mean(0.5 * (new_BN - old_BN.detach()).square().sum(1), keep_B)


@full_precision
def regression_alleviating(new_BN: Tensor, old_BN: Tensor, label_B: Tensor, temperature: float) -> Tensor:
    """Contrast of each new embedding with its own old one against old and new embeddings of other classes.

    mean_i log(1 + (sum_k exp(u_i.o_k / t) + sum_k exp(u_i.u_k / t)) / exp(u_i.o_i / t)), k over samples of other
    classes, u and o the unit new and old embeddings: Hot-Refresh (Zhang 2022, arXiv 2201.09724, regression-alleviating
    compatible training), which BT2 (Zhou 2023, arXiv 2211.03989) runs as its baseline `contrast`.
    """
    old_BB = cosines(new_BN, old_BN.detach()) / temperature
    new_BB = cosines(new_BN, new_BN) / temperature
    same_BB = _same(label_B)
    negatives = [old_BB.masked_fill(same_BB, -torch.inf), new_BB.masked_fill(same_BB, -torch.inf)]
    logits = torch.cat([old_BB.diagonal()[:, None], *negatives], dim=1)
    return F.cross_entropy(logits, torch.zeros_like(label_B))


@full_precision
def masked_alignment(new_BN: Tensor, old_BN: Tensor, label_B: Tensor, sharpness: float) -> Tensor:
    """Contrast of each old embedding with its own new one against new embeddings of other classes.

    mean_i (log sum_k exp(s u_k.o_i) - s u_i.o_i), k over samples of other classes, s the sharpness: HOC (Biondi 2024,
    arXiv 2405.02581, eq. 4). Same-class pairs, the own one among them, are left out of the sum; the authors' public
    code sets their similarity to 0 instead, which keeps exp(0) of each. A sample without any other class counts 0.
    """
    similarity_BB = sharpness * cosines(old_BN.detach(), new_BN)
    same_BB = _same(label_B)
    others_B = ~same_BB.all(1)
    lse_B = similarity_BB.masked_fill(same_BB, -torch.inf)[others_B].logsumexp(1)
    return (lse_B - similarity_BB.diagonal()[others_B]).sum() / len(label_B)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, strength: float) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:  # noqa: ARG004
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient[0], None


def reverse_gradient(x: Tensor, strength: float) -> Tensor:
    """Forward x, backward -strength times the gradient (Ganin 2015, arXiv 1409.7495), as in AdvBCT."""
    reversed_: Tensor = _Reversed.apply(x, strength)
    return reversed_


def discrimination(new_logit_B: Tensor, old_logit_B: Tensor) -> Tensor:
    """How well a discriminator tells new (0) from old (1) embeddings: two binary cross-entropies, summed.

    Fed through `reverse_gradient` on the new side it trains the discriminator and misleads it at once: AdvBCT (Pan
    2023, arXiv 2305.02610, adversarial compatible loss).
    """
    new = F.binary_cross_entropy_with_logits(new_logit_B, torch.zeros_like(new_logit_B))
    return new + F.binary_cross_entropy_with_logits(old_logit_B, torch.ones_like(old_logit_B))


def outside_boundary(new_BN: Tensor, centre_BN: Tensor, radius_B: Tensor) -> Tensor:
    """How far unit(new) lies beyond `radius` from its old class centre, averaged over the samples that do.

    AdvBCT (Pan 2023, arXiv 2305.02610, boundary-aware compatible loss); the average over violators only is its public
    code's. A radius of infinity leaves a sample out.
    """
    beyond_B = (torch.linalg.vector_norm(F.normalize(new_BN) - centre_BN.detach(), dim=1) - radius_B).clamp(min=0)
    return _kept_mean(beyond_B, beyond_B > 0)


def mean_square(made_BD: Tensor, new_BD: Tensor) -> Tensor:
    """Mean over samples and dimensions of (h(old, side) - new)^2; no gradient to `new` (FCT, Ramanujan 2022, eq. 4)."""
    return F.mse_loss(made_BD, new_BD.detach())


def gaussian_nll(made_BD: Tensor, log_variance_B: Tensor, new_BD: Tensor) -> Tensor:
    """Negative log-likelihood per dimension of `new` around `made` with one variance an item, constant dropped.

    1/2 (mean_d (made - new)^2 exp(-log_variance) + log_variance): the variance that it learns orders the backfill
    (FastFill, Jaeckle 2023, arXiv 2303.04766).
    """
    square_B = (made_BD - new_BD.detach()).square().mean(1)
    return 0.5 * (square_B * torch.exp(-log_variance_B) + log_variance_B).mean()


@full_precision
def nt_xent(first_BD: Tensor, second_BD: Tensor, temperature: float) -> Tensor:
    """Normalised temperature-scaled cross-entropy of two views of B images; trains FCT's side-information.

    Each of the 2B views has its other view as target among the 2B - 1 others (SimCLR, Chen 2020, arXiv 2002.05709,
    eq. 1).
    """
    views = torch.cat([first_BD, second_BD])
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    logits = (cosines(views, views) / temperature).masked_fill(itself, -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(views), device=views.device).roll(len(first_BD)))


def entailment(new_BD: Tensor, old_BD: Tensor, curvature: float = 1.0, boundary: float = 0.1) -> Tensor:
    """Mean angle by which the new point lies outside the entailment cone of the old one, in [0, pi).

    mean max(0, ext(old, new) - aper(old)), both space parts (HBCT, Bui 2025, arXiv 2506.05826, entailment loss).
    """
    old_BD = old_BD.detach()
    outside_B = lorentz.exterior_angle(old_BD, new_BD, curvature) - lorentz.half_aperture(old_BD, curvature, boundary)
    return outside_B.clamp(min=0).mean()


def uncertainty(old_BD: Tensor, curvature: float = 1.0) -> Tensor:
    """1 - tanh(sqrt(K) |z|) with z the tangent vector of each space part: (B, D) -> (B,), in (0, 1], 1 at the origin.

    HBCT (Bui 2025, arXiv 2506.05826, eq. 10), in the form that holds for every K; no gradient.
    """
    radius_B = torch.linalg.vector_norm(lorentz.logmap0(old_BD.detach(), curvature), dim=1)
    return 1 - torch.tanh(curvature**0.5 * radius_B)


def rince(
    new_BD: Tensor, old_BD: Tensor, curvature: float = 1.0, temperature: float = 0.5, density: float = 0.01
) -> Tensor:
    """Robust contrast in the hyperboloid; the more uncertain the old point, the less a mismatch weighs.

    mean_i -1/q_i exp(-q_i D_ii) + 1/q_i (beta sum_j exp(-D_ij))^q_i with D the geodesic distance of new i and old j
    over the temperature, j over the whole batch, q_i = uncertainty(old_i) without gradient, beta = density (HBCT, Bui
    2025, arXiv 2506.05826, after Chuang 2022, arXiv 2201.04309). As q -> 0 it becomes `info_nce` + log beta.
    """
    q_B = uncertainty(old_BD, curvature).clamp(min=1e-4)  # 1/q; float32 tanh rounds to 1 beyond |z| = 9
    away_BB = lorentz.pairwise_distance(new_BD, old_BD.detach(), curvature) / temperature
    crowd_B = math.log(density) + torch.logsumexp(-away_BB, dim=1)
    # (b - a) / q with a, b near 1 for small q: expm1 keeps the digits, and the two ones cancel.
    return ((torch.expm1(q_B * crowd_B) - torch.expm1(-q_B * away_BB.diagonal())) / q_B).mean()


def info_nce(new_BD: Tensor, old_BD: Tensor, curvature: float = 1.0, temperature: float = 0.5) -> Tensor:
    """mean_i D_ii + log sum_j exp(-D_ij), D as in `rince`: HBCT's ablation (van den Oord 2018, arXiv 1807.03748)."""
    away_BB = lorentz.pairwise_distance(new_BD, old_BD.detach(), curvature) / temperature
    return F.cross_entropy(-away_BB, torch.arange(len(away_BB), device=away_BB.device))


def _kept_mean(value_B: Tensor, keep_B: Tensor | None) -> Tensor:
    if keep_B is None:
        return value_B.mean()
    # where, not a product: a dropped value may be infinite.
    return torch.where(keep_B, value_B, 0.0).sum() / keep_B.sum().clamp(min=1)


def _same(label_B: Tensor) -> Tensor:
    return label_B[:, None] == label_B[None, :]
