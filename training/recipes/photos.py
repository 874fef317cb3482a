"""A small encoder for colour photos of any size, and the better one that replaces it: examples/photos-v1 and photos-v2.

Both are trained on CIFAR-100 and Tiny ImageNet together, side by side in the folder `root`: train/<set>/<class>/<image>
and test/<set>/<class>/<image>. A tenth of the classes is in neither training (a larger `class_share` keeps the classes
of a smaller one), so the test images also tell how new things are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from index.version import Preprocess
from training.recipes.cifar100 import IMAGENET_MEAN, IMAGENET_STD
from training.recipes.recipe import Recipe


def photos_v1() -> Recipe:
    """Old version: half of the classes, half of their images."""
    return Recipe(
        name="photos_v1",
        summary="photos: a small old version for colour images, half of the classes and images (minutes on a CPU)",
        data="folders",
        root="photo-sets",
        class_share=0.45,
        fraction=0.5,
        preprocess=Preprocess(64, 64, resize=64, mean=IMAGENET_MEAN, std=IMAGENET_STD),
        augment="crop_flip",
        backbone="slim_resnet_64",
        dim=64,
        head="norm_softmax",
        rate=3e-3,
        weight_decay=1e-4,
        epochs=20,
        warmup_epochs=1,
        batch_size=128,
        threads=1,
    )


def photos_oca() -> Recipe:
    """New version whose first components are compatible."""
    return replace(
        photos_v1(),
        name="photos_oca",
        summary="photos: a new version that goes on from the old one, with 32 more dimensions (OCA; half an hour)",
        method="oca",
        options={"logits": "cosine", "scale": 32.0, "influence_weight": 4.0, "alignment_weight": 5.0},
        dim=96,
        old="examples/photos-v1",
        weights="examples/photos-v1/weights.safetensors",
        cache_old=True,
        class_share=0.9,
        epochs=40,
        seed=1,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"photos_v1": photos_v1, "photos_oca": photos_oca}
