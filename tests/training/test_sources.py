"""Folders of images as a data source: classes, parts, unreadable images, and what is refused."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from index.errors import InvalidArgument, InvalidImage
from training.data.images import Data, Files
from training.sources import SOURCES, load_data


def put(path: Path, grey: int = 0, size: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (size, size), grey).save(path)


def shades(data: Data, part: str) -> list[tuple[str, int]]:
    """Class name and grey of each image, which tell whether labels and images still belong together."""
    images, names = getattr(data, part), data.names or ()
    return [(names[label], image.getpixel((0, 0))) for label, image in zip(images.labels, images.images, strict=True)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, grey in (("train/b/1.png", 1), ("train/b/2.png", 2), ("train/a/1.PNG", 3), ("train/c/1.png", 4)):
        put(tmp_path / name, grey)
    for name, grey in (("test/a/1.png", 5), ("test/a/2.png", 6), ("test/Z/1.png", 7), ("test/Z/2.png", 8)):
        put(tmp_path / name, grey)
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    return tmp_path


def test_folders_give_each_image_the_name_of_its_folder(root: Path) -> None:
    data = load_data("folders", str(root))

    assert shades(data, "train") == [("a", 3), ("b", 1), ("b", 2), ("c", 4)]
    assert shades(data, "query") == [("Z", 7), ("Z", 8), ("a", 5), ("a", 6)]
    assert data.same
    assert data.query is data.gallery


def test_classes_of_the_test_images_do_not_renumber_those_of_training(root: Path) -> None:
    data = load_data("folders", str(root))

    assert data.classes == ["a", "b", "c"]
    assert np.unique(data.train.labels).tolist() == [0, 1, 2]
    assert data.split(classes=2).classes == ["a", "b"]


def test_query_and_gallery_may_be_folders_of_their_own(root: Path) -> None:
    (root / "test").rename(root / "gallery")
    for grey in (9, 10):
        put(root / f"query/a/{grey}.png", grey)
    data = load_data("folders", str(root))

    assert shades(data, "query") == [("a", 10), ("a", 9)]
    assert shades(data, "gallery")[0] == ("Z", 7)
    assert not data.same


def test_a_class_may_be_a_folder_in_a_folder(tmp_path: Path) -> None:
    for part, alphabets in (("train", ("Greek", "Latin")), ("test", ("Sanskrit",))):
        for alphabet in alphabets:
            for character in ("one", "two"):
                for drawing in (1, 2):
                    put(tmp_path / part / alphabet / character / f"{drawing}.png", drawing)
    data = load_data("folders", str(tmp_path))

    assert data.classes == ["Greek/one", "Greek/two", "Latin/one", "Latin/two"]
    assert sorted(set(data.query.labels.tolist()) & set(data.train.labels.tolist())) == []
    assert data.queries_without_match() == 0


def test_a_folder_of_classes_is_cut_into_parts_of_which_none_has_the_others_images(tmp_path: Path) -> None:
    for name, count in (("a", 12), ("a/inner", 4), ("b", 3)):
        for number in range(count):
            put(tmp_path / name / f"{number:02}.png", 20 * len(name) + number)
    data = load_data("folders", str(tmp_path))

    train, test = shades(data, "train"), shades(data, "query")
    assert data.same
    assert not set(train) & set(test)
    assert len({*train, *test}) == 19
    counts = Counter(name for name, _ in test)
    assert counts.keys() == {"a", "a/inner"}
    assert 2 <= counts["a"] <= 10
    assert counts["a/inner"] == 2
    assert data.queries_without_match() == 0


def test_nothing_that_an_older_version_was_trained_on_is_kept_for_testing_when_a_folder_grows(tmp_path: Path) -> None:
    def grown(first: int, last: int) -> Data:
        for number in range(first, last):
            for name in "abc":
                put(tmp_path / name / f"{number:03}.png", number)
        return load_data("folders", str(tmp_path))

    before, after = grown(100, 140), grown(0, 100)

    assert isinstance(before.train.images, Files)
    assert isinstance(after.query.images, Files)
    assert not set(before.train.images.paths) & set(after.query.images.paths)
    assert 0.15 < len(after.query) / (3 * 140) < 0.25


@pytest.mark.parametrize("missing", ["train", "test"])
def test_a_folder_without_a_part_says_what_it_must_hold(root: Path, missing: str) -> None:
    for path in sorted((root / missing).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()

    with pytest.raises(InvalidArgument, match=f"{missing}.* has no <class>/<image> files"):
        load_data("folders", str(root))


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ({"test": "val"}, r"holds train/, but no test/, or query/ and gallery/"),
        ({"test": "query"}, r"holds train/, query/, but no gallery/"),
        ({"train": "training"}, r"holds test/, but no train/"),
    ],
)
def test_a_folder_whose_parts_have_other_names_says_which_it_lacks(
    moves: dict[str, str], message: str, root: Path
) -> None:
    for old, new in moves.items():
        (root / old).rename(root / new)

    with pytest.raises(InvalidArgument, match=message):
        load_data("folders", str(root))


@pytest.mark.parametrize("tested", [("test",), ("query", "gallery")])
def test_the_folder_above_a_data_set_is_refused(
    tested: tuple[str, ...], root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for part in tested[1:]:
        put(root / part / "a" / "9.png")
    (root / "test").rename(root / tested[0])
    above = tmp_path_factory.mktemp("above")
    (above / "animals").symlink_to(root)
    put(above / "other" / "1.png")

    with pytest.raises(InvalidArgument, match=r"has no train/ of its own, but .*/animals holds one"):
        load_data("folders", str(above))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("Train", "Test"), r"holds Test/ and Train/, which would be read as classes; .* called train/ and test/"),
        (("training", "validation"), r"holds training/ and validation/, which would"),
        (("data/train", "data/val"), r"/data holds train/ and val/, which would"),
        (("v1/data/train", "v1/data/test"), r"has no train/ of its own, but .*/v1/data holds one"),
    ],
)
def test_parts_that_would_be_read_as_classes_are_refused(parts: tuple[str, ...], message: str, tmp_path: Path) -> None:
    for part in parts:
        for number in range(4):
            put(tmp_path / part / "a" / f"{number}.png")

    with pytest.raises(InvalidArgument, match=message):
        load_data("folders", str(tmp_path))


def test_a_class_may_be_called_as_a_part_and_hold_others(tmp_path: Path) -> None:
    for name in ("toys/train", "toys/test/of/tubes", "dev/a"):
        for number in range(4):
            put(tmp_path / name / f"{number}.png")

    assert load_data("folders", str(tmp_path)).classes == ["dev/a", "toys/test/of/tubes", "toys/train"]


def test_no_query_that_could_find_its_class_is_one_clear_message(root: Path) -> None:
    for path in (root / "test").rglob("2.png"):
        path.unlink()

    with pytest.raises(InvalidArgument, match=r"nothing can be measured.*two images in test/"):
        load_data("folders", str(root))


def test_a_class_with_one_test_image_is_no_obstacle_to_the_others(root: Path) -> None:
    (root / "test" / "Z" / "2.png").unlink()

    assert load_data("folders", str(root)).queries_without_match() == 1


def break_one(root: Path) -> Path:
    path = root / "train" / "b" / "2.png"
    path.write_bytes(path.read_bytes()[:40])
    return path


def test_an_unreadable_image_is_refused_by_its_path_when_its_turn_comes(root: Path) -> None:
    path = break_one(root)
    data = load_data("folders", str(root))

    assert len(data.train) == 4
    with pytest.raises(InvalidImage, match=str(path)):
        list(data.train.images)


def test_unreadable_images_are_skipped_counted_and_logged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = break_one(root)
    (root / "test" / "a" / "1.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        data = load_data("folders", str(root), "skip")

    assert shades(data, "train") == [("a", 3), ("b", 1), ("c", 4)]
    assert shades(data, "query") == [("Z", 7), ("Z", 8), ("a", 6)]
    assert data.query is data.gallery
    assert data.skipped == 2
    assert f"skipped 1 of 4 images that cannot be read; the first: {path}" in caplog.text


def test_nothing_is_skipped_where_all_can_be_read(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "test").rename(root / "gallery")
    for grey in (9, 10):
        put(root / f"query/a/{grey}.png", grey)

    assert load_data("folders", str(root), "skip").skipped == 0
    assert load_data("digits_new", "", "skip").skipped == 0
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pictures", ""), "'pictures' is unknown; legal: digits_old, .*folders"),
        (("folders", ""), r"this recipe requires your data: --set root=PATH, a folder with <class>/<image>"),
        (("cifar100", ""), "--set root=PATH, the folder cifar-100-python"),
        (("folders", "/nowhere"), "root /nowhere does not exist; it must be a folder with"),
        (("folders", ".", "ignore"), "unreadable must be one of refuse, skip, not 'ignore'"),
    ],
)
def test_what_cannot_be_loaded_says_what_could_be(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load_data(*arguments)


def test_every_source_says_what_its_root_is_or_needs_none() -> None:
    assert {name for name, (_, needed) in SOURCES.items() if not needed} == {"digits_old", "digits_new"}


def test_links_are_followed_but_not_in_circles_and_what_programs_leave_is_no_class(tmp_path: Path) -> None:
    root = tmp_path / "images"
    for name in ("ant", "bee", "bee/.ipynb_checkpoints", "__MACOSX/ant", ".thumbs"):
        for number in range(4):
            put(root / name / f"{number}.png", number)
            put(tmp_path / "elsewhere" / f"{number}.png", number)
    put(root / "ant" / "._0.png")
    (root / "cat").symlink_to(tmp_path / "elsewhere")
    (root / "bee" / "all").symlink_to(root)
    data = load_data("folders", str(root))

    assert data.classes == ["ant", "bee", "cat"]
    assert len(data.train) + len(data.query) == 12


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for number in range(4):
        put(tmp_path / "bus" / f"{number}.png", number)
        put(tmp_path / "train" / f"{number}.png", number)

    assert load_data("folders", str(tmp_path)).classes == ["bus", "train"]

    put(tmp_path / "test" / "0.png")
    with pytest.raises(InvalidArgument, match=r"train has no <class>/<image> files"):
        load_data("folders", str(tmp_path))


def test_a_folder_that_cannot_be_listed_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(folder: Path) -> Any:
        if folder.name == "b":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    listed = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InvalidArgument, match=r"train/b cannot be read: Permission denied") as refused:
        load_data("folders", str(root))
    assert refused.value.pointer == "/root"


def test_a_name_that_is_not_utf_8_is_refused_with_its_path(root: Path) -> None:
    put(root / "train" / os.fsdecode(b"caf\xe9") / "1.png")
    with pytest.raises(InvalidArgument, match=r"train/caf\\udce9/1.png is not UTF-8; rename it"):
        load_data("folders", str(root))
