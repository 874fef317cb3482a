"""A recipe's numbers out of range: refused by name before anything is read, in a training and in a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from index.errors import InvalidArgument
from staging.recipes import quick
from training import train as path
from training.limits import LIMITS, check_numbers
from training.recipes import RECIPES
from training.sweep import sweep


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("batch_size", 0, "1 or more"),
        ("epochs", 0, "1 or more"),
        ("side_epochs", -1, "0 or more"),
        ("rate", float("nan"), "0 or more"),
        ("weight_decay", float("inf"), "0 or more"),
        ("dim", 0, "1 or more"),
        ("label_smoothing", 2.0, "0 to 1"),
        ("classes", 1, "2 or more"),
        ("seed", 5_000_000_000, "0 to 2147483647"),
        ("workers", -1, "0 or more"),
        ("held_out", 0.95, "0 to 0.9"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_legal_ones(
    field: str, value: float, legal: str, tmp_path: Path
) -> None:
    for start in (path.train, lambda recipe, out: sweep(recipe, 1, out)):
        with pytest.raises(InvalidArgument, match=f"{field} of digits_bct must be {legal}, not") as refused:
            start(quick("digits_bct", **{field: value}), tmp_path / "v")
        assert refused.value.pointer == f"/{field}"
    assert list(tmp_path.iterdir()) == []


def test_every_recipe_is_within_the_limits() -> None:
    for make in RECIPES.values():
        check_numbers(make())
    assert set(LIMITS) <= set(vars(RECIPES["digits_v1"]()))
