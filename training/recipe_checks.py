"""Checks of a recipe's numbers and choices before anything is read or trained; methods and data check the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from index.errors import InvalidArgument
from index.version import MAX_DIM
from training.data.checks import warn_once
from training.data.transforms import find_augmentation
from training.recipes import Recipe

OPTIMISERS = ("adam", "sgd")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")

LIMITS: Mapping[str, tuple[float, float]] = {
    "classes": (2, math.inf),
    "split_seed": (0, math.inf),
    "dim": (1, MAX_DIM),
    "label_smoothing": (0, 1),
    "side_dim": (0, MAX_DIM),
    "side_epochs": (0, math.inf),
    "rate": (0, math.inf),
    "weight_decay": (0, math.inf),
    "epochs": (1, math.inf),
    "warmup_epochs": (0, math.inf),
    "held_out": (0, 0.9),
    "patience": (0, math.inf),
    "batch_size": (1, math.inf),
    "workers": (0, math.inf),
    "threads": (0, 1024),
    "seed": (0, 2**31 - 1),
}
"""field -> its least and greatest value. Seeds get numbers added, and numpy takes none above 2**32; ten thousands of
threads crash torch; no card has a dimension above MAX_DIM."""

OPTION_LIMITS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("weight", "adversarial_weight", "alignment_weight", "independent_weight"), (0, math.inf)),
    **dict.fromkeys(("influence_weight", "old_weight", "scale", "logit_scale"), (0, math.inf)),
    **dict.fromkeys(("sharpness", "margin", "threshold", "fix_from", "hardest"), (0, math.inf)),
    **dict.fromkeys(("branch", "trunk", "hidden", "extra"), (1, MAX_DIM)),
    **dict.fromkeys(("temperature", "zeta", "boundary", "density"), (1e-6, math.inf)),
}
"""Option of any method -> likewise; a divisor, or an option whose logarithm is taken, is above 0."""


def check_numbers(recipe: Recipe) -> None:
    """Refuse numbers that no training can run with.

    Raises:
        InvalidArgument: one is out of range, infinite or not a number; names the legal values.
    """
    options = {name: OPTION_LIMITS[name] for name in recipe.options if name in OPTION_LIMITS}
    for name, limits in {**LIMITS, **options}.items():
        value: Any = recipe.options[name] if name in options else getattr(recipe, name)
        if value is not None:
            check_number(name, value, limits, f" of {recipe.name}")


def check_number(name: str, value: float, limits: tuple[float, float], whose: str = "") -> None:
    """Refuse a number out of its limits, as `check_numbers` does."""
    least, greatest = limits
    if not (least <= value <= greatest and math.isfinite(value)):
        legal = f"{least} or more" if math.isinf(greatest) else f"{least} to {greatest}"
        raise InvalidArgument(f"{name}{whose} must be {legal}, not {value}", pointer=f"/{name}")


def check_choices(recipe: Recipe) -> None:
    """Refuse choices that the training loop does not offer, and fields that contradict each other.

    Raises:
        InvalidArgument: names the field and its legal values.
    """
    if recipe.optimiser not in OPTIMISERS:
        raise InvalidArgument(f"optimiser must be one of {', '.join(OPTIMISERS)}", pointer="/optimiser")
    if recipe.precision not in PRECISIONS:
        raise InvalidArgument(f"precision must be one of {', '.join(PRECISIONS)}", pointer="/precision")
    if recipe.precision == "16-mixed" and not torch.cuda.is_available():
        raise InvalidArgument("precision 16-mixed requires a GPU; bf16-mixed works on a CPU", pointer="/precision")
    for augment in (recipe.augment, recipe.side_augment or recipe.augment):
        find_augmentation(augment)
    if recipe.method != "fct" and (recipe.head == "lorentz_mlr") != (recipe.method == "hbct"):
        # Its input is points of hyperbolic space, which other methods do not make and other heads do not know; FCT
        # trains no head.
        raise InvalidArgument(
            f"method {recipe.method} cannot train head={recipe.head}: hbct requires head=lorentz_mlr, and only hbct "
            "can train it",
            pointer="/head",
        )
    if recipe.patience and not recipe.held_out:
        raise InvalidArgument("patience requires held_out", pointer="/patience")
    if recipe.warmup_epochs > recipe.epochs:
        # The training would end before its rate is the recipe's.
        raise InvalidArgument(
            f"warmup_epochs must be 0 to {recipe.epochs}, the epochs of the training, not {recipe.warmup_epochs}",
            pointer="/warmup_epochs",
        )
    if list(recipe.milestones) != sorted(set(recipe.milestones)) or not all(
        0 < epoch < recipe.epochs for epoch in recipe.milestones
    ):
        raise InvalidArgument(
            f"milestones must rise from 1 to below epochs={recipe.epochs}, not {recipe.milestones}",
            pointer="/milestones",
        )


def warn_of_slow_precision(recipe: Recipe) -> None:
    """Log a warning if the recipe's precision is one that this machine has no instructions for.

    PyTorch then computes bfloat16 by plain loops, about ten times as slowly as float32. It has no public function that
    tells for all kinds of CPU.
    """
    on_cpu = recipe.precision == "bf16-mixed" and not torch.accelerator.is_available()
    if on_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
        warn_once("precision=bf16-mixed is much slower than 32-true on this CPU, which cannot compute in bfloat16")
