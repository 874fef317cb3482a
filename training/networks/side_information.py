"""Side-information psi: what an old version stores of an item beside its embedding, for transforms yet unknown.

FCT (Ramanujan, CVPR 2022, section 3.3): psi is learned on the old version's training images alone, at a time when
nobody knows which new version will come. It has the backbone of its version, a unit vector or signs as output, and one
of the kinds below as its objective; what the objective needs beside psi is dropped afterwards.

Shape suffixes: B batch, S side-information, C classes; images as elsewhere.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.errors import InvalidArgument
from training.data.transforms import crop_and_zoom
from training.losses.contrasts import nt_xent
from training.losses.gather import gather
from training.method import Classifier
from training.networks.backbones import build_backbone
from training.networks.heads import HEADS
from training.recipes import Recipe

NONE = "none"
SIGN_MARGIN = 1e-4
"""A number closer to 0 may have another sign in torch than in onnxruntime."""
SEED = 1_000
"""Added to a recipe's seed: psi must not start from the weights of the encoder that it complements."""


class Psi(nn.Module):
    """Images -> side-information.

    Unit vectors: their length says nothing to h, whose first layer is normalised. As signs they take one bit a
    dimension, 1 or -1.

    Args:
        backbone: images -> (B, S).
        bits: give signs.
    """

    def __init__(self, backbone: nn.Module, bits: bool) -> None:
        super().__init__()
        self.backbone, self.bits = backbone, bits

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, S) as it is stored."""
        return finished(self.backbone(image_BCHW), self.bits)

    @torch.inference_mode()
    def is_stable(self, image_BCHW: Tensor) -> Tensor:
        """(B,) whether another machine's rounding cannot change what is stored of an image."""
        return is_stable(self.backbone(image_BCHW), self.bits)


def finished(z_BS: Tensor, bits: bool) -> Tensor:
    """Raw outputs as side-information is stored: unit vectors, or the signs 1 and -1."""
    return torch.where(z_BS > 0, 1.0, -1.0) if bits else F.normalize(z_BS)


def is_stable(z_BS: Tensor, bits: bool) -> Tensor:
    """(B,) whether no sign in a row could differ by a rounding error."""
    return (z_BS.abs() > SIGN_MARGIN).all(1) | (not bits)


class Objective(nn.Module):
    """What psi's backbone is trained by."""

    views = 1
    """How often each image of a batch is in it, each time augmented anew: the batch as a whole, then again."""

    @abstractmethod
    def forward(self, backbone: nn.Module, image_BCHW: Tensor, label_B: Tensor) -> Tensor:
        """The loss of one batch."""


