"""Random tensors, and points on a circle with known angles."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw64(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, float64; different from those of `draw`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def circle(*degrees: float) -> Tensor:
    """Points of the unit circle, float64."""
    return torch.tensor([[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees], dtype=torch.float64)
