import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from index.encoders.image import preprocess
from index.errors import InvalidArgument
from index.version import Preprocess
from training.data.transforms import (
    AUGMENTATIONS,
    crop_and_zoom,
    crop_flip,
    cropped,
    find_augmentation,
    flip,
    moved,
    pixels,
    resized_crop,
    shift,
    sizing,
)

SPEC = Preprocess(24, 20, resize=30, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1))


def photo(width: int = 50, height: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def batch(count: int = 6, height: int = 24, width: int = 20) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        Preprocess(24, 20, stretch=True, interpolation="bicubic"),
        Preprocess(64, 64),
        Preprocess(16, 16, mode="L", resize=16, mean=(0.5,), std=(0.25,)),
    ],
)
def test_evaluation_sees_an_image_as_serving_does(spec: Preprocess) -> None:
    np.testing.assert_allclose(pixels(sizing(spec)(photo()), spec).numpy(), preprocess(photo(), spec), atol=1e-6)


def test_pixels_of_a_batch_are_those_of_its_images() -> None:
    sized_BCHW = torch.stack([sizing(SPEC)(photo(50, 40)), sizing(SPEC)(photo(60, 41))])

    together = pixels(sized_BCHW, SPEC)
    assert torch.equal(together, torch.stack([pixels(image, SPEC) for image in sized_BCHW]))


def test_a_mirrored_image_is_v2s_and_every_image_is_drawn_for_itself() -> None:
    torch.manual_seed(0)
    image_BCHW = batch(200)
    flipped = flip(image_BCHW)
    mirrored = [
        torch.equal(made, functional.horizontal_flip(given)) for made, given in zip(flipped, image_BCHW, strict=True)
    ]
    same = [torch.equal(made, given) for made, given in zip(flipped, image_BCHW, strict=True)]

    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 70 < sum(mirrored) < 130


def test_a_crop_is_v2s_crop_at_the_same_place() -> None:
    image_BCHW = batch()
    top_B, left_B = torch.tensor([[0, 1, 2, 3, 4, 4], [4, 0, 3, 1, 2, 4]])
    made = cropped(image_BCHW, top_B, left_B, 20, 16)

    corners = zip(image_BCHW, top_B.tolist(), left_B.tolist(), strict=True)
    expected = [functional.crop(image, top, left, 20, 16) for image, top, left in corners]
    assert torch.equal(made, torch.stack(expected))


def test_a_part_blown_up_is_v2s_resized_crop() -> None:
    image_BCHW = batch(2, 24, 20)
    made = crop_and_zoom(image_BCHW, *(torch.full((2,), share) for share in (4 / 24, 6 / 20, 12 / 24, 10 / 20)))

    expected = functional.resized_crop(image_BCHW, 4, 6, 12, 10, [24, 20], antialias=False)
    # At the border of the part one reads what lies beyond it, the other stops there.
    torch.testing.assert_close(made[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1])


def test_resized_crops_show_parts_from_a_twelfth_to_all_of_an_image() -> None:
    torch.manual_seed(0)
    slope_W = torch.linspace(0, 1, 64)
    made = resized_crop(slope_W.expand(500, 1, 64, 64).clone())
    wide_B = made[:, 0, 32, -2] - made[:, 0, 32, 1]

    assert 0.2 < wide_B.min() < 0.35
    assert 0.9 < wide_B.max() <= 1
    assert made[:, 0, 32, 0].min() < 0.02
    assert made[:, 0, 32, -1].max() > 0.98


def test_crops_reach_every_corner_of_a_black_border_of_an_eighth() -> None:
    torch.manual_seed(0)
    made = crop_flip(torch.ones(2000, 1, 16, 16))
    black = made[:, 0] == 0

    assert made.shape == (2000, 1, 16, 16)
    tops, bottoms = black[:, :, 8].long().argmin(1), black[:, :, 8].flip(1).long().argmin(1)
    assert set(tops.tolist()) == set(bottoms.tolist()) == {0, 1, 2}
    assert black[:, 8, :].any()


@pytest.mark.parametrize("size", [(24, 20), (20, 24), (28, 28)])
@pytest.mark.parametrize(
    ("turn", "zoom", "across", "down"), [(0, 1, 0.1, -0.05), (10, 1, 0, 0), (0, 0.9, 0, 0), (-7, 1.1, 0.06, 0.04)]
)
def test_a_moved_image_is_v2s_affine_of_the_same_numbers(
    size: tuple[int, int], turn: float, zoom: float, across: float, down: float
) -> None:
    height, width = size
    # Smooth and black at the border, so that the two ways to fill what comes in from outside agree.
    image_BCHW = functional.pad(functional.gaussian_blur(batch(2, height - 12, width - 12), [5, 5]), [6, 6])
    numbers = [torch.full((2,), value) for value in (np.deg2rad(turn), zoom, across, down)]
    made = moved(image_BCHW, *(x.float() for x in numbers))

    expected = functional.affine(
        image_BCHW, turn, [across * width, down * height], zoom, [0.0, 0.0], v2.InterpolationMode.BILINEAR
    )
    torch.testing.assert_close(made, expected, atol=2e-4, rtol=0)


def test_paper_stays_white_and_night_black_where_an_image_moves_away() -> None:
    torch.manual_seed(0)

    torch.testing.assert_close(shift(torch.ones(50, 1, 12, 12)), torch.ones(50, 1, 12, 12))
    torch.testing.assert_close(shift(torch.zeros(50, 1, 12, 12)), torch.zeros(50, 1, 12, 12))


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_every_augmentation_keeps_shape_and_range_and_repeats_with_its_seed(name: str) -> None:
    augmentation, made = find_augmentation(name), []
    for _ in range(2):
        torch.manual_seed(3)
        sized = torch.stack([sizing(SPEC, augmentation)(photo()) for _ in range(12)])
        made.append(pixels(sized, Preprocess(24, 20, resize=30), augmentation))

    assert made[0].shape == (12, 3, 24, 20)
    assert made[0].min() >= 0
    assert made[0].max() <= 1
    assert torch.equal(*made)
    assert (name == "none") == all(torch.equal(image, made[0][0]) for image in made[0])


def test_an_unknown_augmentation_lists_the_legal_ones() -> None:
    with pytest.raises(InvalidArgument, match="'mixup' is unknown; legal: none, shift, flip"):
        find_augmentation("mixup")


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_images_can_be_sent_to_a_process_that_is_started_anew(name: str) -> None:
    augmentation = find_augmentation(name)
    size, batch_of = pickle.loads(pickle.dumps((sizing(SPEC, augmentation), augmentation.batch)))

    assert batch_of(size(photo())[None].float()).shape == (1, 3, 24, 20)


def test_of_a_very_long_image_only_what_is_cropped_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    made, resize = [], Image.Image.resize

    def watched(image: Image.Image, *how: object) -> Image.Image:
        made.append(resize(image, *how))
        return made[-1]

    monkeypatch.setattr(Image.Image, "resize", watched)
    sized = sizing(SPEC)(Image.new("RGB", (100_000, 4), (9, 8, 7)).resize((400_000, 4)))

    assert sized[:, 0, 0].tolist() == [9, 8, 7]
    assert max(image.width * image.height for image in made[1:]) < 10_000
