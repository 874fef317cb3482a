"""scikit-learn's digits: every method in seconds on a CPU. The version folders under examples/ are made by these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from index.version import Preprocess
from training.recipes.family import Family
from training.recipes.recipe import Recipe


def digits_v1() -> Recipe:
    """Old version: five digits from 100 images."""
    return Recipe(
        name="digits_v1",
        summary="scikit-learn's digits: an old version that knows five digits from 100 images (seconds on a CPU)",
        data="digits_old",
        preprocess=Preprocess(8, 8, mode="L", mean=(0.3,), std=(0.38,)),
        augment="none",
        backbone="small_cnn",
        dim=16,
        rate=1e-3,
        weight_decay=1e-4,
        epochs=40,
        warmup_epochs=2,
        batch_size=32,
        threads=1,
    )


def digits_independent() -> Recipe:
    """New version that is compatible with nothing: what FCT starts from."""
    return replace(
        digits_v1(),
        name="digits_independent",
        summary="scikit-learn's digits: ten digits from 900 images, compatible with nothing",
        data="digits_new",
        rate=3e-3,
        epochs=30,
        batch_size=64,
        seed=1,
    )


def digits_bct() -> Recipe:
    """New version, compatible as it is."""
    return replace(
        digits_independent(),
        name="digits_bct",
        summary="scikit-learn's digits: a new version whose queries search old items directly (BCT)",
        method="bct",
        old="examples/v1",
    )


def digits_oca() -> Recipe:
    """New version whose first components are compatible."""
    return replace(
        digits_independent(),
        name="digits_oca",
        summary="scikit-learn's digits: a new version with 8 more dimensions, cut off to search old items (OCA)",
        method="oca",
        dim=24,
        old="examples/v1",
    )


def digits_fct() -> Recipe:
    """New version to which old items are moved."""
    return replace(
        digits_independent(),
        name="digits_fct",
        summary="scikit-learn's digits: an independent new version and a transform of old items to it (FCT)",
        method="fct",
        options={"branch": 128, "trunk": 128},
        old="examples/v1",
        independent="digits_independent",
        rate=5e-4,
        weight_decay=3.05e-5,
        epochs=80,
        warmup_epochs=5,
    )


def digits_v1_side() -> Recipe:
    """Old version that stores side-information too, for a transform that nobody knows yet."""
    return replace(
        digits_v1(),
        name="digits_v1_side",
        summary="scikit-learn's digits: digits_v1 with side-information beside each embedding (SimCLR)",
        side="simclr",
        side_augment="shift",
        side_epochs=100,
    )


def digits_fct_side() -> Recipe:
    """New version to which old items are moved by embedding and side-information; it stores some of its own."""
    return replace(
        digits_fct(),
        name="digits_fct_side",
        summary="scikit-learn's digits: FCT with side-information, and with some of its own for the next version",
        old="digits_v1_side",
        side="simclr",
        side_augment="shift",
        side_epochs=30,
    )


def digits_bt2() -> Recipe:
    """New version that holds the old space and an independent one."""
    return replace(
        digits_independent(),
        name="digits_bt2",
        summary="scikit-learn's digits: the old space, an independent new one and 4 dimensions in one version (BT2)",
        method="bt2",
        options={"extra": 4},
        dim=32,
        old="examples/v1",
        independent="digits_independent",
    )


def digits_hyperbolic() -> Recipe:
    """Old version in hyperbolic space, for HBCT."""
    return replace(
        digits_v1(),
        name="digits_hyperbolic",
        summary="scikit-learn's digits: digits_v1 in hyperbolic space",
        method="hbct",
        options={"zeta": 1.0},
        head="lorentz_mlr",
        space="lorentz",
    )


def digits_hbct() -> Recipe:
    """New version in the cones of a hyperbolic old one."""
    return replace(
        digits_independent(),
        name="digits_hbct",
        summary="scikit-learn's digits: a new version in the entailment cones of a hyperbolic old one (HBCT)",
        method="hbct",
        options={"zeta": 1.2},
        head="lorentz_mlr",
        space="lorentz",
        old="digits_hyperbolic",
        epochs=60,
    )


def digits_baseline(method: str, how: str) -> Recipe:
    """New version by a method that needs no other setting than its defaults."""
    return replace(
        digits_independent(),
        name=f"digits_{method}",
        summary=f"scikit-learn's digits: {how}",
        method=method,
        old="examples/v1",
    )


FAMILY = Family(
    "digits",
    "scikit-learn's digits",
    digits_v1(),
    digits_independent(),
    # Sizes alone: every method at its defaults, with its paper's weights.
    {
        "side_v1": {"side_augment": "shift", "side_epochs": 100},
        "oca": {"dim": 24},
        "bt2": {"dim": 32, "options": {"extra": 4}},
        "fct": {"options": {"branch": 128, "trunk": 128}},
        "hbct": {"epochs": 60},
    },
)
"""Every method once more, for a comparison: `benchmarks/compatibility.py`."""

RECIPES: dict[str, Callable[[], Recipe]] = {
    "digits_v1": digits_v1,
    "digits_independent": digits_independent,
    "digits_bct": digits_bct,
    "digits_oca": digits_oca,
    "digits_fct": digits_fct,
    "digits_v1_side": digits_v1_side,
    "digits_fct_side": digits_fct_side,
    "digits_bt2": digits_bt2,
    "digits_hyperbolic": digits_hyperbolic,
    "digits_hbct": digits_hbct,
    "digits_l2": partial(digits_baseline, "l2", "embeddings kept in place (baseline l2)"),
    "digits_lwf": partial(digits_baseline, "lwf", "the old classifier's outputs distilled (baseline LwF)"),
    "digits_contrast": partial(digits_baseline, "contrast", "contrast with old and new embeddings (BT2's baseline)"),
    "digits_hot_refresh": partial(digits_baseline, "hot_refresh", "the same contrast, sharper (Hot-Refresh)"),
    "digits_advbct": partial(digits_baseline, "advbct", "a discriminator and elastic boundaries (AdvBCT)"),
    "digits_hoc": partial(digits_baseline, "hoc", "contrast anchored in old embeddings (HOC)"),
}
