"""Weights drawn around a recipe's own, measured on held-out images, the best one first."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.errors import InvalidArgument
from index.version_folder.folder import load_version, write_card
from staging.inputs.recipes import quick, without_exporter
from training import folder_lock
from training.comparison import sweep as search
from training.comparison.sweep import Trial, settings, sweep, weights_of
from training.recipes import Recipe, find_recipe
from training.train import recipe_data, train


def test_trials_begin_with_the_recipe_and_draw_every_weight_within_its_range() -> None:
    recipe = replace(find_recipe("digits_oca"), options={"influence_weight": 4.0625, "scale": 5.0})
    drawn = list(settings(recipe, 40))
    factors = np.array([list(weights_of(one).values()) for one in drawn]) / [4.0625, 1.0]

    assert drawn[0].options == {"influence_weight": 4.0625, "scale": 5.0, "alignment_weight": 1.0}
    assert drawn == list(settings(recipe, 40))
    assert (factors >= 0.124).all()
    assert (factors <= 8.01).all()
    assert (np.log2(factors[1:]).std(axis=0) > 1).all()


def test_few_trials_try_each_weight_below_and_above_the_recipes_and_more_begin_with_the_fewer() -> None:
    for name in ("digits_l2", "digits_oca", "digits_bt2"):
        recipe = find_recipe(name)
        three = list(settings(recipe, 3))
        factors = np.array([list(weights_of(one).values()) for one in three]) / list(weights_of(recipe).values())
        assert (factors.min(axis=0) < 0.5).all(), name
        assert (factors.max(axis=0) > 2).all(), name
        assert list(settings(recipe, 5))[:3] == three


def test_the_best_trial_on_held_out_images_comes_first_and_trained_ones_are_read(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = quick("digits_l2", old=str(v1), epochs=1)
    told: list[Trial] = []
    with without_exporter():
        ranked = sweep(recipe, 3, tmp_path, told.append)
        monkeypatch.setattr(search, "train", lambda *_, **__: pytest.fail("trained again"))
        again = sweep(recipe, 3, tmp_path)

    assert sorted(told, key=lambda trial: -trial.new_old) == ranked == again
    assert len({trial.weights for trial in ranked}) == 3
    assert all(isinstance(trial, Trial) and 0 <= trial.new_new <= 1 for trial in ranked)
    assert [trial.new_old for trial in ranked] == sorted((t.new_old for t in ranked), reverse=True)


def test_a_trial_that_another_sweep_trains_is_waited_for_and_read(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = quick("digits_l2", old=str(v1), epochs=1)
    with without_exporter():
        one = sweep(recipe, 1, tmp_path / "one")
    monkeypatch.setattr(search, "train", lambda *_, **__: pytest.fail("trained twice"))
    monkeypatch.setattr(folder_lock, "_held_locks", {})  # as in another process
    out, held, said = tmp_path / "other" / "trial-0", threading.Event(), threading.Event()
    told: list[str] = []

    def elsewhere() -> None:
        with folder_lock.lock_folder(out):
            folder_lock._held_locks.clear()
            held.set()
            said.wait()
            shutil.copytree(tmp_path / "one", out.parent, dirs_exist_ok=True)

    def say(text: str) -> None:
        told.append(text)
        said.set()

    other = threading.Thread(target=elsewhere)
    other.start()
    held.wait()
    found = sweep(recipe, 1, out.parent, log=say)
    other.join()

    assert found == one
    assert told == [f"waiting for another process that trains {out}"]


def test_a_trial_that_another_sweep_begins_just_before_is_waited_for_too(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, refused = quick("digits_l2", old=str(v1), epochs=1), list[Path]()

    def late(recipe: Recipe, out: Path, **named: Any) -> None:
        if not refused:
            refused.append(out)
            raise folder_lock.FolderInUse(out)
        train(recipe, out, **named)

    monkeypatch.setattr(search, "train", late)
    with without_exporter():
        assert len(sweep(recipe, 1, tmp_path)) == 1


def test_a_trial_that_diverges_comes_last(v1: Path, tmp_path: Path) -> None:
    recipe = quick("digits_l2", old=str(v1), epochs=1, optimiser="sgd", rate=1e-2, options={"weight": 1e30})
    with without_exporter():
        sweep(replace(recipe, options={}), 1, tmp_path)
        assert (tmp_path / "trial-0.json").is_file()
        assert [trial.new_old for trial in sweep(recipe, 2, tmp_path, overwrite=True)] == [0.0, 0.0]
        assert not list(tmp_path.glob("trial-*"))
        last_step = replace(recipe, options={}, rate=1e30, batch_size=900)
        assert [trial.new_old for trial in sweep(last_step, 1, tmp_path / "last")] == [0.0]


@pytest.mark.parametrize(
    ("name", "trials", "said"),
    [
        ("digits_v1", 3, "a method with an old version and weights"),
        ("digits_fct", 3, "method fct of digits_fct has no weight"),
        ("digits_l2", 0, "trials must be 1 or more, not 0"),
    ],
)
def test_nothing_to_choose_is_refused(name: str, trials: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=said):
        sweep(find_recipe(name), trials, tmp_path)


def test_trials_of_another_old_version_or_other_images_are_not_replaced_unasked(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, trials, trained = tmp_path / "old", tmp_path / "trials", []
    monkeypatch.setattr(
        search, "train", lambda recipe, out, **named: (trained.append(out), train(recipe, out, **named))
    )
    recipe = quick("digits_l2", old=str(old), epochs=1)
    shutil.copytree(v1, old)
    with without_exporter():
        sweep(recipe, 1, trials)
        with pytest.raises(InvalidArgument, match=r"trial-0 exists but was trained without weight=3\.0; choose"):
            sweep(replace(recipe, options={"weight": 3.0}), 2, trials)
        write_card(old, replace(load_version(old).card, metrics={}))
        with pytest.raises(InvalidArgument, match="trial-0 exists but was trained without these references; choose"):
            sweep(recipe, 2, trials)
        assert [path.name for path in trained] == ["trial-0"]
        sweep(recipe, 1, trials, overwrite=True)
        data = recipe_data(recipe)
        fewer = replace(data, train=data.train.take(np.arange(800)))
        monkeypatch.setattr(search, "recipe_data", lambda _: fewer)
        with pytest.raises(InvalidArgument, match="trial-0 exists but was trained without these images; choose"):
            sweep(recipe, 1, trials)
        sweep(recipe, 1, trials, overwrite=True)

    assert len(trained) == 3


def test_a_trial_whose_note_could_not_be_written_is_not_trained_again(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = quick("digits_l2", old=str(v1), epochs=1)
    heavier = replace(recipe, options={"weight": 20.0})

    def train_and_stop(*arguments: Any, **named: Any) -> None:
        train(*arguments, **named)
        raise OSError("the disk is full")

    with without_exporter():
        for wanted, overwrite in ((recipe, False), (heavier, True)):
            monkeypatch.setattr(search, "train", train_and_stop)
            with pytest.raises(OSError, match="full"):
                sweep(wanted, 1, tmp_path, overwrite=overwrite)
            monkeypatch.setattr(search, "train", lambda *_, **__: pytest.fail("trained again"))
            sweep(wanted, 1, tmp_path)

        monkeypatch.setattr(search, "train", lambda *_, **__: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            sweep(recipe, 1, tmp_path, overwrite=True)
        with pytest.raises(InvalidArgument, match="trial-0 exists but was trained without a note of its recipe"):
            sweep(recipe, 1, tmp_path)
