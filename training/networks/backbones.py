"""Backbones: timm's by name, or a small CNN of our own, each with a linear embedding head; and models that stay frozen.

Shape suffixes: B batch, C channels, H height, W width, F features, D embedding dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Self

import safetensors
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.errors import InvalidArgument, did_you_mean
from index.version import Preprocess

TIMM = "timm/"
FRESH, DOWNLOAD = "", "timm's download"
"""Where a trunk's first weights come from, if not from a file."""
OF_VERSION = "raw.0.trunk."
"""What the names of a trunk's weights begin with in a version's weights.safetensors."""


class Backbone(nn.Module):
    """Images -> raw embeddings (z): a trunk that gives features, then one linear layer, and a ReLU where wanted."""

    def __init__(self, trunk: nn.Module, features: int, dim: int, last_relu: bool = False) -> None:
        super().__init__()
        self.trunk, self.last_relu = trunk, last_relu
        self.embed = nn.Linear(features, dim)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D)."""
        embedding: Tensor = self.embed(self.trunk(image_BCHW))
        return F.relu(embedding) if self.last_relu else embedding


class Frozen(nn.Module):
    """A model that nothing may change: no gradient, and in eval mode whatever its owner is switched to.

    BatchNorm in training mode would move the old model's running statistics, and so every old embedding.

    Args:
        model: images -> outputs.
        preprocess: how it sees images; None: as the training that it looks on.
    """

    def __init__(self, model: nn.Module, preprocess: Preprocess | None = None) -> None:
        super().__init__()
        self.model, self.preprocess = model.requires_grad_(False), preprocess
        self.train(False)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, image_BCHW: Tensor) -> Tensor:
        """What the model gives, without a graph."""
        output: Tensor = self.model(image_BCHW)
        return output


def build_backbone(
    name: str, channels: int, dim: int, *, pretrained: bool = False, weights: str = "", last_relu: bool = False
) -> Backbone:
    """Build a backbone with an embedding head.

    Args:
        name: one of `BACKBONES`, or "timm/" and a timm model name.
        channels: channels of the input image.
        dim: D.
        pretrained: start from timm's pretrained weights (they are downloaded unless cached).
        weights: a file to read them from instead, as timm publishes it, or a version's folder or weights.safetensors,
            whose trunk is taken; says `pretrained` by itself.
        last_relu: cut the embedding's numbers off at 0.

    Raises:
        InvalidArgument: an unknown name (lists the legal ones), or there are no such weights.
    """
    of_version = _trunk_of_version(weights)
    start = FRESH if of_version else weights or (DOWNLOAD if pretrained else FRESH)
    if name.startswith(TIMM):
        trunk, features = timm_trunk(name.removeprefix(TIMM), channels, start)
    elif name in BACKBONES:
        trunk, features = BACKBONES[name](channels, start)
    else:
        legal = ", ".join([*BACKBONES, "timm/<a timm model name>"])
        raise InvalidArgument(f"backbone {name!r} is unknown; legal: {legal}", pointer="/backbone")
    if of_version:
        if {k: x.shape for k, x in of_version.items()} != {k: x.shape for k, x in trunk.state_dict().items()}:
            raise InvalidArgument(f"weights {weights} are of another backbone than {name}", pointer="/weights")
        trunk.load_state_dict(of_version)
    return Backbone(trunk, features, dim, last_relu)


def timm_trunk(name: str, channels: int, start: str) -> tuple[nn.Module, int]:
    """A timm model without its classifier, and how many features it gives; `start`: a file, FRESH or DOWNLOAD."""
    if not _known(name):
        near = did_you_mean(name, timm.list_models() + timm.list_pretrained()) or "; timm.list_models() lists them"
        raise InvalidArgument(f"timm has no model {name!r}{near}", pointer="/backbone")
    if start == FRESH:
        trunk = timm.create_model(name, in_chans=channels, num_classes=0)
    else:
        trunk = _pretrained(name, channels, start)
    # Some heads widen what the layers before them give: mobilenetv3's, ghostnet's.
    return trunk, int(getattr(trunk, "head_hidden_size", None) or trunk.num_features)


def _known(name: str) -> bool:
    """Whether timm has a model of this name, its tag included."""
    try:
        timm.models.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag
        return False
    return bool(timm.is_model(name))


def _pretrained(name: str, channels: int, start: str) -> nn.Module:
    overlay = None if start == DOWNLOAD else {"file": start}
    try:
        # With its classifier: timm reads weights for a model without one loosely, and so weights of any model.
        trunk = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, in_chans=channels)
    except Exception as error:  # the network, the hub, or whatever a wrong file leads torch to
        reason = shorten(str(error) or "no such weights", 200)
        raise InvalidArgument(
            f"pretrained weights of {name} are not available from {start}: {reason}; set weights=FILE, or for "
            "`regraft version create` --weights FILE",
            pointer="/weights",
        ) from error
    trunk.reset_classifier(0)
    return trunk  # type: ignore[no-any-return]


def _trunk_of_version(path: str) -> dict[str, Tensor]:
    """The trunk's weights out of a version's folder or weights.safetensors; none out of any other file."""
    if not path:
        return {}
    try:
        with safetensors.safe_open(Path(path) / "weights.safetensors" if Path(path).is_dir() else path, "pt") as held:
            its = [name for name in held.keys() if name.startswith(OF_VERSION)]  # noqa: SIM118
            return {name.removeprefix(OF_VERSION): held.get_tensor(name) for name in its}
    except (OSError, safetensors.SafetensorError):
        return {}  # perhaps timm can read it


def _refuse_pretrained(start: str) -> None:
    """Refuse weights that are no version's, for a backbone of which nobody publishes any."""
    if start == DOWNLOAD:
        raise InvalidArgument("this backbone has no pretrained weights; choose one of timm's", pointer="/pretrained")
    if start != FRESH:
        raise InvalidArgument(
            f"weights {start} cannot be read as a version's weights.safetensors; this backbone has no others",
            pointer="/weights",
        )


