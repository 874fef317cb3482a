"""Recipes: a training configuration is a function that returns a `Recipe`; variants call another and change a field."""

from __future__ import annotations

from collections.abc import Callable

from index.errors import InvalidArgument
from training.recipes import cifar100, digits, folders, omniglot
from training.recipes.family import Family
from training.recipes.recipe import Recipe, method_options, recipe_from_json, with_overrides

__all__ = ["FAMILIES", "RECIPES", "Recipe", "find_recipe", "method_options", "recipe_from_json", "with_overrides"]

FAMILIES: dict[str, Family] = {
    family.name: family for family in (omniglot.FAMILY, *cifar100.FAMILIES, *folders.FAMILIES)
}
"""name -> recipes for every method on one data set."""

RECIPES: dict[str, Callable[[], Recipe]] = {
    **digits.RECIPES,
    **{name: make for family in FAMILIES.values() for name, make in family.recipes().items()},
}
"""name -> recipe."""


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        InvalidArgument: an unknown name; lists the legal ones.
    """
    if name not in RECIPES:
        raise InvalidArgument(f"recipe {name!r} is unknown; legal: {', '.join(RECIPES)}", pointer="/recipe")
    return RECIPES[name]()
