import subprocess
import sys

import numpy as np
import pytest

from training.data.digits import DigitsSplit, load_digits_split


@pytest.fixture(scope="module")
def split() -> DigitsSplit:
    return load_digits_split()


def test_the_old_model_sees_a_hundred_images_of_five_digits_and_the_new_one_all_ten(split: DigitsSplit) -> None:
    assert len(split.old_train) == 100
    assert set(split.old_train.labels.tolist()) == {0, 1, 2, 3, 4}
    assert len(split.new_train) == 900
    assert set(split.new_train.labels.tolist()) == set(range(10))


def test_query_gallery_and_training_share_no_image(split: DigitsSplit) -> None:
    seen = [{image.tobytes() for image in part.images} for part in (split.new_train, split.gallery, split.query)]

    assert [len(part) for part in seen] == [900, 577, 320]  # no image appears twice in the source either
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]


def test_the_new_training_data_holds_the_old(split: DigitsSplit) -> None:
    new = {image.tobytes() for image in split.new_train.images}

    assert {image.tobytes() for image in split.old_train.images} <= new


def test_images_are_grey_bytes_using_the_whole_range(split: DigitsSplit) -> None:
    images = split.gallery.images

    assert images.dtype == np.uint8
    assert images.shape == (577, 8, 8)
    assert (images.min(), images.max()) == (0, 255)


def test_the_seed_decides_the_split(split: DigitsSplit) -> None:
    again, other = load_digits_split(), load_digits_split(seed=1)

    assert np.array_equal(split.query.images, again.query.images)
    assert not np.array_equal(split.query.images, other.query.images)


def test_the_demo_can_load_it_without_torch() -> None:
    code = "import sys, training.data.digits as digits; digits.load_digits_split(); sys.exit('torch' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)
