"""What `--set` reaches of the recipes that a recipe depends on, and what is said of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from index.errors import InvalidArgument
from index.version_folder.folder import load_version
from staging.inputs.recipes import quick
from training import train as path
from training.comparison.sweep import sweep
from training.recipe_file import base_of, read_recipe
from training.recipes import find_recipe, recipe_from_json
from training.references import differences, with_settings


def test_images_and_machine_are_the_same_for_all_and_the_rest_stays() -> None:
    name, settings = (
        "cifar100_small_bt2",
        ["data=folders", "root=X", "precision=bf16-mixed", "epochs=2", "backbone=small"],
    )
    recipe, references = with_settings(find_recipe(name), settings)

    assert set(references) == {"old", "independent"}
    for field, made in references.items():
        named = find_recipe(getattr(recipe, field))
        assert made == replace(named, data="folders", root="X", precision="bf16-mixed")


def test_an_encoder_that_is_taken_over_is_trained_as_the_recipe_says() -> None:
    settings = ["backbone=timm/resnet18", "dim=9", "space=l2", "preprocess.height=40", "rate=7"]
    recipe, references = with_settings(find_recipe("cifar100_small_fct"), settings)
    old, new = references["old"], references["independent"]

    assert (new.backbone, new.dim, new.space, new.preprocess) == (recipe.backbone, 9, "l2", recipe.preprocess)
    assert new.rate == find_recipe(recipe.independent).rate
    assert old == find_recipe(recipe.old)


def test_a_reference_is_set_by_its_field() -> None:
    settings = ["old.epochs=3", "independent.seed=8", "old.preprocess.height=20", "old.root=elsewhere"]
    recipe, references = with_settings(find_recipe("folders_bt2"), [*settings, "root=X"])

    assert (references["old"].epochs, references["old"].preprocess.height, references["old"].root) == (
        3,
        20,
        "elsewhere",
    )
    assert (references["independent"].seed, references["independent"].root) == (8, "X")
    assert (recipe.epochs, recipe.seed) == (find_recipe("folders_bt2").epochs, find_recipe("folders_bt2").seed)


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("folders_v1", "old.epochs=3", "old.epochs=3 changes a recipe, but old=.none. is not one"),
        ("digits_bct", "old.epochs=3", "but old=examples/v1 is not one"),
        ("folders_bct", "old.colour=3", "recipe folders_v1 has no field 'colour'; legal: "),
        ("folders_bct", "old.epochs", "FIELD=VALUE, not 'epochs'"),
    ],
)
def test_what_reaches_nothing_is_refused(name: str, setting: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        with_settings(find_recipe(name), [setting])


def test_a_file_passes_on_what_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('from = "cifar100_small_bct"\ndata = "folders"\nroot = "X"\nepochs = 2\n')
    _, references = with_settings(read_recipe(file), ["workers=3"], base_of(str(file)))

    old = references["old"]
    assert (old.data, old.root, old.workers) == ("folders", "X", 3)
    assert old.epochs == find_recipe("cifar100_small_v1").epochs


def test_it_is_said_what_is_trained_first_and_with_what(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setattr("training.references.RUNS", runs)
    monkeypatch.setattr(path, "train", lambda recipe, out, progress: v1)
    there = recipe_from_json(load_version(v1).card.recipe)
    path.ensure_trained("old", replace(find_recipe("digits_v1"), epochs=1, root="X"), progress=True)
    runs.mkdir()
    (runs / "digits_v1").symlink_to(v1)
    path.ensure_trained("old", replace(there, workers=3), progress=True)

    out = runs / "digits_v1"
    assert capsys.readouterr().out.splitlines() == [
        f"training {out} first, with root=X, epochs=1",
        f"using {out} unchanged",
    ]


def test_a_reference_that_another_recipe_made_is_left_alone_and_the_ways_out_are_named(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.references.RUNS", tmp_path / "runs")
    monkeypatch.setattr(path, "recipe_data", lambda _: pytest.fail("read before it was refused"))
    shutil.copytree(v1, out := tmp_path / "runs" / "digits_v1")
    there = recipe_from_json(load_version(v1).card.recipe)
    other = replace(there, rate=7.0, preprocess=replace(there.preprocess, height=9))
    trial = quick("digits_bct", old="digits_v1")

    said = rf"exists but was trained without rate=7.0, preprocess.height=9: old={out} .*train digits_v1 --overwrite"
    with pytest.raises(InvalidArgument, match=said) as refused:
        path.train(trial, tmp_path / "v2", progress=False, references={"old": other})
    with pytest.raises(InvalidArgument, match=said):
        sweep(trial, 1, tmp_path / "trials", references={"old": other})
    assert refused.value.pointer == "/old"
    assert (out / "card.json").read_bytes() == (v1 / "card.json").read_bytes()
    assert [found.name for found in tmp_path.iterdir()] == ["runs"]


def test_a_card_without_the_fields_and_options_of_a_later_release_is_of_the_same_recipe() -> None:
    recipe = find_recipe("digits_bct")
    card = {name: value for name, value in recipe.as_json().items() if name not in {"side_temperature", "split_seed"}}

    assert list(differences(replace(recipe, options={"weight": 10.0}), recipe_from_json(card))) == []
    assert list(differences(recipe, recipe_from_json({**card, "held_out": 0.1}))) == ["held_out=0.0"]
