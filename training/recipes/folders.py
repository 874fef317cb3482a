"""Images that you bring as folders, a folder a class: your own, and larger data sets.

`root` holds train/ and test/ (or query/ and gallery/), or the classes' folders themselves; then about a fifth of each
is kept for testing. `folders_*` are for your own: both versions train on all there is, so give each its `root`.
ImageNet and Tiny ImageNet go from half of their classes to all; faces (ArcFace, Deng 2019, arXiv 1801.07698) from half
of the people, aligned and cut to 112 x 112 pixels, to all, and are measured on people that nobody trained on.
"""

from __future__ import annotations

from dataclasses import replace

from index.version import Preprocess
from training.recipes.cifar100 import IMAGENET_MEAN, IMAGENET_STD, RESNET18, RESNET50
from training.recipes.family import MANY_CLASSES, MANY_CLASSES_SGD, Family
from training.recipes.recipe import Recipe

TINY = replace(
    RESNET18,
    data="folders",
    preprocess=Preprocess(64, 64, resize=64, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    epochs=100,
)

IMAGENET = replace(
    RESNET50,
    data="folders",
    preprocess=Preprocess(224, 224, resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    augment="resized_crop_flip",
    batch_size=256,
    workers=16,
)

FACE = Recipe(
    name="face",
    data="folders",
    preprocess=Preprocess(112, 112, resize=112, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    augment="flip",
    backbone="timm/resnet50",
    dim=512,
    head="arcface",
    optimiser="sgd",
    rate=0.1,
    weight_decay=5e-4,
    epochs=20,
    warmup_epochs=1,
    batch_size=256,
    workers=8,
)

OWN = Recipe(
    name="own",
    data="folders",
    unreadable="skip",
    preprocess=Preprocess(128, 128, resize=144, mean=IMAGENET_MEAN, std=IMAGENET_STD),
    augment="resized_crop_flip",
    backbone="timm/resnet18",
    dim=128,
    rate=1e-3,
    weight_decay=1e-4,
    epochs=30,
    warmup_epochs=2,
    batch_size=64,
)

FAMILIES = (
    Family("folders", "your own images, a folder a label", OWN, replace(OWN, seed=1)),
    Family(
        "tiny_imagenet",
        "Tiny ImageNet, half of the classes -> all",
        replace(TINY, class_share=0.5),
        replace(TINY, seed=1),
        MANY_CLASSES_SGD,
    ),
    Family(
        "imagenet",
        "ImageNet, 500 classes -> 1,000",
        replace(IMAGENET, classes=500),
        replace(IMAGENET, seed=1),
        MANY_CLASSES,
    ),
    Family(
        "face",
        "faces, half of the people -> all",
        replace(FACE, class_share=0.5),
        replace(FACE, seed=1),
        MANY_CLASSES_SGD,
    ),
)
