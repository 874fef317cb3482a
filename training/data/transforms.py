"""From images to batches of tensors: the fixed way of evaluation, and the random ways of training.

A torchvision v2 transform draws its random numbers once a call, so a whole batch would share one crop; image by image
it costs more than a small backbone's step. The batch functions here draw for every image of a batch and move the batch
at once; tests hold each against v2's functional with the same numbers. What must see an image before it has the
encoder's size (random resized crops) is v2, image by image.

Shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import methodcaller

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from index.encoders.image import preprocess
from index.errors import InvalidArgument
from index.version import Preprocess
from training.data.colours import jitter

TURN, SHIFT, ZOOM = math.radians(10), 0.1, 0.1
"""Largest rotation, shift as a share of the side, and change of size of `shift`."""
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""What part of an image a resized crop shows, and its width over its height; as torchvision's."""


def unchanged(image_BCHW: Tensor) -> Tensor:
    """As they are."""
    return image_BCHW


@dataclass(frozen=True)
class Augmentation:
    """How training sees an image.

    Args:
        batch: (B, C, H, W) in [0, 1] -> the same shape.
        size: an image to the encoder's size, at random; None: as in evaluation, so that it can be done once.
    """

    batch: Callable[[Tensor], Tensor] = unchanged
    size: Callable[[Preprocess], list[v2.Transform]] | None = None


@dataclass(frozen=True)
class Sized:
    """A decoded image -> uint8 (C, H, W), by serving's own resize, which holds of a very long image what is cropped.

    A class, as what a worker process is started with must be picklable.
    """

    spec: Preprocess

    def __call__(self, image: Image.Image) -> Tensor:
        channels = self.spec.channels
        plain = replace(self.spec, mean=(0.0,) * channels, std=(1.0,) * channels)
        return torch.from_numpy(preprocess(image, plain)).mul_(255).round_().to(torch.uint8)


def sizing(spec: Preprocess, augmentation: Augmentation | None = None) -> Callable[[Image.Image], Tensor]:
    """A decoded image -> uint8 (C, H, W) of the encoder's size."""
    random = augmentation.size if augmentation else None
    if random is None:
        return Sized(spec)
    mode = v2.Lambda(methodcaller("convert", spec.mode))
    made: Callable[[Image.Image], Tensor] = v2.Compose([mode, *random(spec), v2.PILToTensor()])
    return made


def pixels(image_BCHW: Tensor, spec: Preprocess, augmentation: Augmentation | None = None) -> Tensor:
    """uint8 (..., C, H, W) -> float32 of the encoder's scale, augmented in between."""
    scaled_BCHW = v2.functional.to_dtype(image_BCHW, torch.float32, scale=True)
    if augmentation:
        scaled_BCHW = augmentation.batch(scaled_BCHW)
    normalised: Tensor = v2.functional.normalize(scaled_BCHW, list(spec.mean), list(spec.std))
    return normalised


def find_augmentation(name: str) -> Augmentation:
    """The augmentation of that name.

    Raises:
        InvalidArgument: an unknown one; lists the legal ones.
    """
    if name not in AUGMENTATIONS:
        raise InvalidArgument(f"augment {name!r} is unknown; legal: {', '.join(AUGMENTATIONS)}", pointer="/augment")
    return AUGMENTATIONS[name]


def flip(image_BCHW: Tensor) -> Tensor:
    """Mirror images, every other one on average."""
    mirrored_B111 = torch.rand(len(image_BCHW), 1, 1, 1, device=image_BCHW.device) < 0.5
    return torch.where(mirrored_B111, image_BCHW.flip(-1), image_BCHW)


def crop(image_BCHW: Tensor) -> Tensor:
    """Crops of the same size out of a black border of an eighth."""
    count, _, height, width = image_BCHW.shape
    border = height // 8
    top_B, left_B = torch.randint(2 * border + 1, (2, count), device=image_BCHW.device)
    return cropped(F.pad(image_BCHW, [border] * 4), top_B, left_B, height, width)


def crop_flip(image_BCHW: Tensor) -> Tensor:
    """Crops and mirror images: CIFAR's usual."""
    return flip(crop(image_BCHW))


