"""The adapter that needs torch: a residual MLP. `index.evaluation.adapters` has those that do not.

Shape suffixes: S pairs, M new dimension, N old dimension, H hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.evaluation.adapters import check_pairs, orthogonal
from index.space import Vectors
from index.version import EdgeKind


class FewPairsWarning(UserWarning):
    """An adapter was fitted on fewer pairs than its source found enough."""


class ResidualMlp(nn.Module):
    """x W + W2 gelu(W1 x + b1) + b2, normalised when the old space is cosine; ships as an `onnx` edge.

    Drift-Adapter (Vejendla 2025, arXiv 2509.23471) adds the MLP to x itself, which presumes equal dimensions and
    related spaces; here the skip connection is the Procrustes map, fixed, and the MLP starts from zero: it can only
    improve on Procrustes where the pairs say so.
    """

    kind = EdgeKind.ONNX

    def __init__(self, weight_MN: Tensor, hidden: int, unit: bool) -> None:
        super().__init__()
        new_dim, old_dim = weight_MN.shape
        self.register_buffer("weight_MN", weight_MN)
        self.inner, self.outer = nn.Linear(new_dim, hidden), nn.Linear(hidden, old_dim)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)
        self.unit = unit

    def forward(self, new_SM: Tensor) -> Tensor:
        """(S, M) -> (S, N)."""
        made_SN = new_SM @ self.get_buffer("weight_MN") + self.outer(F.gelu(self.inner(new_SM)))
        return F.normalize(made_SN) if self.unit else made_SN


def residual_mlp(
    new_SM: Vectors,
    old_SN: Vectors,
    *,
    hidden: int = 256,
    unit: bool = True,
    epochs: int = 100,
    rate: float = 1e-3,
    batch_size: int = 256,
    seed: int = 0,
) -> ResidualMlp:
    """Fit a `ResidualMlp` by mean squared error, with Adam and a cosine schedule; the same seed gives the same map.

    Args:
        new_SM: new embeddings.
        old_SN: old embeddings of the same images.
        hidden: H, width of the hidden layer.
        unit: the old space is cosine, so that outputs are normalised.
        epochs: passes over the pairs.
        rate: learning rate at the start.
        batch_size: pairs a step.
        seed: of weights and order.
    """
    pairs = check_pairs(new_SM, old_SN)
    skip_MN = torch.from_numpy(orthogonal(*pairs)).float()
    new, old = (torch.from_numpy(x).float() for x in pairs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mlp = ResidualMlp(skip_MN, hidden, unit)
        optimiser = torch.optim.Adam(mlp.parameters(), rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
        for _ in range(epochs):
            order = torch.randperm(len(new))
            for first in range(0, len(new), batch_size):
                rows = order[first : first + batch_size]
                optimiser.zero_grad()
                torch.autograd.backward(F.mse_loss(mlp(new[rows]), old[rows]))
                optimiser.step()
            schedule.step()
    return mlp.eval().requires_grad_(False)
