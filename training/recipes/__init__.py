"""Recipes: a training configuration is a function that returns a `Recipe`; variants call another and change a field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from index.errors import InvalidArgument, did_you_mean
from training.recipes import cifar100, digits, folders, omniglot, photos
from training.recipes.family import Family
from training.recipes.recipe import Option, Recipe, field_descriptions, recipe_from_json

__all__ = [
    "FAMILIES",
    "GROUPS",
    "OWN_IMAGES",
    "RECIPES",
    "Group",
    "Option",
    "Recipe",
    "field_descriptions",
    "find_recipe",
    "recipe_from_json",
]

OWN_IMAGES = "folders"
"""The family for a user's own folders of images."""


@dataclass(frozen=True)
class Group:
    """Recipes on one data set: a title, and the function that returns each, by name."""

    title: str
    recipes: Mapping[str, Callable[[], Recipe]]


FAMILIES: dict[str, Family] = {
    family.name: family for family in (*folders.FAMILIES, omniglot.FAMILY, *cifar100.FAMILIES)
}
"""name -> recipes for every method on one data set."""

GROUPS: dict[str, Group] = {
    "digits": Group("scikit-learn's digits, seconds on a CPU", digits.RECIPES),
    "photos": Group("colour photos of any size, CIFAR-100 and Tiny ImageNet together, on a CPU", photos.RECIPES),
    **{name: Group(family.title, family.recipes()) for name, family in FAMILIES.items()},
}
"""name -> its recipes; each recipe is in one of them."""

RECIPES: dict[str, Callable[[], Recipe]] = {
    name: make for group in GROUPS.values() for name, make in group.recipes.items()
}
"""name -> recipe."""


def find_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        InvalidArgument: an unknown name; suggests similar ones.
    """
    if name in GROUPS:
        some = ", ".join(list(GROUPS[name].recipes)[:3])
        raise InvalidArgument(
            f"{name!r} is a family of recipes, such as {some}; `regraft recipes {name}` lists them", pointer="/recipe"
        )
    if name not in RECIPES:
        near = did_you_mean(name, RECIPES)
        raise InvalidArgument(f"recipe {name!r} is unknown{near}; `regraft recipes` lists them", pointer="/recipe")
    return RECIPES[name]()
