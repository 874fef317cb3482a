"""Serving's preprocessing equals training's torchvision evaluation transform, pixel by pixel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

import index.encoders.image
from index.encoders.image import preprocess
from index.version import Preprocess

transforms = pytest.importorskip("torchvision.transforms")

SIZES = [(60, 40), (40, 60), (33, 33), (8, 8), (5, 90), (101, 7), (224, 225)]


def torchvision_twin(spec: Preprocess) -> Callable[[Image.Image], Any]:
    interpolation = transforms.InterpolationMode(spec.interpolation)
    crop = (spec.height, spec.width)
    if spec.stretch:
        steps = [transforms.Resize(crop, interpolation)]
    else:
        steps = [transforms.Resize(spec.resize, interpolation)] if spec.resize else []
        steps.append(transforms.CenterCrop(crop))
    return transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(spec.mean, spec.std)])


@pytest.mark.parametrize("interpolation", Preprocess.INTERPOLATIONS)
@pytest.mark.parametrize("mode", list(Preprocess.MODES))
@pytest.mark.parametrize(
    ("resize", "stretch"), [(None, False), (20, False), (17, False), ((17, 23), False), (None, True)]
)
def test_preprocess_equals_torchvision(
    interpolation: str, mode: str, resize: int | tuple[int, int] | None, stretch: bool
) -> None:
    channels = Preprocess.MODES[mode]
    mean, std = (0.485, 0.456, 0.406)[:channels], (0.229, 0.224, 0.225)[:channels]
    for size, crop in itertools.product(SIZES, [(16, 16), (15, 18)]):
        noise = np.random.default_rng(size).integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
        image = Image.fromarray(noise)
        spec = Preprocess(*crop, mode, resize, stretch, interpolation, mean, std)
        expected = torchvision_twin(spec)(image.convert(mode)).numpy()
        np.testing.assert_allclose(preprocess(image, spec), expected, rtol=0, atol=2e-6, err_msg=str((size, crop)))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(900, 4), (4, 900), (613, 5), (3000, 7), (64, 1200), (40, 60)])
def test_a_very_long_image_too(interpolation: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which only the part that is kept is resized: the same pixels, but for one bit of rounding each way."""
    monkeypatch.setattr(index.encoders.image, "MAX_RESIZED", 0)
    noise = np.random.default_rng(size).integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    for resize, crop in itertools.product((8, 17, 224), [(16, 16), (15, 18), (6, 300)]):
        spec = Preprocess(*crop, "RGB", resize, False, interpolation)
        off = np.abs(preprocess(image, spec) - torchvision_twin(spec)(image).numpy())
        assert off.max() <= 2.01 / 255, (resize, crop)
