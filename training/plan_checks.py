"""Checks of a training, with the versions that it needs, before anything is read or trained."""

from __future__ import annotations

from pathlib import Path

import torch

from index.errors import InvalidArgument
from index.version import CARD
from index.version_folder.folder import load_given_version
from index.version_folder.new_folder import check_target
from training.first_batch import try_batch
from training.folder_lock import lock_file
from training.method import OldSummary
from training.networks.side_information import dim_of
from training.recipe_checks import check_choices, check_numbers
from training.recipes import Recipe
from training.references import NO_ENCODER_METHOD, References, folder_of, is_trained, reference_recipes
from training.trained import blank_old, build_method


def check_plan(recipe: Recipe, out: Path, references: References) -> None:
    """Refuse a training that cannot work before anything is read or trained.

    Raises:
        InvalidArgument: a field of a recipe, the folder, an encoder that cannot be taken over, or see `is_trained`.
    """
    for each in (recipe, *references.values()):
        check_numbers(each)
    check_choices(recipe)
    check_target(out)
    for field, reference in references.items():
        # A running training of it decides what it becomes; a trained one may come from a machine with a GPU.
        if not lock_file(folder_of(reference)).exists() and not is_trained(field, reference):
            check_choices(reference)
            check_planned_sizes(reference, reference_recipes(reference))
    check_with_references(recipe, references)


def check_with_references(recipe: Recipe, references: References) -> None:
    """Refuse a recipe that cannot be trained with the versions that these recipes will become.

    Raises:
        InvalidArgument: from `check_same_encoder` and `check_sizes`.
    """
    if recipe.method == NO_ENCODER_METHOD and "independent" in references:
        check_same_encoder(references["independent"], recipe)
    check_planned_sizes(recipe, references)


def check_planned_sizes(recipe: Recipe, references: References) -> None:
    """`check_sizes` before anything is read or trained, where the old version's sizes follow from its recipe."""
    classes, old = 2, references.get("old")  # a method that takes two classes takes any number
    if not recipe.old and not recipe.old_embeddings:
        check_sizes(recipe, None, classes, references)
    elif old is not None and not old.old:  # else its method may store another dimension
        check_sizes(recipe, blank_old(classes, old.dim, dim_of(old), old.space), classes, references)


def check_sizes(recipe: Recipe, old: OldSummary | None, classes: int, references: References) -> None:
    """Refuse sizes and options that cannot work before hours go into the versions that the recipe needs.

    Args:
        recipe: to be trained.
        old: from `blank_old`.
        classes: C.
        references: the recipes that it names.

    Raises:
        InvalidArgument: from the method; names legal sizes and options.
    """
    independent_dim, independent = planned_dim(recipe, references), references.get("independent")
    bias = torch.zeros(classes) if independent is None or independent.head == "softmax" else None  # no other has one
    head = (torch.zeros(classes, independent_dim), bias) if independent_dim else None
    method = build_method(recipe, classes, old, independent_dim, head)
    if independent_dim is not None:
        try_batch(recipe, method, old, independent_dim)


def planned_dim(recipe: Recipe, references: References) -> int | None:
    """Dimension of the independent version before it is trained; 0 without one, None where it is unknown."""
    if not recipe.independent:
        return 0
    if "independent" in references:
        return references["independent"].dim
    folder = Path(recipe.independent)
    return load_given_version(folder).card.dim if (folder / CARD).is_file() else None


def check_same_encoder(independent: Recipe, recipe: Recipe) -> None:
    """Refuse an independent version whose encoder differs from the recipe's.

    Raises:
        InvalidArgument: names the field that differs.
    """
    for field in ("backbone", "dim", "last_relu", "preprocess", "space"):
        actual, expected = getattr(independent, field), getattr(recipe, field)
        if actual != expected:
            raise InvalidArgument(
                f"the independent version's {field} is {actual}, the recipe's {expected}", pointer=f"/{field}"
            )
