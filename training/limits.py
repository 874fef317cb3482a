"""What a recipe's numbers may be, before anything is read or trained; what has a rule of its own is checked by that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from index.errors import InvalidArgument
from training.recipes import Recipe

LIMITS: Mapping[str, tuple[float, float]] = {
    "classes": (2, math.inf),
    "split_seed": (0, math.inf),
    "dim": (1, math.inf),
    "label_smoothing": (0, 1),
    "side_epochs": (0, math.inf),
    "rate": (0, math.inf),
    "weight_decay": (0, math.inf),
    "epochs": (1, math.inf),
    "warmup_epochs": (0, math.inf),
    "held_out": (0, 0.9),
    "patience": (0, math.inf),
    "batch_size": (1, math.inf),
    "workers": (0, math.inf),
    "threads": (0, math.inf),
    "seed": (0, 2**31 - 1),
}
"""field -> the least and the greatest number it may be. More is added to a seed, and numpy takes none above 2**32."""

OPTION_LIMITS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("weight", "adversarial_weight", "alignment_weight", "independent_weight"), (0, math.inf)),
    **dict.fromkeys(("influence_weight", "old_weight", "density", "scale", "logit_scale"), (0, math.inf)),
    **dict.fromkeys(("sharpness", "margin", "threshold", "fix_from", "hardest"), (0, math.inf)),
    **dict.fromkeys(("branch", "trunk", "hidden", "extra"), (1, math.inf)),
    **dict.fromkeys(("temperature", "zeta", "boundary"), (1e-6, math.inf)),
}
"""Option of any method -> likewise; what is divided by is above 0."""


def check_numbers(recipe: Recipe) -> None:
    """Refuse numbers that no training can be made of.

    Raises:
        InvalidArgument: one is out of range, infinite or not a number; names the legal values.
    """
    options = {name: OPTION_LIMITS[name] for name in recipe.options if name in OPTION_LIMITS}
    for name, (least, greatest) in {**LIMITS, **options}.items():
        value: Any = recipe.options[name] if name in options else getattr(recipe, name)
        if value is not None and not (least <= value <= greatest and math.isfinite(value)):
            legal = f"{least} or more" if math.isinf(greatest) else f"{least} to {greatest}"
            raise InvalidArgument(f"{name} of {recipe.name} must be {legal}, not {value}", pointer=f"/{name}")
