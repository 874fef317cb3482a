"""Versions of torch's models: what the folder gives is what the library gives, from the file to the embedding."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image, ImageOps
from torch import nn

from index.creation.probes import PROBES, probe_files
from index.encoders.encoder import Encoder, verify_version
from index.encoders.image import decode_image
from index.errors import InvalidArgument
from index.version import Preprocess
from regraft import Version
from training.creation.vision import Timm, TorchModule, Torchvision

SPEC = Preprocess(8, 8, "RGB", 9)
SMALL = "test_vit"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small timm model with a classifier of 7 classes, as a fine-tuning leaves it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "model.pth"
    torch.save(timm.create_model(SMALL, num_classes=7).state_dict(), path)
    return path


def test_a_timm_model_gives_what_timm_gives(weights: Path, tmp_path: Path) -> None:
    made = Version.create(tmp_path / "mine", Timm(SMALL, weights))

    model = timm.create_model(SMALL, num_classes=7, checkpoint_path=str(weights)).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    files = probe_files()[:20]
    with torch.inference_mode():
        pictures = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB") for data in files]
        features = model.forward_head(
            model.forward_features(torch.stack([transform(picture) for picture in pictures])), pre_logits=True
        )
    expected = nn.functional.normalize(features).numpy()
    given = Encoder(made).encode([decode_image(data) for data in files]).vectors

    np.testing.assert_allclose(given, expected, atol=1e-5)
    assert verify_version(made.folder).card.method == "timm"
    parity = made.card.metrics["parity"]["images"]
    assert (parity["inputs"], parity["largest_difference"] < 1e-5) == (PROBES, True)


class Tiny(nn.Module):
    """Shaped as torchvision's: a trunk, and a classifier whose last layer is linear."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, 6, 32, stride=32)
        self.classifier = nn.Sequential(nn.Linear(6, 5), nn.Hardswish(), nn.Linear(5, 3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.trunk(images).mean(dim=(2, 3)))


def test_a_torchvision_model_that_scales_its_input_does_so_with_weights_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaling(Tiny):
        transform_input = False

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images - 1 if self.transform_input else images)

    monkeypatch.setattr(torchvision.models, "get_model", lambda name, weights=None: Scaling())
    whole = Tiny()
    torch.save(whole.state_dict(), tmp_path / "w.pt")

    made = Version.create(tmp_path / "mine", Torchvision("googlenet", tmp_path / "w.pt"))

    pixels = torch.rand(2, 3, 224, 224)
    with torch.inference_mode():
        features = whole.classifier[:2](whole.trunk(pixels - 1).mean(dim=(2, 3)))
    np.testing.assert_allclose(Encoder(made).vectors(pixels.numpy()), nn.functional.normalize(features), atol=1e-5)


@pytest.mark.slow
def test_a_torchvision_model_gives_what_torchvision_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.models, "get_model", lambda name, weights=None: Tiny())
    whole = Tiny()
    torch.save(whole.state_dict(), tmp_path / "w.pt")

    made = Version.create(tmp_path / "mine", Torchvision("resnet18", tmp_path / "w.pt"))

    transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    picture = decode_image(probe_files()[1]).convert("RGB")
    with torch.inference_mode():
        pixels = transform(picture)[None]
        expected = nn.functional.normalize(whole.classifier[:2](whole.trunk(pixels).mean(dim=(2, 3)))).numpy()
    np.testing.assert_allclose(Encoder(made).encode([picture]).vectors, expected, atol=1e-5)
    assert made.card.metrics["parity"]["images"]["largest_difference"] < 1e-5


def test_any_module_with_a_preprocess_becomes_a_version(tmp_path: Path) -> None:
    made = Version.create(
        tmp_path / "mine", TorchModule(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), SPEC, {"kind": "l2"})
    )

    assert (made.card.dim, made.card.space, made.card.method) == (5, {"kind": "l2"}, "torch")


class Branching(nn.Module):
    """What it does depends on the numbers it is given."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3)) if images.sum() > 0 else images.amax(dim=(2, 3))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Branching(), "cannot be written as an ONNX model: "),
        (nn.Linear(3, 2), "cannot be written as an ONNX model: .*mat1 and mat2"),
        (nn.Conv2d(3, 2, 1), r"returns shape \(1, 2, 8, 8\) for one input, not \(1, D\)"),
        (
            nn.Linear(1 << 16, 1 << 13, device="meta"),
            "has 2147516416 bytes; an ONNX file must have less than",
        ),
    ],
)
def test_a_module_that_cannot_be_written_is_told_why(module: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Version.create(tmp_path / "mine", TorchModule(module, SPEC))
    assert list(tmp_path.iterdir()) == []


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("source", [lambda file: Timm(SMALL, file), lambda file: Torchvision("resnet18", file)])
def test_weights_that_would_call_anything_are_refused_and_call_nothing(
    source: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timm.models.load_state_dict, "__defaults__", (True, "cpu", False))  # as of older releases
    torch.save({"weight": Trap(tmp_path / "made")}, tmp_path / "weights.pth")

    with pytest.raises(InvalidArgument, match=r"weights are not available from .*weights.pth"):
        Version.create(tmp_path / "mine", source(tmp_path / "weights.pth"))
    assert not (tmp_path / "made").exists()


def array(file: Path) -> Path:
    torch.save(torch.zeros(3), file)
    return file


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda file: Timm("resnet1", file), "timm has no model 'resnet1'; did you mean resnet"),
        (
            lambda file: Timm(f"{SMALL}.r160", file),
            r"timm has no model 'test_vit.r160'; did you mean test_vit.r160_in1k",
        ),
        (lambda file: Timm("0", file), r"timm has no model '0'; timm.list_models\(\) lists them$"),
        (lambda file: Timm("test_resnet", file), "weights are not available from .*model.pth: .*--weights FILE"),
        (lambda file: Timm(SMALL, file.with_name("none")), "weights are not available from .*none: no such file"),
        (lambda file: Torchvision("vgg", file), "torchvision has no image model 'vgg'; did you mean vgg1"),
        (
            lambda file: Torchvision("0", file),
            r"torchvision has no image model '0'; torchvision.models.list_models\(\) lists them$",
        ),
        (lambda file: Torchvision("resnet18", file), "weights are not available from .*model.pth: "),
        (
            lambda file: Torchvision("resnet18", array(file.with_name("array.pt"))),
            "weights are not available from .*array.pt",
        ),
        (lambda file: Torchvision("squeezenet1_1", file), "the model does not end with a linear layer"),
    ],
)
def test_what_cannot_be_had_is_named(source, message: str, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Version.create(tmp_path / "mine", source(weights))
    assert list(tmp_path.iterdir()) == []
