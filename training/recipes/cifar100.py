"""CIFAR-100 (Krizhevsky 2009), measured on its 10,000 test images: a reduced protocol, and two of the papers'.

`root` is the folder cifar-100-python, with the files train, test and meta; or, with data=folders, one that holds train/
and test/ with a folder for each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from index.version import Preprocess
from training.recipes.family import MANY_CLASSES, MANY_CLASSES_SGD, Family
from training.recipes.recipe import Recipe

MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Protocol B of docs/methods.md, HBCT's (Bui 2025, arXiv 2506.05826).
RESNET18 = Recipe(
    name="resnet18",
    data="cifar100",
    preprocess=Preprocess(32, 32, mean=MEAN, std=STD),
    augment="crop_flip",
    backbone="resnet18_32",
    dim=128,
    optimiser="sgd",
    rate=0.1,
    weight_decay=5e-4,
    epochs=200,
    batch_size=128,
)
NEW_RESNET18 = replace(RESNET18, seed=1)
NEW_VIT = replace(NEW_RESNET18, backbone="vit_b16_enlarged", pretrained=True, rate=0.005, epochs=80)

# Protocol A, that of BT2, OCA and FCT (their public code).
RESNET50 = replace(
    RESNET18,
    preprocess=Preprocess(224, 224, resize=224, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    augment="flip",
    backbone="timm/resnet50",
    label_smoothing=0.1,
    optimiser="adam",
    rate=1e-3,
    weight_decay=3.05e-5,
    epochs=100,
    warmup_epochs=5,
    workers=8,
)

SMALL = replace(
    RESNET18,
    backbone="quick_cnn_28",
    fraction=0.5,
    dim=64,
    head="norm_softmax",
    optimiser="adam",
    rate=3e-3,
    weight_decay=1e-4,
    epochs=2,
    warmup_epochs=1,
)

# Protocol B within hours of a CPU: a network 14 times cheaper, 30 epochs. Where a CPU has no bfloat16 of its own, mixed
# precision is ten times slower than float32.
RESNET20 = replace(RESNET18, backbone="resnet20_32", epochs=30)

RESNET18_SGD: dict[str, Mapping[str, Any]] = {**MANY_CLASSES_SGD, "hot_refresh": {"warmup_epochs": 1}}
"""Without a warm-up the loss of Hot-Refresh was NaN after a hundred steps of a ResNet-18, in one of two trainings."""

RESNET20_SGD: dict[str, Mapping[str, Any]] = {
    **MANY_CLASSES_SGD,
    "l2": {"options": {"weight": 3.84}},
    "lwf": {"options": {"weight": 0.148}},
    "bct": {"options": {**MANY_CLASSES_SGD["bct"]["options"], "weight": 0.115}},
    "contrast": {"options": {"weight": 0.384}},
    "hot_refresh": {"options": {"weight": 0.384}},
    "hoc": {"options": {"weight": 0.148}},
}
"""Weights of the best of three trials on held-out training images; BT2, OCA, HBCT and AdvBCT were best with those that
they have: see docs/decisions/0062."""

FAMILIES = (
    Family(
        "cifar100_small",
        "CIFAR-100 reduced, on a CPU",
        replace(SMALL, classes=50),
        replace(SMALL, epochs=5, seed=1),
        {**MANY_CLASSES, "fct": {"options": {"branch": 128, "trunk": 512}, "epochs": 8, "warmup_epochs": 2}},
    ),
    Family(
        "cifar100_resnet20",
        "CIFAR-100, 50 classes -> 100, ResNet-20",
        replace(RESNET20, classes=50),
        replace(RESNET20, seed=1),
        RESNET20_SGD,
    ),
    Family("cifar100_class", "CIFAR-100, 50 classes -> 100", replace(RESNET18, classes=50), NEW_RESNET18, RESNET18_SGD),
    Family(
        "cifar100_data",
        "CIFAR-100, 30 % of the images -> all",
        replace(RESNET18, fraction=0.3),
        NEW_RESNET18,
        RESNET18_SGD,
    ),
    Family("cifar100_arch", "CIFAR-100, ResNet-18 -> ViT-B/16", RESNET18, NEW_VIT, MANY_CLASSES_SGD),
    Family(
        "cifar100_both",
        "CIFAR-100, 50 classes -> 100 and ViT-B/16",
        replace(RESNET18, classes=50),
        NEW_VIT,
        MANY_CLASSES_SGD,
    ),
    # BT2's and OCA's own runs of it have no scale, so this one has none either.
    Family(
        "cifar100_resnet50",
        "CIFAR-100 at 224 pixels, 50 classes -> 100",
        replace(RESNET50, classes=50),
        replace(RESNET50, seed=1),
    ),
)
