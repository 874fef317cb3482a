"""Backbones: timm's by name, or a small CNN of our own, each with a linear embedding head; and models that stay frozen.

Shape suffixes: B batch, C channels, H height, W width, F features, D embedding dimension.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from textwrap import shorten
from typing import Self

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.errors import InvalidArgument

TIMM = "timm/"
FRESH, DOWNLOAD = "", "timm's download"
"""Where a trunk's first weights come from, if not from a file."""


class Backbone(nn.Module):
    """Images -> raw embeddings (z): a trunk that gives features, then one linear layer."""

    def __init__(self, trunk: nn.Module, features: int, dim: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.embed = nn.Linear(features, dim)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D)."""
        embedding: Tensor = self.embed(self.trunk(image_BCHW))
        return embedding


class Frozen(nn.Module):
    """A model that nothing may change: no gradient, and in eval mode whatever its owner is switched to.

    BatchNorm in training mode would move the old model's running statistics, and so every old embedding.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, image_BCHW: Tensor) -> Tensor:
        """What the model gives, without a graph."""
        output: Tensor = self.model(image_BCHW)
        return output


def build_backbone(name: str, channels: int, dim: int, *, pretrained: bool = False, weights: str = "") -> Backbone:
    """Build a backbone with an embedding head.

    Args:
        name: one of `BACKBONES`, or "timm/" and a timm model name.
        channels: channels of the input image.
        dim: D.
        pretrained: start from timm's pretrained weights (they are downloaded unless cached).
        weights: a file to read them from instead, as timm publishes it; says `pretrained` by itself.

    Raises:
        InvalidArgument: an unknown name (lists the legal ones), or there are no such weights.
    """
    start = weights or (DOWNLOAD if pretrained else FRESH)
    if name.startswith(TIMM):
        trunk, features = _timm_trunk(name.removeprefix(TIMM), channels, start)
    elif name in BACKBONES:
        trunk, features = BACKBONES[name](channels, start)
    else:
        legal = ", ".join([*BACKBONES, "timm/<a timm model name>"])
        raise InvalidArgument(f"backbone {name!r} is unknown; legal: {legal}", pointer="/backbone")
    return Backbone(trunk, features, dim)


def _timm_trunk(name: str, channels: int, start: str) -> tuple[nn.Module, int]:
    if not timm.is_model(name):
        near = ", ".join(difflib.get_close_matches(name, timm.list_models(), n=5)) or "none"
        raise InvalidArgument(f"timm knows no model {name!r}; near it: {near}", pointer="/backbone")
    if start == FRESH:
        trunk = timm.create_model(name, in_chans=channels, num_classes=0)
    else:
        trunk = _pretrained(name, channels, start)
    return trunk, int(trunk.num_features)


def _pretrained(name: str, channels: int, start: str) -> nn.Module:
    overlay = None if start == DOWNLOAD else {"file": start}
    try:
        # With its classifier: timm reads weights for a model without one loosely, and so weights of any model.
        trunk = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, in_chans=channels)
    except Exception as error:  # the network, the hub, or whatever a wrong file leads torch to
        raise InvalidArgument(
            f"pretrained weights of {name} cannot be had from {start}: {shorten(str(error), 200)}; "
            "set weights=FILE to a file of them",
            pointer="/weights",
        ) from error
    trunk.reset_classifier(0)
    return trunk  # type: ignore[no-any-return]


def _resnet18_32(channels: int, start: str) -> tuple[nn.Module, int]:
    """ResNet-18 for images of about 32 pixels: a 3x3 stem that keeps their size, no pooling behind it."""
    trunk, features = _timm_trunk("resnet18", channels, start)
    stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as timm does
    trunk.conv1, trunk.maxpool = stem, nn.Identity()
    return trunk, features


class Enlarged(nn.Module):
    """A trunk that sees images at the size it was pretrained on, whatever size they come in."""

    def __init__(self, trunk: nn.Module, side: int) -> None:
        super().__init__()
        self.trunk, self.side = trunk, side

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, F)."""
        features: Tensor = self.trunk(F.interpolate(image_BCHW, (self.side, self.side), mode="bilinear"))
        return features


def _vit_b16_enlarged(channels: int, start: str) -> tuple[nn.Module, int]:
    """ViT-B/16 at 224 pixels for smaller images: the version it replaces sees the same images at their own size."""
    trunk, features = _timm_trunk("vit_base_patch16_224", channels, start)
    return Enlarged(trunk, 224), features


def _cnn(
    channels: int, start: str, widths: Sequence[int], pooled: Collection[int], stride: int = 1, grid: int = 2
) -> tuple[nn.Module, int]:
    """3x3 convolutions, the first with a stride, some with pooling behind them; any size of image goes in.

    Raises:
        InvalidArgument: pretrained weights, which it has none of.
    """
    if start != FRESH:
        raise InvalidArgument("this backbone has no pretrained weights; choose one of timm's", pointer="/pretrained")
    blocks: list[nn.Module] = []
    for layer, (before, after) in enumerate(itertools.pairwise((channels, *widths))):
        convolution = nn.Conv2d(before, after, 3, stride if layer == 0 else 1, padding=1, bias=False)
        blocks += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
        if layer in pooled:
            blocks.append(nn.MaxPool2d(2))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(grid), nn.Flatten()), grid**2 * widths[-1]


def _wide_cnn(
    channels: int, start: str, widths: Sequence[int], grid: int, pooled: Collection[int] = (1, 2)
) -> tuple[nn.Module, int]:
    """Four layers for images of about 30 pixels, halved by the first one."""
    trunk, features = _cnn(channels, start, widths, pooled, stride=2, grid=grid)
    # On a CPU its steps are a third faster in this layout.
    return trunk.to(memory_format=torch.channels_last), features


BACKBONES: dict[str, Callable[[int, str], tuple[nn.Module, int]]] = {
    "small_cnn": partial(_cnn, widths=(16, 32, 32), pooled={1}),
    "quick_cnn_28": partial(_wide_cnn, widths=(16, 32, 64, 64), grid=3, pooled=(0, 1)),
    "small_cnn_32": partial(_wide_cnn, widths=(32, 64, 64, 128), grid=2),
    "resnet18_32": _resnet18_32,
    "vit_b16_enlarged": _vit_b16_enlarged,
}
"""name -> (channels, where weights come from) -> trunk and number of its features. Numbers are the pixels it suits."""
