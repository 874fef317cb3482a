"""Colours changed at random, every image of a batch for itself: SimCLR's jitter.

Chen 2020, arXiv 2002.05709, appendix A, with strength 0.5, its choice for images of 32 pixels. Steps are held against
torchvision's v2.functional with the same numbers. Images of one channel change in brightness and contrast only.

Shape suffixes: B batch, C channels, H height, W width; values in [0, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.4, 0.1
"""Factors are drawn from 1 - x to 1 + x; turns of the hue from -x to x of the circle."""
JITTERED, GREY = 0.8, 0.2
"""Shares of images that are jittered, and that lose their colours."""
LUMA = (0.2989, 0.587, 0.114)


def jitter(image_BCHW: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue of most images, then some without colours."""
    count, device = len(image_BCHW), image_BCHW.device
    bright_B, contrast_B, saturation_B, hue_B = 2 * torch.rand(4, count, device=device) - 1
    changed = contrasted(brightened(image_BCHW, 1 + BRIGHTNESS * bright_B), 1 + CONTRAST * contrast_B)
    if image_BCHW.shape[1] == len(LUMA):
        changed = turned(saturated(changed, 1 + SATURATION * saturation_B), HUE * hue_B)
    changed = torch.where(_some(JITTERED, count, device), changed, image_BCHW)
    return torch.where(_some(GREY, count, device), grey(changed).expand_as(changed), changed)


def brightened(image_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """Every value times a factor."""
    return (image_BCHW * _each(factor_B)).clamp(0, 1)


def contrasted(image_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """Every value further from the image's mean grey, or nearer to it."""
    return _blend(image_BCHW, grey(image_BCHW).mean((1, 2, 3), keepdim=True), factor_B)


def saturated(image_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """Every pixel further from its own grey, or nearer to it."""
    return _blend(image_BCHW, grey(image_BCHW), factor_B)


def turned(image_BCHW: Tensor, turn_B: Tensor) -> Tensor:
    """The hue of (B, 3, H, W) moved by a share of the circle."""
    red, green, blue = image_BCHW.unbind(1)
    value, least = image_BCHW.amax(1), image_BCHW.amin(1)
    chroma = value - least
    safe = torch.where(chroma == 0, 1.0, chroma)
    by_red, by_green, by_blue = (green - blue) / safe, (blue - red) / safe + 2, (red - green) / safe + 4
    sixths = torch.where(value == red, by_red, torch.where(value == green, by_green, by_blue))
    sixths = sixths + 6 * turn_B[:, None, None]
    # Each channel from hue, value and chroma: en.wikipedia.org/wiki/HSL_and_HSV, "HSV to RGB alternative".
    places = [(sixths + place) % 6 for place in (5, 3, 1)]
    return torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in places], dim=1)


def grey(image_BCHW: Tensor) -> Tensor:
    """(B, 1, H, W) what an image without colours shows."""
    if image_BCHW.shape[1] != len(LUMA):
        return image_BCHW.mean(1, keepdim=True)
    return (image_BCHW * image_BCHW.new_tensor(LUMA)[:, None, None]).sum(1, keepdim=True)


def _blend(image_BCHW: Tensor, other: Tensor, factor_B: Tensor) -> Tensor:
    return (other + _each(factor_B) * (image_BCHW - other)).clamp(0, 1)


def _each(number_B: Tensor) -> Tensor:
    return number_B[:, None, None, None]


def _some(share: float, count: int, device: torch.device) -> Tensor:
    return torch.rand(count, 1, 1, 1, device=device) < share
