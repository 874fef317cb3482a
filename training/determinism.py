"""Operations that raise on CUDA in torch's deterministic mode, in which every training runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RAISES = {
    "AvgPool3d": "avg_pool3d_backward",
    "AdaptiveAvgPool2d": "_adaptive_avg_pool2d_backward",
    "AdaptiveAvgPool3d": "_adaptive_avg_pool3d_backward",
    "AdaptiveMaxPool2d": "adaptive_max_pool2d_backward",
    "FractionalMaxPool2d": "fractional_max_pool2d_backward",
    "FractionalMaxPool3d": "fractional_max_pool3d_backward",
    "MaxUnpool1d": "max_unpool2d",
    "MaxUnpool2d": "max_unpool2d",
    "MaxUnpool3d": "max_unpool3d",
    "interpolate": "upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)_backward",
    "ReflectionPad1d": "reflection_pad1d_backward",
    "ReflectionPad2d": "reflection_pad2d_backward",
    "ReflectionPad3d": "reflection_pad3d_backward",
    "NLLLoss": "nll_loss2d_forward",  # that of images: the one of (B, C) logits has no atomic addition
    "CTCLoss": "_ctc_loss_backward",
    "EmbeddingBag": "_embedding_bag_backward",
    "put_": "put_?",
    "histc": "histc",
    "bincount": "bincount",
    "median": "(nan)?median",
    "grid_sample": "grid_sampler_[23]d_backward",
    "scatter_reduce": "scatter_reduce_?",
    "resize_": "quantized_resize",  # of quantised tensors, which no training has
}
"""What torch's documentation lists for CUDA -> the operation it stands for."""


class Recorded(TorchDispatchMode):
    """Every operation that runs inside, forward and backward, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def raising(step: Callable[[], Tensor]) -> set[str]:
    """The operations of a step and of its gradient that would raise on CUDA, found on any device."""
    with Recorded() as recorded:
        step().sum().backward()
    return {name for name in recorded.names if any(re.fullmatch(op, name) for op in RAISES.values())}
