"""Losses as pure functions of tensors: nothing here knows a model, a batch or the loop.

Shape suffixes: B batch, D new dimension, N old dimension, C classes, S samples of a whole dataset.
`new_*` carries gradients; `old_*` comes from the frozen old model and is detached here.
Every loss is a mean over the samples that it applies to, and 0 (still differentiable) where there are none: across
processes, gather first if it applies to some samples only. Losses that compare the samples of a batch with each other
are in `training.losses.contrasts`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from index.errors import InvalidArgument
from training.losses.precision import full_precision

UNKNOWN = -1
"""The old label of a sample whose class the old head does not know."""


def fit_dim(z_BD: Tensor, n: int) -> Tensor:
    """The first n components, filled with zeros when there are fewer: (B, D) -> (B, n).

    An old head padded with zeros for d extra dimensions gives on z exactly what the old head gives on `fit_dim(z, n)`
    (BCT, Shen 2020, arXiv 2003.11942, section 4: different feature dimensions).
    """
    return z_BD[:, :n] if z_BD.shape[1] >= n else F.pad(z_BD, (0, n - z_BD.shape[1]))


@full_precision
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
        raise InvalidArgument(f"class {empty} of {classes} has no images, so it has no mean embedding")
    total_CN = z_SN.new_zeros(classes, z_SN.shape[1]).index_add_(0, label_S, z_SN)
    return total_CN / count_C[:, None]


def class_radii(z_SN: Tensor, label_S: Tensor, centre_CN: Tensor) -> Tensor:
    """(C,) the largest distance of a class's samples from its centre, without outliers; infinity for fewer than two.

    As in AdvBCT's public code (quartiles by rank): a class of one sample, which is its centre, has no boundary; in a
    class of four or more, distances beyond 1.5 interquartile ranges of the quartiles are outliers, since one sample far
    away would make a boundary that bounds nothing.
    """
    distance_S = torch.linalg.vector_norm(z_SN - centre_CN[label_S], dim=1)
    counts = torch.bincount(label_S, minlength=len(centre_CN)).tolist()
    by_class = distance_S[label_S.argsort()].split(counts)
    return torch.stack([_max_without_outliers(class_distance_S) for class_distance_S in by_class])


def _max_without_outliers(distance_S: Tensor) -> Tensor:
    count = len(distance_S)
    if count < 2:
        return distance_S.new_full((), torch.inf)
    ranked_S = distance_S.sort().values
    low, high = (ranked_S[count // 4], ranked_S[3 * count // 4]) if count >= 4 else (ranked_S[0], ranked_S[-1])
    return ranked_S[ranked_S <= high + 1.5 * (high - low)][-1]


def known_cross_entropy(logits_BC: Tensor, old_label_B: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy averaged over the samples whose class the head knows (`old_label` other than UNKNOWN).

    `smoothing` is the label smoothing of the base loss.

    BCT's influence loss in its forms `old` (the old head knows some classes) and `synthesised` (mean old embeddings
    appended as rows, so that it knows all): BCT, Shen 2020, arXiv 2003.11942, section 3.
    """
    total = F.cross_entropy(logits_BC, old_label_B, ignore_index=UNKNOWN, reduction="sum", label_smoothing=smoothing)
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
    """KL(old || new) of the class distributions times temperature^2, averaged over kept samples; no gradient to `old`.

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


def half_squared_distance(new_BN: Tensor, old_BN: Tensor, keep_B: Tensor | None = None) -> Tensor:
    """1/2 |new - old|^2 averaged over kept samples (those of old classes): the fine-tuning baseline l2."""
    return _kept_mean(0.5 * (new_BN - old_BN.detach()).square().sum(1), keep_B)


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


def discriminator_loss(new_logit_B: Tensor, old_logit_B: Tensor) -> Tensor:
    """Loss of a discriminator of new (0) and old (1) embeddings: two binary cross-entropies, summed.

    With `reverse_gradient` on the new side it trains the discriminator, and the encoder against it: AdvBCT (Pan 2023,
    arXiv 2305.02610, adversarial compatible loss).
    """
    new = F.binary_cross_entropy_with_logits(new_logit_B, torch.zeros_like(new_logit_B))
    return new + F.binary_cross_entropy_with_logits(old_logit_B, torch.ones_like(old_logit_B))


def boundary_loss(new_BN: Tensor, centre_BN: Tensor, radius_B: Tensor) -> Tensor:
    """Distance of unit(new) from its old class centre beyond `radius`, averaged over the samples outside of it.

    AdvBCT (Pan 2023, arXiv 2305.02610, boundary-aware compatible loss); averaging over these samples only is its public
    code's choice. A radius of infinity leaves a sample out.
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


def _kept_mean(value_B: Tensor, keep_B: Tensor | None) -> Tensor:
    if keep_B is None:
        return value_B.mean()
    # where, not a product: a dropped value may be infinite.
    return torch.where(keep_B, value_B, 0.0).sum() / keep_B.sum().clamp(min=1)
