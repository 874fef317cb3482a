"""The committed encoders for photos: complete, small, made by their recipes, and at home with photos of any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from index.edges.transform import load_transform
from index.encoders.encoder import Encoder, verify_version
from index.encoders.image import losses
from index.version_folder.folder import load_version
from training.recipes import find_recipe, recipe_from_json

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = {"photos-v1": "photos_v1", "photos-v2": "photos_oca"}
CLASSES, UNSEEN = 250, 25


@pytest.mark.parametrize("name", RECIPES)
def test_a_version_passes_a_registration_and_is_small(name: str) -> None:
    version = load_version(EXAMPLES / name)
    verify_version(version.folder, {"photos-v1": load_version(EXAMPLES / "photos-v1").card})
    sizes = [path.stat().st_size for path in version.folder.rglob("*") if path.is_file()]

    assert max(sizes) < 1 << 20
    assert sum(sizes) < 2 << 20


@pytest.mark.parametrize("name", RECIPES)
def test_a_version_was_made_by_its_recipe_as_it_is_today(name: str) -> None:
    card = load_version(EXAMPLES / name).card

    assert recipe_from_json(card.recipe) == replace(find_recipe(RECIPES[name]), summary="")


def test_some_classes_are_in_no_training_so_that_new_things_can_be_measured() -> None:
    old, new = (set(load_version(EXAMPLES / name).card.data["classes"]) for name in RECIPES)

    assert old < new
    assert len(new) == CLASSES - UNSEEN


@pytest.fixture(scope="module")
def views() -> tuple[list[Image.Image], np.ndarray]:
    """Eight views of each of two photographs, of several hundred pixels and of any shape, and whose they are."""
    photographs = pytest.importorskip("sklearn.datasets").load_sample_images().images
    generator, cut, label = np.random.default_rng(0), [], []
    for number, pixels in enumerate(photographs):
        height, width, _ = pixels.shape
        for _ in range(8):
            tall, wide = generator.integers(height // 2, height), generator.integers(width // 2, width)
            top, left = generator.integers(height - tall), generator.integers(width - wide)
            cut.append(Image.fromarray(pixels[top : top + tall, left : left + wide]))
            label.append(number)
    return cut, np.array(label)


def test_views_of_a_photograph_find_each_other_old_new_and_across(
    views: tuple[list[Image.Image], np.ndarray],
) -> None:
    images, label_N = views
    old, new = (load_version(EXAMPLES / name) for name in RECIPES)
    old_ND, new_ND = (Encoder(version).encode(images).vectors for version in (old, new))
    across_ND = load_transform(new.edges[0], new.card, old.card)(new_ND)
    assert old.card.preprocess is not None
    assert not any(losses(image.size, old.card.preprocess) for image in images)

    for queries_ND, items_ND in ((old_ND, old_ND), (across_ND, old_ND), (new_ND, new_ND)):
        score_NN = queries_ND @ items_ND.T
        np.fill_diagonal(score_NN, -np.inf)
        assert (label_N[score_NN.argmax(axis=1)] == label_N).all()