def resized_crop(image_BCHW: Tensor) -> Tensor:
    """A random part of each image, blown up to its size: for images that have the encoder's size already."""
    count, _, height, width = image_BCHW.shape
    area_B, ratio_B, across_B, down_B = torch.rand(4, count, device=image_BCHW.device)
    size_B = (AREA[0] + (AREA[1] - AREA[0]) * area_B).sqrt()
    skew_B = (math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * ratio_B).exp()
    skew_B = (skew_B * height / width).sqrt()  # both sizes are shares of their sides
    high_B, wide_B = (size_B / skew_B).clamp(max=1), (size_B * skew_B).clamp(max=1)
    return crop_and_zoom(image_BCHW, (1 - high_B) * down_B, (1 - wide_B) * across_B, high_B, wide_B)


def resized_crop_flip(image_BCHW: Tensor) -> Tensor:
    """Random parts, mirrored or not."""
    return flip(resized_crop(image_BCHW))


def resized_crop_jitter(image_BCHW: Tensor) -> Tensor:
    """Random parts, mirrored or not, in other colours: SimCLR's."""
    return jitter(flip(resized_crop(image_BCHW)))


def flip_jitter(image_BCHW: Tensor) -> Tensor:
    """Mirrored or not, in other colours."""
    return jitter(flip(image_BCHW))


def shift(image_BCHW: Tensor) -> Tensor:
    """Small rotations, shifts and changes of size, for handwriting: a mirrored 3 is no 3."""
    count = len(image_BCHW)
    turn_B, zoom_B, across_B, down_B = 2 * torch.rand(4, count, device=image_BCHW.device) - 1
    return moved(image_BCHW, TURN * turn_B, 1 + ZOOM * zoom_B, SHIFT * across_B, SHIFT * down_B)


def cropped(image_BCHW: Tensor, top_B: Tensor, left_B: Tensor, height: int, width: int) -> Tensor:
    """From each image the window of this size whose first corner is (top, left)."""
    every_window = image_BCHW.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, tops, lefts, H, W), a view
    return every_window[torch.arange(len(image_BCHW), device=top_B.device), :, top_B, left_B]


def crop_and_zoom(image_BCHW: Tensor, top_B: Tensor, left_B: Tensor, high_B: Tensor, wide_B: Tensor) -> Tensor:
    """From each image the part with this first corner and size, all as shares of its sides, at the image's size."""
    zero_B = torch.zeros_like(top_B)
    x_B3 = torch.stack([wide_B, zero_B, 2 * left_B + wide_B - 1], dim=1)
    y_B3 = torch.stack([zero_B, high_B, 2 * top_B + high_B - 1], dim=1)
    grid = F.affine_grid(torch.stack([x_B3, y_B3], dim=1), list(image_BCHW.shape), align_corners=False)
    return F.grid_sample(image_BCHW, grid, padding_mode="border", align_corners=False)


def moved(image_BCHW: Tensor, turn_B: Tensor, zoom_B: Tensor, across_B: Tensor, down_B: Tensor) -> Tensor:
    """Turn each image about its centre (radians, clockwise), scale it, then shift it by shares of its sides.

    Bilinear; what comes in from outside repeats the border, so that paper stays white and night stays black.
    """
    height, width = image_BCHW.shape[-2:]
    cos_B, sin_B = turn_B.cos() / zoom_B, turn_B.sin() / zoom_B
    # Coordinates run from -1 to 1 along both sides; the grid asks where each output pixel comes from.
    x_B, y_B = 2 * across_B * width, 2 * down_B * height
    to_x_B3 = torch.stack([cos_B, sin_B * height / width, -(cos_B * x_B + sin_B * y_B) / width], dim=1)
    to_y_B3 = torch.stack([-sin_B * width / height, cos_B, (sin_B * x_B - cos_B * y_B) / height], dim=1)
    grid = F.affine_grid(torch.stack([to_x_B3, to_y_B3], dim=1), list(image_BCHW.shape), align_corners=False)
    return F.grid_sample(image_BCHW, grid, padding_mode="border", align_corners=False)


def _resized_crop(spec: Preprocess) -> list[v2.Transform]:
    return [v2.RandomResizedCrop((spec.height, spec.width), interpolation=v2.InterpolationMode(spec.interpolation))]


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(),
    "shift": Augmentation(shift),
    "flip": Augmentation(flip),
    "crop_flip": Augmentation(crop_flip),
    "resized_crop_flip": Augmentation(flip, size=_resized_crop),
    "resized_crop_jitter": Augmentation(flip_jitter, size=_resized_crop),
    "small_crop_flip": Augmentation(resized_crop_flip),
    "small_crop_jitter": Augmentation(resized_crop_jitter),
}
