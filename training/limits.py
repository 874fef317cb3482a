"""What a recipe's numbers may be, before anything is read or trained; what has a rule of its own is checked by that."""

from __future__ import annotations

import math
from collections.abc import Mapping

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


def check_numbers(recipe: Recipe) -> None:
    """Refuse numbers that no training can be made of.

    Raises:
        InvalidArgument: one is out of range, infinite or not a number; names the legal values.
    """
    for field, (least, greatest) in LIMITS.items():
        value = getattr(recipe, field)
        if value is not None and not (least <= value <= greatest and math.isfinite(value)):
            legal = f"{least} or more" if math.isinf(greatest) else f"{least} to {greatest}"
            raise InvalidArgument(f"{field} of {recipe.name} must be {legal}, not {value}", pointer=f"/{field}")
