"""Geometry of the Lorentz model as plain functions (MERU, Desai 2023, arXiv 2304.09172; HBCT, Bui 2025, 2506.05826).

A point of the hyperboloid of curvature -K (K > 0) has a space part x in R^D and a time part t(x) = sqrt(1/K + |x|^2).
Only space parts travel; the time part is recomputed. The Lorentz inner product is

    <x, y>_L = <x, y> - t(x) t(y) <= -1/K,    with equality exactly when x = y,

and the geodesic distance is acosh(-K <x, y>_L) / sqrt(K): `index.space.Lorentz` in numpy, held equal by a test. The
origin is x = 0; a vector v of its tangent space is a Euclidean embedding.

Everything runs in float32 at least and outside autocast: cosh and sinh lose the distance in half precision.
Shape suffixes: B, A batches, D dimension, C classes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from training.losses.precision import full_precision

NEAR_ONE = 1e-6
"""acosh, asin and acos have infinite slope at 1: arguments keep this distance from it, so the largest slope is about
700 (acosh) and distances below 1.4e-3 / sqrt(K) are reported as that. float32 cannot resolve much less."""

MAX_RADIUS = math.asinh(2.0**15)
"""Longest tangent vector times sqrt(K), about 11.1: |x| stays below 2^15 / sqrt(K), so |x|^2 keeps within float32."""


def clip_norm(v_BD: Tensor, radius: float) -> Tensor:
    """Shorten rows longer than `radius` to it: (B, D) -> (B, D) with norms in [0, radius]."""
    # Rows within the radius, zero among them, divide by the radius itself and stay as they are.
    return v_BD * (radius / _norm(v_BD)[:, None].clamp(min=radius))


@full_precision
def lift(z_BD: Tensor, radius: float, curvature: float = 1.0) -> Tensor:
    """Raw embeddings (B, D) -> space parts (B, D): z / sqrt(D), clipped to `radius`, exponential map (HBCT)."""
    return expmap0(clip_norm(z_BD / z_BD.shape[1] ** 0.5, radius), curvature)


@full_precision
def expmap0(v_BD: Tensor, curvature: float = 1.0) -> Tensor:
    """Tangent vectors at the origin (B, D) -> space parts (B, D): sinh(sqrt(K)|v|) / (sqrt(K)|v|) v.

    The distance of the result from the origin is |v|, up to MAX_RADIUS / sqrt(K).
    """
    scaled_B1 = math.sqrt(curvature) * _norm(v_BD)[:, None]
    # Lower clamp: sinh(r)/r -> 1 instead of 0/0. Upper clamp: see MAX_RADIUS.
    return v_BD * torch.sinh(scaled_B1.clamp(1e-7, MAX_RADIUS)) / scaled_B1.clamp(min=1e-7)


@full_precision
def logmap0(x_BD: Tensor, curvature: float = 1.0) -> Tensor:
    """Space parts (B, D) -> tangent vectors at the origin (B, D): asinh(sqrt(K)|x|) / (sqrt(K)|x|) x.

    asinh of the space part equals acosh of the time part and needs no clamp near the origin but the one against 0/0.
    """
    scaled_B1 = (math.sqrt(curvature) * _norm(x_BD)[:, None]).clamp(min=1e-7)
    return x_BD * torch.asinh(scaled_B1) / scaled_B1


@full_precision
def time_part(x_BD: Tensor, curvature: float = 1.0) -> Tensor:
    """Space parts (B, D) -> time parts (B,), in [1/sqrt(K), inf)."""
    time_B: Tensor = (1 / curvature + x_BD.square().sum(1)).sqrt()
    return time_B


@full_precision
def inner(x_BD: Tensor, y_BD: Tensor, curvature: float = 1.0) -> Tensor:
    """Lorentz inner products of matching rows: (B, D), (B, D) -> (B,), in (-inf, -1/K] up to rounding."""
    return (x_BD * y_BD).sum(1) - time_part(x_BD, curvature) * time_part(y_BD, curvature)


@full_precision
def pairwise_inner(x_AD: Tensor, y_BD: Tensor, curvature: float = 1.0) -> Tensor:
    """Lorentz inner products of all pairs: (A, D), (B, D) -> (A, B), in (-inf, -1/K] up to rounding."""
    return x_AD @ y_BD.T - torch.outer(time_part(x_AD, curvature), time_part(y_BD, curvature))


@full_precision
def distance(x_BD: Tensor, y_BD: Tensor, curvature: float = 1.0) -> Tensor:
    """Geodesic distances of matching rows: (B, D), (B, D) -> (B,), in [1.4e-3 / sqrt(K), inf), see NEAR_ONE."""
    return _distance(inner(x_BD, y_BD, curvature), curvature)


@full_precision
def pairwise_distance(x_AD: Tensor, y_BD: Tensor, curvature: float = 1.0) -> Tensor:
    """Geodesic distances of all pairs: (A, D), (B, D) -> (A, B), in [1.4e-3 / sqrt(K), inf), see NEAR_ONE."""
    return _distance(pairwise_inner(x_AD, y_BD, curvature), curvature)


def _distance(inner_: Tensor, curvature: float) -> Tensor:
    return torch.acosh((-curvature * inner_).clamp(min=1 + NEAR_ONE)) / math.sqrt(curvature)


@full_precision
def half_aperture(x_BD: Tensor, curvature: float = 1.0, boundary: float = 0.1) -> Tensor:
    """Half-angle of the entailment cone with apex x: asin(2 eps / (sqrt(K)|x|)), (B, D) -> (B,), in (0, pi/2).

    The cone narrows away from the origin. Nearer to it than 2 eps / sqrt(K) no cone exists: there, the clamp keeps the
    half-space (pi/2, less NEAR_ONE's share). `boundary` is eps (MERU; Le 2019, arXiv 1902.00913).
    """
    scaled_B = (math.sqrt(curvature) * _norm(x_BD)).clamp(min=1e-7)
    return torch.asin((2 * boundary / scaled_B).clamp(max=1 - NEAR_ONE))


@full_precision
def exterior_angle(x_BD: Tensor, y_BD: Tensor, curvature: float = 1.0) -> Tensor:
    """Angle at x between the ray from the origin through x and the geodesic to y: (B, D), (B, D) -> (B,), in (0, pi).

    acos((t(y) + K <x,y>_L t(x)) / (|x| sqrt((K <x,y>_L)^2 - 1))) (MERU): 0 when y lies straight behind x, pi when
    y lies between the origin and x. x itself has no direction and gives pi/2.
    """
    product_B = (curvature * inner(x_BD, y_BD, curvature)).clamp(max=-1 - NEAR_ONE)  # <x,x> rounds to above -1
    above_B = time_part(y_BD, curvature) + product_B * time_part(x_BD, curvature)
    below_B = _norm(x_BD).clamp(min=1e-7) * (product_B.square() - 1).sqrt()
    # Rounding takes the quotient beyond +-1 for points on one ray; the margin bounds the slope of acos.
    return torch.acos((above_B / below_B).clamp(-1 + NEAR_ONE, 1 - NEAR_ONE))


@full_precision
def hyperplane_logits(x_BD: Tensor, direction_CD: Tensor, offset_C: Tensor, curvature: float = 1.0) -> Tensor:
    """Lorentz multinomial logistic regression: space parts (B, D), C hyperplanes -> logits (B, C).

    See `training.networks.heads.LorentzMLR` for the formula; at offset 0 and a unit direction z the logit of expmap0(v)
    with v along z is |v|. Directions shorter than 1e-7 count as that long.
    """
    root = math.sqrt(curvature)
    norm_C = _norm(direction_CD).clamp(min=1e-7)
    at_C = (root * offset_C).clamp(-MAX_RADIUS, MAX_RADIUS)  # cosh overflows where no point can be, see MAX_RADIUS
    along_BC = x_BD @ direction_CD.T * torch.cosh(at_C)
    across_BC = torch.outer(time_part(x_BD, curvature), torch.sinh(at_C) * norm_C)
    return norm_C / root * torch.asinh(root * (along_BC - across_BC) / norm_C)


def _norm(x_BD: Tensor) -> Tensor:
    norm_B: Tensor = torch.linalg.vector_norm(x_BD, dim=1)  # its gradient at 0 is 0, not NaN
    return norm_B
