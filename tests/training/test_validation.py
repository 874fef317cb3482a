"""Held-out images: which they are, what is measured on them, whose weights are kept, and when a training ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from index.errors import InvalidArgument
from staging.inputs.recipes import quick, without_exporter
from training import train as path
from training.data.images import Data, ImageSet
from training.fitting import checkpoint_of
from training.measurement import measure
from training.module import Training
from training.recipes import Recipe
from training.sources import load_data
from training.trained import Trained
from training.validation import Validation, hold_out


@pytest.fixture(scope="module", autouse=True)
def without_onnx() -> Iterator[None]:
    with without_exporter():
        yield


def test_a_share_of_each_class_is_held_out_and_of_tiny_classes_nothing() -> None:
    images = load_data("digits_new", "").train
    few = images.take(
        np.concatenate([np.flatnonzero(images.labels == n)[:count] for n, count in enumerate([3, 40, 20])])
    )
    kept, held = hold_out(few, 0.1, 0)

    assert (len(kept), len(held)) == (57, 6)
    assert np.bincount(held.labels).tolist() == [0, 4, 2]
    assert not {few.images.content(0)} & {held.images.content(row) for row in range(6)}
    assert hold_out(few, 0.1, 0)[1].fingerprint == held.fingerprint
    assert hold_out(few, 0.1, 1)[1].fingerprint != held.fingerprint


def test_no_class_is_held_out_whole_and_where_fewer_than_two_have_four_images_nothing_can_be() -> None:
    images = load_data("digits_new", "").train
    few = images.take(np.r_[np.flatnonzero(images.labels == 0)[:4], np.flatnonzero(images.labels == 1)[:20]])
    kept, held = hold_out(few, 0.9, 0)

    assert np.bincount(kept.labels).tolist() == [2, 2]
    assert np.bincount(held.labels).tolist() == [2, 18]
    for rows, found in ((few.take(np.arange(3)), "no class has"), (few.take(np.arange(1, 24)), "only one class has")):
        with pytest.raises(InvalidArgument, match=f"requires two classes of four images: {found}") as refused:
            hold_out(rows, 0.5, 0)
        assert refused.value.pointer == "/held_out"


def test_images_that_cannot_be_held_out_are_refused_before_another_version_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = quick("digits_l2", old="digits_v1", held_out=0.1)
    data = path.recipe_data(recipe)
    few = replace(data, train=data.train.take(np.unique(data.train.labels, return_index=True)[1]))
    monkeypatch.setattr(path, "load_old", lambda *_: pytest.fail("it was trained"))

    with pytest.raises(InvalidArgument, match="no class has"):
        path.train(recipe, tmp_path / "v", progress=False, data=few)


def test_held_out_images_are_neither_in_class_means_nor_seen_by_side_information(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = quick("digits_l2", old=str(v1), epochs=1, held_out=0.2)
    data = path.recipe_data(recipe)
    seen: list[int] = []

    def watched(real: Callable[..., Any], *given: Any, **named: Any) -> Any:
        seen.extend(len(one.train) for one in given if isinstance(one, Data))
        return real(*given, **named)

    for name in ("summarise_old", "train_psi", "fit"):
        monkeypatch.setattr(path, name, partial(watched, getattr(path, name)))
    path.train(recipe, tmp_path / "v", progress=False, data=data)

    assert seen == [len(hold_out(data.train, 0.2, 0)[0])] * 3


@pytest.mark.parametrize("method", ["l2", "oca", "fct", "hbct"])
def test_what_is_measured_is_what_a_report_says_of_the_same_images(
    method: str, v1: Path, hyperbolic: Path, independent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, measured = [], Validation.measure_pairs

    def watched(validation: Validation, module: Training) -> dict[str, float]:
        told.append(measured(validation, module))
        return told[-1]

    monkeypatch.setattr(Validation, "measure_pairs", watched)
    old = hyperbolic if method == "hbct" else v1
    recipe = quick(f"digits_{method}", old=str(old), epochs=1, held_out=0.2)
    recipe = replace(recipe, independent=str(independent)) if method == "fct" else recipe
    made = Trained.load(path.train(recipe, tmp_path / "v2", progress=False))
    _, held = hold_out(load_data("digits_new", "").train, 0.2, 0)
    report = measure(made, Trained.load(old), Data(held, held, held, same=True))

    (values,) = told
    assert values == pytest.approx({"new/new": report.new_new.cmc(1), "new/old": report.new_old.cmc(1)}, abs=0.011)


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> list[dict[str, torch.Tensor]]:
    """The measured values in turn; gives the weights after each epoch."""
    seen: list[dict[str, torch.Tensor]] = []

    def measured(_: Validation, module: Training) -> dict[str, float]:
        seen.append({name: x.clone() for name, x in module.backbone.state_dict().items()})
        return {"new/new": values[module.trainer.current_epoch]}

    monkeypatch.setattr(Validation, "measure_pairs", measured)
    return seen


def recipe_of(**changes: object) -> Recipe:
    return quick("digits_independent", epochs=5, held_out=0.2, **changes)


@pytest.mark.parametrize(("patience", "epochs"), [(0, 5), (2, 4)])
def test_the_best_epochs_weights_become_the_version_and_it_is_said(
    patience: int, epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = scripted(monkeypatch, [0.1, 0.9, 0.3, 0.2, 0.1])
    monkeypatch.setattr(path, "report_version", lambda *_: None)
    made = Trained.load(path.train(recipe_of(patience=patience), tmp_path / "v"))

    assert len(seen) == epochs
    assert "epoch 2 was the best: CMC-1 0.900 on the held-out images" in capsys.readouterr().out
    assert all(torch.equal(x, seen[1][name]) for name, x in made.backbone.state_dict().items())


def train_until_stopped(out: Path, epochs: int) -> None:
    """Train `recipe_of()`, and stop it after so many epochs."""
    step = Training.training_step

    def dying(module: Training, batch: Any, place: int) -> torch.Tensor:
        if module.current_epoch == epochs:
            raise KeyboardInterrupt
        return step(module, batch, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "training_step", dying)
        with pytest.raises(KeyboardInterrupt):
            path.train(recipe_of(), out, progress=False)
    assert checkpoint_of(out).is_file()


def test_a_training_that_was_stopped_still_knows_its_best_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scripted(monkeypatch, [0.1, 0.9, 0.3, 0.2, 0.1])
    train_until_stopped(tmp_path / "v", 3)
    made = Trained.load(path.train(recipe_of(), tmp_path / "v", progress=False))

    assert len(seen) == 5
    assert all(torch.equal(x, seen[1][name]) for name, x in made.backbone.state_dict().items())


def test_a_training_starts_over_if_its_held_out_images_changed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = scripted(monkeypatch, [0.1, 0.9, 0.3, 0.2, 0.1])
    train_until_stopped(tmp_path / "v", 3)

    def without_one(*given: Any) -> tuple[ImageSet, ImageSet]:
        kept, held = hold_out(*given)
        return kept, held.take(np.arange(1, len(held)))

    monkeypatch.setattr(path, "hold_out", without_one)
    path.train(recipe_of(), tmp_path / "v", progress=False)

    assert len(seen) == 3 + 5
    assert "is of another training, which differs in held-out images" in caplog.text


def test_patience_without_held_out_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="patience requires held_out"):
        path.train(quick("digits_independent", patience=3), tmp_path / "v", progress=False)


def test_a_training_that_patience_ended_stays_ended_when_its_export_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scripted(monkeypatch, [0.1, 0.9, 0.3, 0.95, 0.99])
    with monkeypatch.context() as patch:
        patch.setattr(path, "finish", lambda *_: None)
        path.train(recipe_of(patience=1), tmp_path / "v", progress=False)
    made = Trained.load(path.train(recipe_of(patience=1), tmp_path / "v", progress=False))

    assert len(seen) == 3
    assert all(torch.equal(x, seen[1][name]) for name, x in made.backbone.state_dict().items())
