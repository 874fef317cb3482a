"""Losses that hold a batch's embeddings against each other: contrasts, triplets, and those of hyperbolic space.

As in `training.losses.losses`: pure functions, `old_*` detached here, means over the samples concerned. All take the
whole batch; across processes, gather first. Shape suffixes: B batch, D dimension, N old dimension.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from training.losses import lorentz
from training.losses.losses import cosines
from training.losses.precision import full_precision


@full_precision
def regression_alleviating(
    new_BN: Tensor,
    old_BN: Tensor,
    label_B: Tensor,
    temperature: float,
    among_new: bool = True,
    hardest: int = 0,
) -> Tensor:
    """Contrast of each new embedding with its own old one against old and new embeddings of other classes.

    mean_i log(1 + (sum_k exp(u_i.o_k / t) + sum_k exp(u_i.u_k / t)) / exp(u_i.o_i / t)), k over samples of other
    classes, u and o the unit new and old embeddings: Hot-Refresh (Zhang 2022, arXiv 2201.09724, regression-alleviating
    compatible training), which BT2 (Zhou 2023, arXiv 2211.03989) runs as its baseline `contrast`.

    `among_new=False` leaves the second sum out (plain contrast); `hardest` keeps so many of the largest terms of each.
    """
    old_BB, same_BB = cosines(new_BN, old_BN.detach()) / temperature, _same(label_B)
    sums = [old_BB, cosines(new_BN, new_BN) / temperature] if among_new else [old_BB]
    negatives = [_hardest(logit_BB.masked_fill(same_BB, -torch.inf), hardest) for logit_BB in sums]
    logits = torch.cat([old_BB.diagonal()[:, None], *negatives], dim=1)
    return F.cross_entropy(logits, torch.zeros_like(label_B))


@full_precision
def triplet(
    new_BN: Tensor,
    old_BN: Tensor,
    label_B: Tensor,
    margin: float,
    among_new: bool = True,
    hardest: int = 0,
) -> Tensor:
    """Mean of max(0, |u_i - o_i| - |u_i - o_k| + margin), k over the `hardest` nearest samples of other classes.

    `among_new` adds the same mean with |u_i - u_k|: the triplet forms of Hot-Refresh's public code (arXiv 2201.09724).
    """
    unit_BN, same_BB = F.normalize(new_BN), _same(label_B)
    other_BB = _distances(unit_BN, F.normalize(old_BN.detach()))
    total = new_BN.new_zeros(())
    for away_BB in (other_BB, _distances(unit_BN, unit_BN)) if among_new else (other_BB,):
        nearest_BK = -_hardest((-away_BB).masked_fill(same_BB, -torch.inf), hardest)
        short_BK = (other_BB.diagonal()[:, None] - nearest_BK + margin).clamp(min=0)
        total = total + short_BK.sum() / nearest_BK.isfinite().sum().clamp(min=1)
    return total


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
    away_BB = lorentz.pairwise_distance(new_BD, old_BD.detach(), curvature) / temperature
    return robust_contrast(-away_BB, uncertainty(old_BD, curvature), density)


def rince_of_cosines(
    new_BD: Tensor, old_BD: Tensor, curvature: float = 1.0, temperature: float = 0.5, density: float = 0.01
) -> Tensor:
    """`rince` with the cosine of the space parts over the temperature in place of -D: its form for SimCLR (Chuang)."""
    return robust_contrast(cosines(new_BD, old_BD.detach()) / temperature, uncertainty(old_BD, curvature), density)


def robust_contrast(similarity_BB: Tensor, q_B: Tensor, density: float) -> Tensor:
    """mean_i -1/q_i exp(q_i s_ii) + 1/q_i (beta sum_j exp(s_ij))^q_i: RINCE (Chuang 2022, arXiv 2201.04309, eq. 5)."""
    q_B = q_B.clamp(min=1e-4)  # 1/q; float32 tanh rounds to 1 beyond |z| = 9
    crowd_B = math.log(density) + torch.logsumexp(similarity_BB, dim=1)
    # (b - a) / q with a, b near 1 for small q: expm1 keeps the digits, and the two ones cancel.
    return ((torch.expm1(q_B * crowd_B) - torch.expm1(q_B * similarity_BB.diagonal())) / q_B).mean()


def info_nce(new_BD: Tensor, old_BD: Tensor, curvature: float = 1.0, temperature: float = 0.5) -> Tensor:
    """mean_i D_ii + log sum_j exp(-D_ij), D as in `rince`: HBCT's ablation (van den Oord 2018, arXiv 1807.03748)."""
    away_BB = lorentz.pairwise_distance(new_BD, old_BD.detach(), curvature) / temperature
    return F.cross_entropy(-away_BB, torch.arange(len(away_BB), device=away_BB.device))


def _hardest(similarity_BB: Tensor, count: int) -> Tensor:
    """(B, K) the so many largest of each row; 0: all."""
    return similarity_BB.topk(min(count, similarity_BB.shape[1]), dim=1).values if count else similarity_BB


def _distances(x_BD: Tensor, y_CD: Tensor) -> Tensor:
    """(B, C) Euclidean distances of unit vectors; the floor bounds the slope of the root where two are equal."""
    return (2 - 2 * x_BD @ y_CD.T).clamp(min=1e-12).sqrt()


def _same(label_B: Tensor) -> Tensor:
    return label_B[:, None] == label_B[None, :]
