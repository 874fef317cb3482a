"""Omniglot (Lake 2015): half of the training characters, then all; measured on characters of other alphabets.

`root` holds the background set as train/ and the evaluation set as test/, a folder for each character at any depth.
"""

from __future__ import annotations

from dataclasses import replace

from index.version import Preprocess
from training.recipes.family import MANY_CLASSES, Family
from training.recipes.recipe import Recipe

V1 = Recipe(
    name="omniglot_v1",
    data="folders",
    class_share=0.5,
    preprocess=Preprocess(28, 28, mode="L", stretch=True, mean=(0.92,), std=(0.19,)),
    augment="shift",
    backbone="quick_cnn_28",
    dim=64,
    head="norm_softmax",
    rate=3e-3,
    weight_decay=1e-4,
    epochs=4,
    warmup_epochs=1,
    batch_size=128,
)
INDEPENDENT = replace(V1, class_share=1.0, epochs=8, seed=1)

FAMILY = Family(
    "omniglot",
    "Omniglot on a CPU",
    V1,
    INDEPENDENT,
    {
        **MANY_CLASSES,
        "side_v1": {"side_epochs": 8},
        "fct": {"options": {"branch": 128, "trunk": 512}, "epochs": 12, "warmup_epochs": 2},
    },
)
