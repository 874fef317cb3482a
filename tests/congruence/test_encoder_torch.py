"""What serving makes of an image (index.encoders, onnxruntime) equals what training made of it (torchvision, torch)."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from PIL import Image

from index.encoders.encoder import Encoder
from index.encoders.image import decode_image, preprocess_batch
from index.version import Preprocess
from index.version_folder.folder import load_version
from training.data.digits import load_digits_split
from training.data.transforms import pixels, sizing
from training.networks.backbones import build_backbone
from training.tracing import to_onnx
from training.trained import Trained

EXAMPLES = Path(__file__).parents[2] / "examples"


def seen_by_torch(images: list[Image.Image], module: torch.nn.Module, spec: Preprocess) -> np.ndarray:
    with torch.inference_mode():
        return module(torch.stack([pixels(sizing(spec)(image), spec) for image in images])).numpy()


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize("name", ["v1", "v2-bct", "v2-oca", "v2-fct", "photos-v1", "photos-v2"])
def test_an_example_encodes_every_digit_as_its_trained_weights_do(name: str) -> None:
    images = [Image.fromarray(array) for array in load_digits_split().query.images]
    files = [io.BytesIO() for _ in images]
    for image, file in zip(images, files, strict=True):
        image.save(file, "PNG")
    version = load_version(EXAMPLES / name)
    assert version.card.preprocess is not None

    served = Encoder(version).encode([decode_image(file.getvalue()) for file in files]).vectors
    trained = seen_by_torch(images, Trained.load(version.folder), version.card.preprocess)

    assert cosines(served, trained).min() >= 0.9999
    np.testing.assert_allclose(served, trained, atol=1e-5)


@pytest.mark.usefixtures("exporter_read_once")
@pytest.mark.parametrize(
    ("stretch", "interpolation"), [(False, "bilinear"), pytest.param(True, "bicubic", marks=pytest.mark.slow)]
)
def test_a_timm_encoder_sees_photographs_alike_on_both_sides(stretch: bool, interpolation: str) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    china, flower = (Image.fromarray(array) for array in datasets.load_sample_images().images)
    photographs = [china, flower, china.crop((40, 10, 300, 420)), flower.convert("L"), flower.resize((50, 35))]
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    spec = Preprocess(64, 64, resize=72, stretch=stretch, interpolation=interpolation, mean=mean, std=std)
    torch.manual_seed(0)
    backbone = build_backbone("timm/test_resnet", 3, 16).eval()

    expected = seen_by_torch(photographs, backbone, spec)
    session = ort.InferenceSession(to_onnx(backbone, {"images": torch.randn(2, 3, 64, 64)}, ["embedding"]))
    (served,) = session.run(None, {"images": preprocess_batch(photographs, spec)})

    assert cosines(served, expected).min() >= 0.9999
    assert np.ptp(served, axis=0).max() > 1e-3  # the images are told apart at all
