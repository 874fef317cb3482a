"""A batch put through a recipe's encoder and method before anything is trained: only then torch and timm look at sizes.

Shape suffixes as in `training.method`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from index.errors import InvalidArgument, RegraftError, raise_if_out_of_memory
from training import processes
from training.determinism import raising
from training.method import EmbeddedBatch, Method, OldSummary
from training.networks.backbones import build_backbone
from training.networks.side_information import dim_of
from training.recipes import Recipe


@torch.no_grad()
def try_batch(recipe: Recipe, method: Method, old: OldSummary | None, independent_dim: int) -> None:
    """Refuse sizes that the backbone or the method cannot be trained on, and weights to start from that are not there.

    Args:
        recipe: names the backbone and the sizes. Two images stand for any number above one.
        method: built for it; not to be used again.
        old: what it was built with.
        independent_dim: M, 0 without an independent version.

    Raises:
        InvalidArgument: with what torch or timm said, or see `build_backbone`; or the backbone's gradient is not
            deterministic on the GPU that is at hand.
    """
    spec, count = recipe.preprocess, 1 if recipe.batch_size <= processes.world() else 2
    image_BCHW = torch.zeros(count, spec.channels, spec.height, spec.width)
    trained = method.trains_encoder
    backbone = build_backbone(
        recipe.backbone,
        spec.channels,
        recipe.dim,
        # There may be no such weights, which should be known before the recipe's references are trained.
        pretrained=trained and recipe.pretrained,
        weights=recipe.weights if trained else "",
        last_relu=recipe.last_relu,
    )
    with _refused(f"backbone {recipe.backbone}", count, f"of {spec.height} x {spec.width} pixels", "/backbone"):
        new_BD = backbone.train(trained)(image_BCHW)
        if trained and torch.cuda.is_available():
            _check_deterministic(recipe, backbone, image_BCHW)
    with _refused(f"method {recipe.method}", count, "", "/method"):
        method(
            EmbeddedBatch(
                new_BD,
                torch.zeros(count, dtype=torch.long),
                old_BN=torch.zeros(count, old.dim) if old else None,
                independent_BM=torch.zeros(count, independent_dim) if independent_dim else None,
                old_side_BS=torch.zeros(count, old.side_dim) if old and old.side_dim else None,
                side_BT=torch.zeros(count, dim_of(recipe)) if dim_of(recipe) else None,
            )
        )


@torch.enable_grad()
def _check_deterministic(recipe: Recipe, backbone: nn.Module, image_BCHW: Tensor) -> None:
    if names := raising(lambda: backbone(image_BCHW)):
        raise InvalidArgument(
            f"backbone {recipe.backbone} cannot be trained on a GPU at {image_BCHW.shape[2]} x {image_BCHW.shape[3]} "
            f"pixels: its {' and '.join(sorted(names))} is not deterministic there, and every training is; choose "
            "another backbone or size, or hide the GPU (CUDA_VISIBLE_DEVICES=)",
            pointer="/backbone",
        )


@contextmanager
def _refused(what: str, count: int, size: str, pointer: str) -> Iterator[None]:
    try:
        yield
    except RegraftError:
        raise
    except Exception as error:  # torch and timm raise many types
        raise_if_out_of_memory(error)
        images = "one image per process" if count == 1 else f"images {size}".rstrip()
        raise InvalidArgument(
            f"{what} cannot be trained on {images}: {error}", pointer="/batch_size" if count == 1 else pointer
        ) from error
