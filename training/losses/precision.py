"""Keeping sensitive arithmetic out of half precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


def full_precision(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Run `function` outside autocast with its positional half-precision tensors as float32; float64 stays float64.

    For geometry (cosh and sinh lose the distance) and for cosines times a large scale: bfloat16 resolves a cosine to
    0.004, which a scale of 64 makes 0.25 of a logit.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        raised = [_raise(argument) for argument in args]
        device = next((a.device.type for a in raised if isinstance(a, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):
            return function(*raised, **kwargs)  # type: ignore[arg-type]
        with torch.autocast(device, enabled=False):
            return function(*raised, **kwargs)  # type: ignore[arg-type]

    return run


def _raise(value: object) -> object:
    if isinstance(value, Tensor) and value.dtype in {torch.float16, torch.bfloat16}:
        return value.float()
    return value
