"""A learned orthogonal matrix: the exponential of a skew-symmetric one (Lezcano-Casado 2019, arXiv 1901.08428)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn


class Orthogonal(nn.Module):
    """x -> Q x with Q = Q0 exp(A), A skew-symmetric, no bias; used by OCA (Q) and BT2 (B1, B2).

    Q is a rotation (determinant 1) and starts as Q0, the identity or a random rotation, which is not learned. A
    starts at zero, so that weight decay leaves Q alone: a random A would be decayed, and Q turn away from the
    classifier behind it at every step. The exponential is taken in float64: |Q Q^T - I| stays below 1e-6 however far
    A has moved, where `torch.nn.utils.parametrizations.orthogonal` in float32 does not promise 1e-5.

    Under mixed precision only a training step's product rounds Q and x to bfloat16, as it does every layer's weights:
    the rounded Q has |Q Q^T - I| up to 5e-3, Q x is off by at most 0.6 % of its length, its direction by a cosine above
    0.99998 (measured with 16 to 512 numbers). What is exported is the Q of eval mode, exact in float32.

    Args:
        dim: of x.
        random: whether Q0 is random, uniform over the rotations; the identity otherwise.
    """

    def __init__(self, dim: int, random: bool = False) -> None:
        super().__init__()
        self.upper = nn.Parameter(torch.zeros(dim, dim))
        """Only the part above the diagonal counts."""
        # What is made anew each time need not be saved.
        start_DD = random_rotation(dim) if random else torch.eye(dim, dtype=torch.float64)
        self.register_buffer("start", start_DD, persistent=random)
        # Saved with the weights: what eval mode uses, and the ONNX exporter, which knows no matrix exponential.
        self.register_buffer("fixed", torch.eye(dim))

    def matrix(self) -> Tensor:
        """Q, (dim, dim) in the parameter's dtype."""
        upper = self.upper.double().triu(1)
        orthogonal: Tensor = self.get_buffer("start").double() @ torch.linalg.matrix_exp(upper - upper.T)
        return orthogonal.to(self.upper.dtype)

    def train(self, mode: bool = True) -> Self:
        """On the way to eval mode, fix Q."""
        if self.training and not mode:
            self.get_buffer("fixed").copy_(self.matrix().detach())
        return super().train(mode)

    def forward(self, x_BD: Tensor) -> Tensor:
        """(B, dim) -> (B, dim), each row x becoming Q x; lengths and angles are kept."""
        return x_BD @ (self.matrix() if self.training else self.get_buffer("fixed")).T


def random_rotation(dim: int) -> Tensor:
    """(dim, dim) float64, uniform over the rotations: Q of a Gaussian matrix's QR decomposition, R's diagonal positive.

    Source: Mezzadri 2007 (arXiv math-ph/0609050).
    """
    orthogonal, upper = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64))
    rotation: Tensor = orthogonal * upper.diagonal().sign()
    rotation[:, 0] *= torch.linalg.det(rotation).sign()
    return rotation
