"""The training path end to end on a few batches of digits: what it writes, what it leaves alone, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from index.errors import InvalidArgument, InvalidVersionFolder, RegraftError
from index.version import Card
from index.version_folder.folder import load_version, write_card
from staging.inputs.recipes import quick
from training import train as path
from training.fitting import cpu_threads
from training.module import Training
from training.recipes import RECIPES
from training.references import with_settings
from training.trained import WEIGHTS, Trained


@pytest.mark.usefixtures("weights_only")
def test_the_same_seed_gives_the_same_weights_bit_by_bit_and_another_seed_others(v1: Path, tmp_path: Path) -> None:
    again = load_version(path.train(quick("digits_v1"), tmp_path / "v1", progress=False))
    other = load_version(path.train(quick("digits_v1", seed=5), tmp_path / "other" / "v1", progress=False))

    assert again.card.files[WEIGHTS] == load_version(v1).card.files[WEIGHTS] != other.card.files[WEIGHTS]
    assert again.card.metrics == load_version(v1).card.metrics


def test_weights_do_not_hang_on_how_many_cores_a_machine_has(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path, "finish", lambda trained, *_: trained.save(tmp_path))
    made = []
    for threads in (1, 3):
        with cpu_threads(threads):
            # The head that OCA leaves is a product of matrices.
            path.train(quick("digits_oca", old=str(v1), threads=1), tmp_path / f"by-{threads}", progress=False)
        made.append((tmp_path / WEIGHTS).read_bytes())

    assert made[0] == made[1]


@pytest.mark.usefixtures("weights_only")
def test_images_that_somebody_has_read_are_not_read_again(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = path.recipe_data(quick("digits_v1"))
    monkeypatch.setattr(path, "load_data", lambda *_: pytest.fail("read again"))
    again = path.train(quick("digits_v1"), tmp_path / "v1", progress=False, data=data)

    assert (again / WEIGHTS).read_bytes() == (v1 / WEIGHTS).read_bytes()


@pytest.mark.usefixtures("weights_only")
def test_fct_ships_the_independent_encoder_as_it_was(v1: Path, independent: Path, tmp_path: Path) -> None:
    recipe = quick("digits_fct", old=str(v1), independent=str(independent))
    made = Trained.load(path.train(recipe, tmp_path / "v2", progress=False)).raw.state_dict()

    assert all(torch.equal(x, made[name]) for name, x in Trained.load(independent).raw.state_dict().items())


@pytest.mark.usefixtures("weights_only")
def test_fct_knows_the_classes_of_the_encoder_that_it_takes_over(v1: Path, tmp_path: Path) -> None:
    fewer = quick("digits_independent", data="digits_old")
    taken = path.train(fewer, tmp_path / "taken", progress=False)
    fct = quick("digits_fct", old=str(v1), independent=str(taken), options={"branch": 8, "trunk": 8})
    made = path.train(fct, tmp_path / "v2", progress=False)
    bct = quick("digits_bct", old=str(made), options={"influence": "old", "logits": "head"})
    path.train(bct, tmp_path / "v3", progress=False)

    trained = Trained.load(made)
    assert trained.head is not None
    assert len(trained.classes) == len(trained.head[0]) == 5
    assert trained.classes == path.recipe_data(fewer).classes
    assert load_version(made).card.data["classes"] == path.recipe_data(fct).classes


def test_fct_ranks_by_l2_where_its_versions_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.references.RUNS", tmp_path)
    for name in ("digits_v1", "digits_independent"):
        monkeypatch.setitem(RECIPES, name, partial(replace, quick(name, epochs=1)))
    monkeypatch.setitem(RECIPES, "digits_v1_side", RECIPES["digits_v1"])
    settings = ["space=l2", "last_relu=true", "old.space=l2", "old.last_relu=true", "branch=8", "trunk=8"]
    recipe, references = with_settings(quick("digits_fct_side", epochs=1, side="none"), settings, quick("digits_fct"))
    made = load_version(path.train(recipe, tmp_path / "v2", progress=False, references=references))

    assert made.card.space == load_version(tmp_path / "digits_v1").card.space == {"kind": "l2"}
    assert set(made.card.metrics) == {"old/old", "new/old", "new/new"}


@pytest.mark.usefixtures("weights_only")
def test_a_reference_may_be_a_recipe_which_is_trained_once(
    v1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.references.RUNS", tmp_path / "runs")
    fct = quick("digits_fct", old=str(v1), epochs=1, options={"branch": 8, "trunk": 8})
    short = quick("digits_independent", epochs=1)
    monkeypatch.setitem(RECIPES, "digits_independent", lambda: short)
    path.train(fct, tmp_path / "a", progress=False)
    made = tmp_path / "runs" / "digits_independent"
    written = (made / "card.json").stat().st_mtime_ns
    path.train(fct, tmp_path / "b", progress=False)

    assert (made / "card.json").stat().st_mtime_ns == written


def test_a_missing_old_version_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"old=.*nowhere is neither a version folder nor a recipe; train it"):
        path.train(quick("digits_bct", old=str(tmp_path / "nowhere")), tmp_path / "v2", progress=False)

    assert list(tmp_path.iterdir()) == []


def test_an_old_version_that_does_not_match_its_card_is_refused(v1: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "v1"
    damaged.mkdir()
    for file in v1.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    (damaged / WEIGHTS).write_bytes((v1 / WEIGHTS).read_bytes()[:-1] + b"!")

    with pytest.raises(InvalidVersionFolder, match=rf"{damaged}: {WEIGHTS}"):
        path.train(quick("digits_bct", old=str(damaged)), tmp_path / "v2", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]


def test_an_old_version_without_weights_and_encoder_cannot_be_trained_against(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    write_card(tmp_path / "v1", Card("v1", 4, {"kind": "cosine"}))

    with pytest.raises(InvalidVersionFolder, match=f"has no {WEIGHTS}"):
        path.train(quick("digits_bct", old=str(tmp_path / "v1")), tmp_path / "v2", progress=False)


def test_a_version_may_not_replace_the_one_it_is_compatible_with(v1: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has the name of its old version 'v1'"):
        path.train(quick("digits_bct", old=str(v1)), tmp_path / "v1", progress=False)


def test_a_method_that_trains_no_encoder_needs_a_matching_independent_version(
    v1: Path, independent: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="method fct requires independent="):
        path.train(quick("digits_fct", old=str(v1), independent=""), tmp_path / "v2", progress=False)
    with pytest.raises(InvalidArgument, match="the independent version's dim is 16, the recipe's 24"):
        path.train(
            quick("digits_fct", old=str(v1), independent=str(independent), dim=24),
            tmp_path / "v2",
            progress=False,
        )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("digits_bt2", {"dim": 40}, "dim must be the independent dimension 16 plus the old one 16, so 32, not 40"),
        ("digits_bt2", {"options": {"extra": 17}}, "extra must be 1 to 16, not 17"),
        ("digits_bt2", {"independent": ""}, "bt2 requires an independently trained new version"),
        ("digits_bt2", {"weights": "nowhere"}, "weights nowhere cannot be read"),
        (
            "digits_bct",
            {"independent": "digits_independent", "options": {"influence": "new"}},
            "influence must be one of",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_an_independent_version_is_trained_for_it(
    v1: Path,
    name: str,
    changes: dict[str, object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = []
    monkeypatch.setattr(path, "ensure_trained", lambda _, recipe, __: trained.append(recipe.name))

    with pytest.raises(InvalidArgument, match=message):
        path.train(quick(name, old=str(v1), **changes), tmp_path / "v2", progress=False)
    assert trained == []
    assert list(tmp_path.iterdir()) == []


def test_an_independent_folder_of_another_dimension_is_refused(v1: Path, independent: Path, tmp_path: Path) -> None:
    recipe = quick("digits_bt2", old=str(v1), independent=str(independent), dim=33)

    with pytest.raises(InvalidArgument, match="so 32, not 33"):
        path.train(recipe, tmp_path / "v2", progress=False)


def test_ctrl_c_leaves_no_version_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "training_step", interrupted)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        path.train(quick("digits_v1"), tmp_path / "v1", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_export_leaves_no_part_of_a_version_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trained, "save", full)

    with pytest.raises((OSError, RegraftError), match="No space left"):
        path.train(quick("digits_v1"), tmp_path / "v1", progress=False)
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []


@pytest.mark.usefixtures("weights_only")
def test_training_is_silent_unless_progress_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path.train(quick("digits_v1"), tmp_path / "v1", progress=False)
    quiet, left = capfd.readouterr(), [p.name for p in tmp_path.iterdir()]
    path.train(quick("digits_v1"), tmp_path / "v1", progress=True)

    assert (quiet.out, quiet.err, left) == ("", "", ["v1"])
    assert (tmp_path / "v1-report.html").is_file()
    said = capfd.readouterr().out
    assert "Epoch 2/2" in said
    assert "new/new" in said


def test_the_card_is_plain_json_without_paths_of_this_machine(v1: Path, tmp_path: Path) -> None:
    text = (v1 / "card.json").read_text()

    assert json.loads(text)["name"] == "v1"
    assert str(Path.cwd()) not in text
    assert str(v1.parent) not in text