def _resnet18_32(channels: int, start: str) -> tuple[nn.Module, int]:
    """ResNet-18 for images of about 32 pixels: a 3x3 stem that keeps their size, no pooling behind it."""
    trunk, features = timm_trunk("resnet18", channels, start)
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
    trunk, features = timm_trunk("vit_base_patch16_224", channels, start)
    return Enlarged(trunk, 224), features


class AverageGrid(nn.Module):
    """Means over a grid of equal cells, as nn.AdaptiveAvgPool2d gives, with a gradient that is deterministic on CUDA.

    torch's own raises there under `deterministic=True`, but for a grid of 1.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, side, side)."""
        height, width = image_BCHW.shape[-2:]
        if height % self.side == 0 and width % self.side == 0:
            return F.avg_pool2d(image_BCHW, (height // self.side, width // self.side))
        down_SH, across_SW = (self._cells(size).to(image_BCHW) for size in (height, width))
        return down_SH @ image_BCHW @ across_SW.T

    def _cells(self, size: int) -> Tensor:
        """(side, size) the share of each pixel in each cell; cells overlap where the sizes do not divide."""
        place_S1, pixel_P = torch.arange(self.side)[:, None], torch.arange(size)
        first_S1, last_S1 = place_S1 * size // self.side, -(-(place_S1 + 1) * size // self.side)
        inside_SP = ((pixel_P >= first_S1) & (pixel_P < last_S1)).float()
        return inside_SP / inside_SP.sum(1, keepdim=True)


def _cnn(
    channels: int, start: str, widths: Sequence[int], pooled: Collection[int], stride: int = 1, grid: int = 2
) -> tuple[nn.Module, int]:
    """3x3 convolutions, the first with a stride, some with pooling behind them; any size of image goes in.

    Raises:
        InvalidArgument: pretrained weights, which it has none of.
    """
    _refuse_pretrained(start)
    blocks: list[nn.Module] = []
    for layer, (before, after) in enumerate(itertools.pairwise((channels, *widths))):
        convolution = nn.Conv2d(before, after, 3, stride if layer == 0 else 1, padding=1, bias=False)
        blocks += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
        if layer in pooled:
            blocks.append(nn.MaxPool2d(2))
    return nn.Sequential(*blocks, AverageGrid(grid), nn.Flatten()), grid**2 * widths[-1]


def _wide_cnn(
    channels: int, start: str, widths: Sequence[int], grid: int, pooled: Collection[int] = (1, 2)
) -> tuple[nn.Module, int]:
    """Four layers for images of about 30 pixels, halved by the first one."""
    trunk, features = _cnn(channels, start, widths, pooled, stride=2, grid=grid)
    # On a CPU its steps are a third faster in this layout.
    return trunk.to(memory_format=torch.channels_last), features


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He 2016, arXiv 1512.03385, its basic block)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H / stride, W / stride)."""
        return F.relu(self.body(image_BCHW) + self.shortcut(image_BCHW), inplace=True)


def _slim_resnet(channels: int, start: str, widths: Sequence[int]) -> tuple[nn.Module, int]:
    """A 7x7 convolution that keeps every fourth pixel, then one residual block a width, each but the first halving.

    Raises:
        InvalidArgument: pretrained weights, which it has none of.
    """
    _refuse_pretrained(start)
    stem = nn.Conv2d(channels, widths[0], 7, 4, padding=3, bias=False)
    blocks = [
        Residual(before, after, 1 if block == 0 else 2)
        for block, (before, after) in enumerate(itertools.pairwise((widths[0], *widths)))
    ]
    trunk = nn.Sequential(stem, nn.BatchNorm2d(widths[0]), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return trunk.to(memory_format=torch.channels_last), widths[-1]


def _resnet_32(channels: int, start: str, blocks: int, width: int) -> tuple[nn.Module, int]:
    """ResNet for 32 pixels in three stages of so many residual blocks (He 2016, arXiv 1512.03385, section 4.2).

    Raises:
        InvalidArgument: pretrained weights, which it has none of.
    """
    _refuse_pretrained(start)
    widths = [width << stage for stage in range(3) for _ in range(blocks)]
    residuals = [
        Residual(before, after, 1 if before == after else 2) for before, after in itertools.pairwise((width, *widths))
    ]
    stem = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    trunk = nn.Sequential(*stem, *residuals, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return trunk.to(memory_format=torch.channels_last), widths[-1]


BACKBONES: dict[str, Callable[[int, str], tuple[nn.Module, int]]] = {
    "small_cnn": partial(_cnn, widths=(16, 32, 32), pooled={1}),
    "quick_cnn_28": partial(_wide_cnn, widths=(16, 32, 64, 64), grid=3, pooled=(0, 1)),
    "small_cnn_32": partial(_wide_cnn, widths=(32, 64, 64, 128), grid=2),
    "slim_resnet_64": partial(_slim_resnet, widths=(32, 64, 96)),
    "resnet20_32": partial(_resnet_32, blocks=3, width=16),
    "resnet18_32": _resnet18_32,
    "vit_b16_enlarged": _vit_b16_enlarged,
}
"""name -> (channels, where weights come from) -> trunk and number of its features. Numbers are the pixels it suits."""
