"""Recipes as TOML files: there and back, changed from another one, and what is wrong with one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from index.errors import InvalidArgument
from index.version import CARD
from training.methods import METHODS, method_options
from training.overrides import with_overrides
from training.recipe_file import check_new_file, choose, read_recipe, references_in, write_recipe
from training.recipes import RECIPES, find_recipe


@pytest.mark.parametrize("name", ["digits_v1", "digits_bt2", "cifar100_resnet50_fct", "folders_hbct", "photos_oca"])
def test_a_recipe_survives_its_file(name: str, tmp_path: Path) -> None:
    recipe = with_overrides(RECIPES[name](), ["milestones=3,5", 'root=a "quoted" ü\\place'])
    path = write_recipe(recipe, tmp_path / "mine.toml")

    assert read_recipe(path) == replace(recipe, summary="from mine.toml")
    assert "# the highest learning rate" in path.read_text()
    with pytest.raises(InvalidArgument, match="cannot be written: File exists"):
        write_recipe(recipe, path)


@pytest.mark.parametrize("method", METHODS)
def test_a_file_explains_the_options_of_its_method_and_sets_those_that_were_given(method: str, tmp_path: Path) -> None:
    options = method_options(method)
    given = dict(list(options.items())[:1])
    recipe = replace(find_recipe("digits_v1"), method=method, options=given)
    path = write_recipe(recipe, tmp_path / "mine.toml")

    explained = re.findall(r"^# .+\n(# )?(\w+) = ", path.read_text().partition("[options]")[2], re.MULTILINE)
    assert explained == [("" if option in given else "# ", option) for option in options]
    assert read_recipe(path).options == given


def test_a_file_can_change_a_few_fields_of_a_recipe_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'from = "digits_bct"\nepochs = 3\nmethod = "oca"\ndim = 20\nmilestones = [1, 2]\nclasses = 4\n'
        "[options]\nalignment_weight = 2\n[preprocess]\nheight = 16\nwidth = 16\nresize = 16\n"
    )
    made, base = read_recipe(path), find_recipe("digits_bct")

    assert (made.name, made.method, made.epochs, made.classes, made.milestones) == ("mine", "oca", 3, 4, (1, 2))
    assert made.options == {"alignment_weight": 2.0}
    assert made.preprocess == replace(base.preprocess, height=16, width=16, resize=16)
    assert (made.old, made.rate) == (base.old, base.rate)


def test_a_file_that_names_the_method_of_its_recipe_keeps_the_options(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('from = "cifar100_class_bct"\nmethod = "bct"\n[options]\nweight = 2\n')

    assert read_recipe(path).options == {**find_recipe("cifar100_class_bct").options, "weight": 2.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs = ", "cannot be read as a recipe"),
        ('from = "digit_bct"', "'digit_bct' is unknown; did you mean digits_bct"),
        ("from = 3", "from must be a text"),
        ('name = "../up"', "name must be letters"),
        ("epoch = 3", "no field 'epoch'; legal: .*epochs"),
        ('epochs = "many"', "epochs must be a whole number, not 'many'"),
        ("options = 3", r"options must be a table, \[options\]"),
        ("[old]\nepochs = 3", r"fields of old belong below \[references\], as old.epochs = 5"),
        ("independent.seed = 3", r"fields of independent belong below \[references\]"),
        ('[data]\nroot = "x"', r"data cannot be a table; the tables are \[options\], \[preprocess\], \[references\]"),
        ("[options]\nrate.high = 3", r"rate cannot be a table"),
        ("[options]\nweight = 3", "no field 'weight'"),
        ("[preprocess]\nheight = 0", "preprocess.height must be 1 to 4096 pixels"),
        ("[preprocess]\nhieght = 3", r"preprocess.hieght is unknown; legal: crop, height, .*, width"),
        ("[preprocess]\nheight = 8\nheld_out = 0.1", r"held_out belongs above the first table, \[preprocess\] or"),
        ('milestones = ["a"]', "milestones must be whole numbers separated by commas"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field_and_what_is_legal(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=said):
        read_recipe(path)
    with pytest.raises(InvalidArgument, match="cannot be read as a recipe"):
        read_recipe(tmp_path / "other.toml")


@pytest.mark.parametrize("write", [lambda file: write_recipe(find_recipe("digits_bct"), file), check_new_file])
def test_no_file_is_written_into_a_version_folder(write: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("{}")

    with pytest.raises(InvalidArgument, match="is inside a version folder"):
        write(tmp_path / "mine.toml")
    assert [path.name for path in tmp_path.iterdir()] == [CARD]


@pytest.mark.parametrize("setting", ["rate=inf", "weight=nan", "root=bad\udcff", "root=a\x7fb"])
def test_what_no_file_can_hold_is_refused_by_its_field_and_nothing_is_left(setting: str, tmp_path: Path) -> None:
    recipe = with_overrides(find_recipe("digits_bct"), [setting])
    with pytest.raises(InvalidArgument, match=r"cannot be written into a file") as refused:
        write_recipe(recipe, tmp_path / "mine.toml")
    assert refused.value.pointer == f"/{setting.partition('=')[0]}"
    assert list(tmp_path.iterdir()) == []


def test_a_file_keeps_what_is_set_of_the_recipes_that_it_depends_on(tmp_path: Path) -> None:
    said = ["old.epochs=3", "independent.preprocess.height=20", "old.rate=1e-4", "old.epochs=4"]
    file = str(write_recipe(find_recipe("folders_bt2"), tmp_path / "mine.toml", said))
    references = choose(file).references

    assert (references["old"].epochs, references["old"].rate) == (4, 1e-4)
    assert references["independent"].preprocess.height == 20
    assert references_in("folders_bt2") == []


@pytest.mark.parametrize("name", ["", 'name = "mine"'])
def test_a_file_written_of_a_file_reaches_the_same_references(name: str, tmp_path: Path) -> None:
    given, kept = tmp_path / "given.toml", tmp_path / "kept.toml"
    given.write_text(f'from = "digits_fct"\n{name}\ndim = 24\nthreads = 2\n')
    made = choose(str(given))
    made.write(kept)
    again = choose(str(kept))

    assert again.recipe == replace(made.recipe, summary="from kept.toml")
    assert again.references == made.references
    assert (made.references["independent"].dim, made.references["independent"].threads) == (24, 2)


@pytest.mark.parametrize("text", ["references = 3", "[references]\nepochs = 3", "[references]\nnew.epochs = 3"])
def test_a_file_sets_nothing_but_the_two_references(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=r"\[references\] accepts only old.FIELD and independent.FIELD"):
        references_in(str(path))


def test_the_only_channel_takes_a_number(tmp_path: Path) -> None:
    grey = with_overrides(find_recipe("folders_v1"), ["preprocess.mode=L", "preprocess.mean=0.25", "preprocess.std=2"])
    (tmp_path / "mine.toml").write_text('from = "folders_v1"\n[preprocess]\nmode = "L"\nmean = 0.25\nstd = 2\n')

    assert (grey.preprocess.mean, grey.preprocess.std) == ((0.25,), (2,))
    assert read_recipe(tmp_path / "mine.toml").preprocess == grey.preprocess
    with pytest.raises(InvalidArgument, match=r"preprocess\.mean must be of type list"):
        with_overrides(grey, ["preprocess.mean=true"])


def test_parts_of_preprocess_are_set_together(tmp_path: Path) -> None:
    settings = ["preprocess.mode=RGB", "preprocess.mean=0.1,0.2,0.3", "preprocess.std=1,1,1", "preprocess.resize=none"]
    made = with_overrides(find_recipe("digits_v1"), settings).preprocess

    assert (made.mode, made.mean, made.std, made.resize) == ("RGB", (0.1, 0.2, 0.3), (1, 1, 1), None)
    with pytest.raises(InvalidArgument, match=r"preprocess\.mean must be 3 numbers"):
        with_overrides(find_recipe("digits_v1"), settings[:1])
