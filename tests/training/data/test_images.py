from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import training.data.images
from index.errors import InvalidArgument, InvalidImage
from index.version import Preprocess
from training.data.images import Arrays, Data, Files, ImageDataset, ImageSet, batches
from training.data.transforms import pixels, sizing

SPEC = Preprocess(6, 6, resize=6, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1))


def some(labels: list[int], seed: int = 0) -> ImageSet:
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), 8, 9, 3), dtype=np.uint8)
    return ImageSet(Arrays(images), np.array(labels, np.int64))


def data(labels: list[int], names: list[str] | None = None) -> Data:
    test = some([0, 0])
    return Data(some(labels), test, test, same=True, names=names)


def pngs(folder: Path, images: Arrays) -> Files:
    paths = [folder / f"{row}.png" for row in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        image.save(path)
    return Files(paths)


def test_files_and_arrays_give_the_same_images_and_rows(tmp_path: Path) -> None:
    arrays = some([0, 1, 2, 3, 4]).images
    files = pngs(tmp_path, arrays)
    rows = np.array([3, 1])

    assert len(files) == len(arrays) == 5
    for images in (files, files.take(np.arange(5)), files[:]):
        assert all(np.array_equal(a, b) for a, b in zip(images, arrays, strict=True))
    assert np.array_equal(files.take(rows)[0], arrays[3])
    assert np.array_equal(arrays.take(rows)[1], arrays[1])
    assert np.array_equal(files[1:3][0], arrays[1])


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_a_file_that_cannot_be_decoded_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(InvalidImage, match=r"broken\.png: "):
        Files([path])[0]


def test_the_first_classes_are_kept() -> None:
    kept = some([5, 1, 9, 1, 7, 5]).keep_classes(2)

    assert kept.labels.tolist() == [5, 1, 1, 5]


def test_a_larger_share_holds_what_a_smaller_one_of_the_same_seed_does() -> None:
    images = some(list(range(40)))
    for keep in (images.keep_fraction, images.keep_class_share):
        quarter, half, other = (
            set(keep(share, seed).labels.tolist()) for share, seed in ((0.25, 1), (0.5, 1), (0.25, 2))
        )

        assert (len(quarter), len(half)) == (10, 20)
        assert quarter < half
        assert quarter != other


def test_a_share_of_classes_keeps_whole_classes() -> None:
    kept = some([0, 1, 2, 3] * 5).keep_class_share(0.5, 0)

    assert np.unique(kept.labels, return_counts=True)[1].tolist() == [5, 5]


def test_dense_labels_run_from_zero_in_the_order_of_the_classes() -> None:
    assert some([5, 1, 9, 1]).dense().labels.tolist() == [1, 0, 2, 0]


def test_a_split_takes_first_classes_then_a_share_of_those_then_of_their_images() -> None:
    whole = data([0, 1, 2, 3] * 10, names=["a", "b", "c", "d"])

    assert whole.split().classes == ["a", "b", "c", "d"]
    assert whole.split(classes=2).classes == ["a", "b"]
    assert len(whole.split(classes=2, fraction=0.5).train) == 10
    assert len(whole.split(class_share=0.75, fraction=0.2).train) == 6
    assert whole.split(classes=3).query is whole.query
    assert data([4, 7]).classes == [4, 7]


@pytest.mark.parametrize("field", ["class_share", "fraction"])
@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan")])
def test_a_share_outside_its_range_is_refused_by_name(field: str, share: float) -> None:
    with pytest.raises(InvalidArgument, match=f"{field} must be above 0 and at most 1"):
        data([0, 1]).split(**{field: share})


def test_more_classes_than_there_are_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="classes must be at most 2, the number of classes"):
        data([0, 1]).split(classes=3)


def test_a_single_class_is_nothing_to_train_on() -> None:
    with pytest.raises(InvalidArgument, match="at least two classes; 3 images of 1 are left"):
        data([0, 0, 0, 1]).split(classes=1)


def test_queries_without_another_image_of_their_class_are_lonely() -> None:
    alone = some([0, 0, 1, 2, 2])

    assert Data(alone, alone, alone, same=True).queries_without_match() == 1
    assert Data(alone, alone, some([0, 1, 1])).queries_without_match() == 2
    assert Data(alone, some([0, 5]), some([0, 1])).queries_without_match() == 1


def test_tensors_are_what_serving_sees_of_each_image_and_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = some([3, 1, 2])
    files = pngs(tmp_path, arrays.images)
    images = ImageSet(files, arrays.labels)
    tensors = ImageDataset(images, SPEC)
    for path in files.paths:
        path.unlink()

    expected = torch.stack([pixels(sizing(SPEC)(image), SPEC) for image in arrays.images])
    assert torch.equal(ImageDataset(images, SPEC).__getitems__([0, 1, 2])[0], expected)
    assert torch.equal(tensors[1][0], expected[1])
    assert tensors[1][1] == 1


def test_images_that_exceed_the_limit_are_decoded_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = some([3, 1, 2])
    kept = ImageDataset(images, SPEC).__getitems__([2, 0])
    monkeypatch.setattr(training.data.images, "MAX_PRELOADED_BYTES", 3 * 3 * 6 * 6 - 1)
    made = ImageDataset(ImageSet(pngs(tmp_path, images.images), images.labels), SPEC)

    assert made.preloaded is None
    assert torch.equal(made.__getitems__([2, 0])[0], kept[0])
    assert torch.equal(made.__getitems__([2, 0])[1], kept[1])


def test_a_random_crop_of_the_whole_image_is_never_kept() -> None:
    torch.manual_seed(0)
    tensors = ImageDataset(some([0, 1]), SPEC, "resized_crop_flip")

    assert tensors.preloaded is None
    assert not torch.equal(tensors[0][0], tensors[0][0])


def test_batches_cover_the_set_in_its_order() -> None:
    loaded = list(batches(some([3, 1, 2]), SPEC, 2))

    assert [label_B.tolist() for _, label_B in loaded] == [[3, 1], [2]]
    assert [image_BCHW.shape for image_BCHW, _ in loaded] == [(2, 3, 6, 6), (1, 3, 6, 6)]


def test_a_fingerprint_changes_with_a_pixel_a_label_or_the_order(tmp_path: Path) -> None:
    images = some([0, 1])
    pixels = np.stack([np.asarray(image) for image in images.images])
    pixels[1, 0, 0, 0] ^= 1
    other = ImageSet(Arrays(pixels), images.labels)
    sets = [images, other, some([0, 2]), images.take(np.array([1, 0]))]
    files = pngs(tmp_path, images.images)
    before = ImageSet(files, images.labels).fingerprint
    Image.new("RGB", (8, 8)).save(files.paths[0])

    assert len({each.fingerprint for each in sets}) == 4
    assert images.fingerprint == some([0, 1]).fingerprint
    assert ImageSet(files, images.labels).fingerprint != before
