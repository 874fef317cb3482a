"""Models that look on at a training: asked at each step or once, and refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from index.errors import InvalidVersionFolder
from index.version_folder.folder import load_version, write_card
from staging.inputs.recipes import without_exporter
from training import train as path
from training.data.images import ImageDataset
from training.module import Training
from training.networks.backbones import Frozen
from training.recipes import Recipe, find_recipe
from training.trained import WEIGHTS

ROOT = Path(__file__).parents[2]
BCT = replace(find_recipe("digits_bct"), old=str(ROOT / "examples/v1"), epochs=2, warmup_epochs=0, seed=0)
FIRST_LOSSES = [25.47593, 24.46161, 23.31299, 22.18528, 21.5377, 20.99993, 20.6339, 20.53753, 20.90141, 20.21113]

Step = Callable[[Training, Any, int], Tensor]


@pytest.fixture(scope="module", autouse=True)
def without_onnx() -> Iterator[None]:
    """Its export takes seconds, and training does not depend on it."""
    with without_exporter():
        yield


def losses_of(recipe: Recipe, out: Path) -> list[float]:
    found: list[float] = []
    step: Step = Training.training_step

    def watched(module: Training, batch: Any, place: int) -> Tensor:
        loss = step(module, batch, place)
        found.append(float(loss.detach()))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "training_step", watched)
        path.train(recipe, out, progress=False)
    return found


def test_the_first_losses_of_bct_at_seed_0_are_what_they_were(tmp_path: Path) -> None:
    """Whoever changes these numbers changes what every recipe gives, and says so in the changelog."""
    losses = losses_of(BCT, tmp_path / "v")

    assert len(losses) == 28
    assert losses[:10] == pytest.approx(FIRST_LOSSES, rel=1e-4)


@pytest.mark.parametrize(("augment", "same"), [("none", True), ("shift", False)])
def test_cached_old_embeddings_are_those_of_each_step_unless_images_are_augmented_and_spare_the_old_model(
    augment: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    forward = Frozen.forward
    monkeypatch.setattr(Frozen, "forward", lambda frozen, images: looked.append(len(images)) or forward(frozen, images))
    recipe = replace(BCT, method="l2", options={"weight": 100.0}, augment=augment, epochs=1)

    each = losses_of(replace(recipe, cache_old=False), tmp_path / "each")
    every_step = len(looked)
    looked.clear()
    cached = losses_of(replace(recipe, cache_old=True), tmp_path / "cached")

    assert (each == pytest.approx(cached, rel=1e-4)) is same
    assert every_step >= len(each)
    assert len(looked) < len(each)
    assert sum(looked) == 900


def test_a_backbone_that_is_not_trained_is_spared_too(
    independent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    forward = Frozen.forward
    monkeypatch.setattr(Frozen, "forward", lambda frozen, images: looked.append(len(images)) or forward(frozen, images))
    recipe = replace(find_recipe("digits_fct"), old=BCT.old, independent=str(independent), epochs=2, warmup_epochs=0)

    made = []
    images = ImageDataset.__getitems__
    monkeypatch.setattr(ImageDataset, "__getitems__", lambda tensors, rows: made.extend(rows) or images(tensors, rows))

    each = losses_of(replace(recipe, cache_old=False), tmp_path / "each")
    every_step = len(made)
    looked.clear()
    made.clear()
    cached = losses_of(replace(recipe, cache_old=True), tmp_path / "cached")

    assert each == pytest.approx(cached, rel=1e-4)
    assert sum(looked) == 2 * 900, "each image by the old version and by the new one"
    assert every_step - len(made) == len(each) * recipe.batch_size - 2 * 900, "and decoded for these alone"


def test_an_old_version_whose_weights_do_not_fit_its_card_is_refused_by_name(tmp_path: Path) -> None:
    old = shutil.copytree(ROOT / "examples/v1", tmp_path / "v1")
    card = json.loads((old / "card.json").read_text())
    card["recipe"]["dim"] = 17
    (old / "card.json").write_text(json.dumps(card))

    with pytest.raises(InvalidVersionFolder, match=r"v1: weights\.safetensors does not fit the recipe in card\.json"):
        path.train(replace(BCT, old=str(old)), tmp_path / "v2", progress=False)
    assert [found.name for found in tmp_path.iterdir()] == ["v1"]


def test_weights_of_another_make_are_refused_by_name(tmp_path: Path) -> None:
    old = shutil.copytree(ROOT / "examples/v1", tmp_path / "v1")
    (old / WEIGHTS).write_bytes(b"not tensors")
    with pytest.raises(InvalidVersionFolder, match="does not have the sha256"):
        path.train(replace(BCT, old=str(old)), tmp_path / "v2", progress=False)

    write_card(old, load_version(ROOT / "examples/v1").card)
    with pytest.raises(InvalidVersionFolder, match=r"v1: weights\.safetensors was not written by this release"):
        path.train(replace(BCT, old=str(old)), tmp_path / "v2", progress=False)
