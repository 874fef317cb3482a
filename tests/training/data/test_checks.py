"""Data whose results would look right and be wrong: refused, or warned of."""

from __future__ import annotations

import logging
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from index.errors import InvalidArgument, InvalidImage
from staging.inputs.recipes import quick
from training import train as path
from training.data.checks import check_measurable, warn_of_repeats, warn_of_similar_names
from training.data.images import Arrays, Data, Files, ImageSet


def shades(*greys: int, labels: tuple[int, ...] | None = None) -> ImageSet:
    """An image of each grey; their labels, by default 0, 1, 0, 1 ..."""
    images = np.stack([np.full((8, 8), grey, np.uint8) for grey in greys])
    return ImageSet(Arrays(images), np.array(labels or [n % 2 for n in range(len(greys))], np.int64))


TESTED = shades(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("data", "warnings"),
    [
        (Data(shades(9, 8), TESTED, TESTED, same=True), []),
        (Data(shades(9, 2), TESTED, TESTED, same=True), ["1 of 4 test images are trained on, too"]),
        (Data(shades(1, 2, 3, 4), TESTED, TESTED, same=True), ["4 of 4 test images are trained on, too"]),
        (Data(shades(9, 8), TESTED, shades(5, 6, 7)), []),
        (Data(shades(9, 6), TESTED, shades(5, 6, 7)), ["1 of 7 test images are trained on, too"]),
        (Data(shades(9, 8), TESTED, shades(5, 4, 3)), ["2 of 4 query images find a copy of themselves"]),
        (
            Data(shades(9, 1), shades(1, 2, 1), shades(1, 2, 1), same=True),
            ["2 of 3 test images are trained on, too", "2 of 3 query images find a copy of themselves"],
        ),
    ],
)
def test_repeated_images_are_counted(data: Data, warnings: list[str], caplog: pytest.LogCaptureFixture) -> None:
    warn_of_repeats(data)

    assert caplog.messages == [f"{warning}: results look better than they are" for warning in warnings]


def test_the_same_warning_is_given_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    for leaked in (9, 9, 2, 9):
        warn_of_repeats(Data(shades(1, leaked), TESTED, TESTED, same=True))

    assert [text[:6] for text in caplog.messages] == ["1 of 4", "2 of 4"]


def test_training_images_do_not_count_where_nothing_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_repeats(Data(TESTED, TESTED, TESTED, same=True), trained_on=False)
    warn_of_repeats(Data(TESTED, TESTED, TESTED, same=True), log=False)

    assert not caplog.messages


def test_the_fingerprint_comes_from_the_same_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    images = shades(1, 2)
    digests, fingerprint = images.digests, images.fingerprint
    monkeypatch.setattr(Arrays, "content", lambda *_: pytest.fail("read again"))

    assert (images.digests, images.fingerprint) == (digests, fingerprint)


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidImage, match=r"gone\.png: .*No such file"):
        _ = ImageSet(Files([tmp_path / "gone.png"]), np.zeros(1, np.int64)).fingerprint


@pytest.mark.usefixtures("weights_only")
def test_a_training_warns_of_repeated_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = path.recipe_data(quick("digits_v1"))
    leak = Data(data.train, data.train, data.train, same=True, names=data.names)
    with caplog.at_level(logging.WARNING):
        path.train(quick("digits_v1", epochs=1), tmp_path / "v1", data=leak)

    assert "100 of 100 test images are trained on, too: results look better than they are" in caplog.messages


def test_a_gallery_of_one_class_measures_nothing() -> None:
    one = shades(1, 2, labels=(1, 1))
    with pytest.raises(InvalidArgument, match="all 2 images to find are of one class, 'b', so that every answer"):
        check_measurable(Data(TESTED, one, one, same=True, names=["a", "b"]))
    check_measurable(Data(TESTED, shades(1, 2, labels=(1, 1)), shades(3, 4), names=["a", "b"]))


@pytest.mark.parametrize(("queries", "found"), [((1, 0), "only one query image has"), ((1, 1), "no query image has")])
def test_fewer_than_two_queries_that_can_find_their_class_measure_nothing(queries: tuple[int, int], found: str) -> None:
    gallery = shades(3, 4, labels=(0, 2))
    with pytest.raises(InvalidArgument, match=found):
        check_measurable(Data(TESTED, shades(1, 2, labels=queries), gallery, names=["a", "b", "c"]))


@pytest.mark.parametrize("other", ["Apfel", "apfel ", "APFEL"])
def test_class_names_that_look_alike_are_named(other: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_similar_names(["birne", "apfel", other])

    assert caplog.messages == [f"'apfel' and {other!r} are two classes, although their names look alike"]


def test_a_letter_and_its_accent_are_one_letter(caplog: pytest.LogCaptureFixture) -> None:
    composed, apart = (unicodedata.normalize(form, "äpfel") for form in ("NFC", "NFD"))
    warn_of_similar_names([composed, apart])
    warn_of_similar_names([composed, "apfel"])

    assert len(caplog.messages) == 1
