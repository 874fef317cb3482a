"""Each change of colours against torchvision's with the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from training.data.colours import brightened, contrasted, grey, jitter, saturated, turned


def images(count: int = 4, channels: int = 3) -> Tensor:
    made = torch.rand(count, channels, 6, 5, generator=torch.Generator().manual_seed(0))
    made[:, :, 0, 0] = 0.5  # without a hue
    return made


@pytest.mark.parametrize(
    ("ours", "theirs", "numbers"),
    [
        (brightened, functional.adjust_brightness, [0.6, 1.0, 1.4, 1.2]),
        (contrasted, functional.adjust_contrast, [0.6, 1.0, 1.4, 1.2]),
        (saturated, functional.adjust_saturation, [0.6, 1.0, 1.4, 1.2]),
        (turned, functional.adjust_hue, [-0.5, -0.1, 0.0, 0.3]),
    ],
)
def test_a_change_is_v2s_and_every_image_has_its_own(
    ours: Callable[[Tensor, Tensor], Tensor], theirs: Callable[[Tensor, float], Tensor], numbers: list[float]
) -> None:
    made = ours(images(), torch.tensor(numbers))

    expected = [theirs(image, number) for image, number in zip(images(), numbers, strict=True)]
    torch.testing.assert_close(made, torch.stack(expected), atol=2e-4, rtol=0)


def test_some_images_stay_some_are_grey_and_grey_ones_have_no_hue() -> None:
    torch.manual_seed(0)
    made, given = jitter(images(400)), images(400)
    same = (made == given).flatten(1).all(1).float().mean()
    colourless = (made == made[:, :1]).flatten(1).all(1).float().mean()

    assert 0.1 < same < 0.24
    assert 0.14 < colourless < 0.26
    torch.testing.assert_close(grey(images()), functional.rgb_to_grayscale(images()), atol=2e-4, rtol=0)
    assert jitter(images(9, channels=1)).shape == (9, 1, 6, 5)
