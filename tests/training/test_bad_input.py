"""Data that is not as it should be, through the whole training: what stops it, what does not, and what is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from index.errors import InvalidImage
from index.version_folder.folder import load_version
from staging.inputs.recipes import quick
from training import train as path
from training.recipes import Recipe

pytestmark = pytest.mark.usefixtures("weights_only")
IMAGES = {"ant": 4, "bee": 1, "cat": 4, "dog": 3}
"""Training images of each class: there is one bee."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for part, counts in (("train", IMAGES), ("test", dict.fromkeys(IMAGES, 3))):
        for label, (name, count) in enumerate(counts.items()):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(60 * label, 60 * label + 40, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / part / name / f"{number}.png")
    return tmp_path / "data"


def from_folders(name: str, root: Path, **changes: object) -> Recipe:
    return quick(name, data="folders", root=str(root), batch_size=8, **changes)


@pytest.fixture
def v1(root: Path, tmp_path: Path) -> Path:
    """It knows ant and bee, the one image of bee included."""
    return path.train(from_folders("digits_v1", root, classes=2), tmp_path / "out" / "v1", progress=False)


@pytest.mark.parametrize("method", ["l2", "lwf", "bct", "oca", "contrast", "advbct", "hoc"])
def test_a_class_of_one_image_and_classes_that_the_old_head_lacks_train_all_the_same(
    method: str, root: Path, v1: Path
) -> None:
    made = load_version(
        path.train(from_folders(f"digits_{method}", root, old=str(v1)), v1.with_name("v2"), progress=False)
    )

    assert made.card.data["classes"] == sorted(IMAGES)
    assert load_version(v1).card.data["classes"] == ["ant", "bee"]
    assert 0 <= made.card.metrics["new/old"]["cmc@1"]["value"] <= 1


@pytest.mark.parametrize(
    "changes", [{}, {"augment": "resized_crop_flip"}, {"augment": "resized_crop_flip", "workers": 1}], ids=str
)
def test_an_unreadable_training_image_ends_the_training_by_its_path_and_leaves_nothing(
    changes: dict[str, object], root: Path, tmp_path: Path
) -> None:
    (root / "train" / "cat" / "2.png").write_bytes(b"\x89PNG half a pict")

    with pytest.raises(InvalidImage) as refused:
        path.train(from_folders("digits_v1", root, **changes), tmp_path / "out" / "v1", progress=False)
    assert refused.value.message.startswith(f"{root}/train/cat/2.png: ")
    assert "Traceback" not in refused.value.message
    assert not (tmp_path / "out").exists()


def test_unreadable_images_are_left_out_and_counted_on_the_card_when_told_to(root: Path, tmp_path: Path) -> None:
    (root / "train" / "cat" / "2.png").write_bytes(b"")
    (root / "test" / "dog" / "0.png").write_bytes(b"no picture")
    recipe = from_folders("digits_v1", root, unreadable="skip")
    card = load_version(path.train(recipe, tmp_path / "out" / "v1", progress=False)).card

    assert (card.data["skipped"], card.data["images"], card.data["queries"]) == (2, 11, 11)
