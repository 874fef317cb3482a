"""A learned orthogonal matrix: the exponential of a skew-symmetric one (Lezcano-Casado 2019, arXiv 1901.08428)."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn


class Orthogonal(nn.Module):
    """x -> Q x with Q = exp(A), A skew-symmetric, no bias; used by OCA (Q) and BT2 (B1, B2).

    Q is a rotation (determinant 1) and starts as the identity, or at random, the angles of A normally distributed. The
    exponential is taken in float64: |Q Q^T - I| stays below 1e-6 however far A has moved, where
    `torch.nn.utils.parametrizations.orthogonal` in float32 does not promise 1e-5.
    """

    def __init__(self, dim: int, random: bool = False) -> None:
        super().__init__()
        self.upper = nn.Parameter(torch.randn(dim, dim) if random else torch.zeros(dim, dim))
        """Only the part above the diagonal counts."""
        # Saved with the weights: what eval mode uses, and the ONNX exporter, which knows no matrix exponential.
        self.register_buffer("fixed", torch.eye(dim))

    def matrix(self) -> Tensor:
        """Q, (dim, dim) in the parameter's dtype."""
        upper = self.upper.double().triu(1)
        orthogonal: Tensor = torch.linalg.matrix_exp(upper - upper.T)
        return orthogonal.to(self.upper.dtype)

    def train(self, mode: bool = True) -> Self:
        """On the way to eval mode, fix Q."""
        if self.training and not mode:
            self.get_buffer("fixed").copy_(self.matrix().detach())
        return super().train(mode)

    def forward(self, x_BD: Tensor) -> Tensor:
        """(B, dim) -> (B, dim), each row x becoming Q x; lengths and angles are kept."""
        return x_BD @ (self.matrix() if self.training else self.get_buffer("fixed")).T