class SimClr(Objective):
    """Two augmented views of an image are each other's match among all images (Chen 2020, arXiv 2002.05709).

    Args:
        dim: S.
        temperature: of NT-Xent.
        crops: further views, of which a random quarter is seen, at the size of the whole; each is compared with both
            whole views (multi-crop, Caron 2020, arXiv 2006.09882, section 3.3).
    """

    def __init__(self, dim: int, temperature: float, crops: int = 0) -> None:
        super().__init__()
        self.views = 2 + crops
        self.project = nn.Sequential(nn.ReLU(), nn.Linear(dim, dim))
        self.temperature = temperature

    def forward(self, backbone: nn.Module, image_BCHW: Tensor, label_B: Tensor) -> Tensor:
        """NT-Xent over the images of all processes, the mean over the pairs of views."""
        whole = 2 * (len(image_BCHW) // self.views)
        seen_BCHW = torch.cat([image_BCHW[:whole], quarters(image_BCHW[whole:])]) if self.views > 2 else image_BCHW
        views = self.project(backbone(seen_BCHW).float()).chunk(self.views)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            views = tuple(gather(view_BS) for view_BS in views)
        pairs = [(views[0], views[1]), *itertools.product(views[:2], views[2:])]
        return torch.stack([nt_xent(one_BS, other_BS, self.temperature) for one_BS, other_BS in pairs]).mean()


def quarters(image_BCHW: Tensor) -> Tensor:
    """A random quarter of each image, half its height and half its width, at the image's size."""
    top_B, left_B = 0.5 * torch.rand(2, len(image_BCHW), device=image_BCHW.device)
    half_B = torch.full_like(top_B, 0.5)
    return crop_and_zoom(image_BCHW, top_B, left_B, half_B, half_B)


class Autoencoder(Objective):
    """The image again, from psi alone: mean square over its normalised pixels.

    Args:
        dim: S.
        channels, height, width: of the image.
    """

    def __init__(self, dim: int, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.size = (height, width)
        doublings = max(0, math.ceil(math.log2(min(height, width) / 4)))
        widths = [max(16, 128 >> step) for step in range(doublings + 1)]
        layers: list[nn.Module] = [nn.Linear(dim, widths[0] * 16), nn.Unflatten(1, (widths[0], 4, 4)), nn.ReLU()]
        for before, after in itertools.pairwise(widths):
            layers += [nn.Upsample(scale_factor=2), nn.Conv2d(before, after, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(after), nn.ReLU()]
        self.decode = nn.Sequential(*layers)
        self.paint = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, backbone: nn.Module, image_BCHW: Tensor, label_B: Tensor) -> Tensor:
        """What the decoder gets wrong."""
        grown = F.interpolate(self.decode(F.normalize(backbone(image_BCHW).float())), self.size, mode="nearest")
        return F.mse_loss(self.paint(grown), image_BCHW)


class Alternate(Objective):
    """A second model of the old classes, from another start.

    Args:
        classifier: the recipe's base loss for S dimensions.
        mixup: train it on mixed pairs of images instead, the share of each uniform in 0 to 1 (Zhang 2018, arXiv
            1710.09412, alpha 1), another objective than the encoder's.
    """

    def __init__(self, classifier: Classifier, mixup: bool) -> None:
        super().__init__()
        self.classifier, self.mixup = classifier, mixup

    def forward(self, backbone: nn.Module, image_BCHW: Tensor, label_B: Tensor) -> Tensor:
        """The base loss of the images, or of mixed ones: the mean of both labels' losses, weighted by their shares."""
        if not self.mixup:
            plain: Tensor = self.classifier(backbone(image_BCHW).float(), label_B)
            return plain
        share, other_B = torch.rand(()).item(), torch.randperm(len(label_B), device=label_B.device)
        z_BS = backbone(share * image_BCHW + (1 - share) * image_BCHW[other_B]).float()
        loss: Tensor = share * self.classifier(z_BS, label_B) + (1 - share) * self.classifier(z_BS, label_B[other_B])
        return loss


def _simclr(recipe: Recipe, classes: int) -> Objective:  # noqa: ARG001
    return SimClr(dim_of(recipe), recipe.side_temperature, recipe.side_crops)


def _autoencoder(recipe: Recipe, classes: int) -> Objective:  # noqa: ARG001
    spec = recipe.preprocess
    return Autoencoder(dim_of(recipe), spec.channels, spec.height, spec.width)


def _alternate(recipe: Recipe, classes: int, mixup: bool) -> Objective:
    head = HEADS[recipe.head](dim_of(recipe), classes)
    return Alternate(Classifier(head, recipe.label_smoothing), mixup)


KINDS: dict[str, Callable[[Recipe, int], Objective]] = {
    "simclr": _simclr,
    "autoencoder": _autoencoder,
    "alternate": partial(_alternate, mixup=False),
    "alternate_mixup": partial(_alternate, mixup=True),
}
"""Name -> (psi's own recipe, classes) -> objective."""


def check_side(recipe: Recipe) -> None:
    """Refuse side-information that cannot be made.

    Raises:
        InvalidArgument: names the field and its legal values.
    """
    if recipe.side not in {NONE, *KINDS}:
        raise InvalidArgument(f"side must be one of {', '.join((NONE, *KINDS))}, not {recipe.side!r}", pointer="/side")
    if recipe.side_crops < 0 or (recipe.side_crops and recipe.side != "simclr"):
        raise InvalidArgument(
            f"side_crops must be 0, or more with side=simclr, not {recipe.side_crops}", pointer="/side_crops"
        )
    if recipe.side == "simclr" and (recipe.side_augment or recipe.augment) == "none":
        raise InvalidArgument("side=simclr requires two views of an image: set side_augment", pointer="/side_augment")
    if not recipe.side_temperature > 0:
        raise InvalidArgument(
            f"side_temperature must be above 0, not {recipe.side_temperature}", pointer="/side_temperature"
        )


def dim_of(recipe: Recipe) -> int:
    """S: what a version of this recipe stores beside each embedding; 0 without side-information."""
    return 0 if recipe.side == NONE else recipe.side_dim or recipe.dim


def build_psi(recipe: Recipe, *, pretrained: bool = False, weights: str = "") -> Psi | None:
    """The recipe's psi with fresh or pretrained weights; None without side-information.

    Raises:
        InvalidArgument: an unknown backbone, or there are no such weights.
    """
    if recipe.side == NONE:
        return None
    channels, dim = recipe.preprocess.channels, dim_of(recipe)
    return Psi(build_backbone(recipe.backbone, channels, dim, pretrained=pretrained, weights=weights), recipe.side_bits)


def recipe_of_psi(recipe: Recipe) -> Recipe:
    """How psi is trained: as the version's encoder, but for its own seed, augmentation and number of epochs.

    Warm-up and milestones keep their place in the training, in whole epochs.
    """
    epochs = recipe.side_epochs or recipe.epochs
    milestones = [recipe.scale_epoch(milestone, epochs) for milestone in recipe.milestones]
    return replace(
        recipe,
        augment=recipe.side_augment or recipe.augment,
        epochs=epochs,
        warmup_epochs=recipe.scale_epoch(recipe.warmup_epochs, epochs),
        milestones=tuple(dict.fromkeys(milestone for milestone in milestones if milestone)),
        seed=recipe.seed + SEED,
        cache_old=False,
        held_out=0.0,
        patience=0,
    )
