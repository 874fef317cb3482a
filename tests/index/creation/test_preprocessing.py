"""The preprocessing of timm's and Hugging Face's files, exactly as a version's, or refused."""

from __future__ import annotations

import json
from functools import partial

import pytest

from index.creation.preprocessing import read_preprocess
from index.errors import RegraftError
from index.version import Preprocess

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
TIMM = {"input_size": [3, 224, 224], "mean": MEAN, "std": STD, "crop_pct": 0.875, "interpolation": "bicubic"}
CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": MEAN,
    "image_std": STD,
}
VIT = {"do_resize": True, "size": {"height": 224, "width": 224}, "resample": 2, "image_mean": MEAN, "image_std": STD}


def spec(resize=None, stretch=False, interpolation="bicubic", height=224, width=224, crop="round"):
    return Preprocess(height, width, "RGB", resize, stretch, interpolation, tuple(MEAN), tuple(STD), crop)


floor = partial(spec, crop="floor")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TIMM, spec(256)),
        ({"architecture": "resnet18", "pretrained_cfg": TIMM | {"crop_pct": 0.95}}, spec(235)),
        (TIMM | {"crop_mode": "squash", "crop_pct": 1.0}, spec(stretch=True)),
        (TIMM | {"crop_mode": "squash", "crop_pct": 0.9}, spec((248, 248))),
        (
            TIMM | {"crop_mode": "squash", "input_size": [3, 64, 32], "crop_pct": 0.5},
            spec((128, 64), height=64, width=32),
        ),
        (CLIP, floor(224)),
        (CLIP | {"size": {"shortest_edge": 250}}, floor(250)),
        (CLIP | {"size": 224, "crop_size": 224}, floor(224)),
        (
            CLIP | {"size": 256, "image_processor_type": None, "feature_extractor_type": "CLIPFeatureExtractor"},
            floor(256),
        ),
        (CLIP | {"size": 256, "image_processor_type": "DeiTImageProcessor"}, floor((256, 256))),
        (CLIP | {"image_processor_type": "LevitImageProcessor"}, floor(256)),
        (
            CLIP | {"size": 224, "image_processor_type": None, "feature_extractor_type": "LevitFeatureExtractor"},
            floor(256),
        ),
        (CLIP | {"image_processor_type": "PoolFormerImageProcessor", "crop_pct": 0.5}, floor(448)),
        (
            CLIP
            | {"image_processor_type": "PoolFormerImageProcessor", "crop_pct": 0.5, "crop_size": 400}
            | {"size": {"height": 384, "width": 384}},
            floor(768, height=400, width=400),
        ),
        (VIT | {"ensure_multiple_of": 14, "keep_aspect_ratio": False, "max_size": None}, floor(None, True, "bilinear")),
        (VIT, floor(None, True, "bilinear")),
        (VIT | {"size": 224}, floor(None, True, "bilinear")),
        (VIT | {"size": {"shortest_edge": 224}, "crop_pct": 0.875}, floor(256, False, "bilinear")),
        (VIT | {"size": {"shortest_edge": 384}, "crop_pct": 0.875}, floor(None, True, "bilinear", 384, 384)),
        (spec(256).as_json(), spec(256)),
        (spec((256, 200)).as_json(), spec((256, 200))),
    ],
)
def test_files_of_three_kinds_are_read(tmp_path, given, expected):
    (tmp_path / "p.json").write_text(json.dumps(given))

    assert read_preprocess(tmp_path / "p.json") == expected


def test_pixels_of_another_scale_are_told_by_mean_and_std(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(VIT | {"rescale_factor": 1 / 127.5}))

    read = read_preprocess(tmp_path / "p.json")

    assert read.mean == pytest.approx([m / 2 for m in MEAN])
    assert read.std == pytest.approx([s / 2 for s in STD])


@pytest.mark.parametrize(
    ("given", "mean", "std"),
    [
        ({"include_top": True}, MEAN, [s * s for s in STD]),
        ({"image_processor_type": "EfficientNetImageProcessor"}, MEAN, [s * s for s in STD]),
        ({"image_processor_type": "EfficientNetImageProcessor", "include_top": False}, MEAN, STD),
        ({"include_top": True, "do_normalize": False}, [0, 0, 0], STD),
        ({"rescale_offset": True, "rescale_factor": 1 / 127.5}, [(m + 1) / 2 for m in MEAN], [s / 2 for s in STD]),
    ],
)
def test_efficientnets_further_scaling_is_told_by_mean_and_std(tmp_path, given, mean, std):
    (tmp_path / "p.json").write_text(json.dumps(VIT | given))

    read = read_preprocess(tmp_path / "p.json")

    assert read.mean == pytest.approx(mean)
    assert read.std == pytest.approx(std)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (TIMM | {"crop_mode": "border"}, "crop_mode 'border' cannot be used; legal: center, squash"),
        (TIMM | {"input_size": [3, 256, 128]}, "only supported for squares; legal: squash"),
        (TIMM | {"input_size": [4, 224, 224]}, "channels 4 cannot be used; legal: 1, 3"),
        (TIMM | {"input_size": "large"}, "input_size 'large' cannot be used"),
        (TIMM | {"interpolation": "box"}, "interpolation must be one of nearest, bilinear, bicubic, lanczos"),
        (CLIP | {"resample": 4}, "resample 4 cannot be used; legal: 0"),
        (CLIP | {"do_pad": True}, "do_pad True cannot be used; legal: false"),
        (VIT | {"keep_aspect_ratio": True}, "keep_aspect_ratio True cannot be used; legal: false"),
        (
            VIT | {"ensure_multiple_of": 30},
            "ensure_multiple_of 30 cannot be used; legal: a divisor of height and width",
        ),
        (VIT | {"size_divisor": 32}, "size_divisor 32 cannot be used; legal: false"),
        (VIT | {"size": 800, "max_size": 1333}, "max_size 1333 cannot be used; legal: false"),
        (VIT | {"do_grayscale": True}, "do_grayscale True cannot be used; legal: false"),
        (
            CLIP | {"size": {"shortest_edge": 224, "longest_edge": 300}},
            "size .* cannot be used; legal: height and width, or shortest_edge",
        ),
        (VIT | {"size": {"shortest_edge": 224}, "crop_pct": 0.9, "do_resize": False}, "would have different sizes"),
        (
            VIT
            | {"size": {"height": 64, "width": 32}, "image_processor_type": "PoolFormerImageProcessor", "crop_pct": 1},
            "size .* cannot be used; legal: shortest_edge, or equal height and width",
        ),
        (CLIP | {"do_color_quantize": True}, "do_color_quantize True cannot be used; legal: false"),
        (CLIP | {"image_processor_type": "PerceiverImageProcessor"}, "PerceiverImageProcessor crops before it resizes"),
        (CLIP | {"do_center_crop": False}, "would have different sizes"),
        (VIT | {"image_mean": None}, "image_mean None cannot be used; legal: three numbers"),
        (VIT | {"size": {"longest_edge": 3}}, "legal: height and width, or shortest_edge"),
        ({"height": 8}, "p.json: width is missing"),
        (TIMM | {"crop_pct": "large"}, "p.json is not in the format of its library"),
        (TIMM | {"crop_pct": 1e-320}, "p.json is not in the format of its library|must be 1 to 4096"),
        (TIMM | {"mean": 3}, "p.json is not in the format of its library"),
        ({"pretrained_cfg": 3}, "p.json is not in the format of its library"),
        (VIT | {"size": [1]}, "p.json is not in the format of its library"),
        (VIT | {"rescale_factor": 0}, "p.json is not in the format of its library"),
        (CLIP | {"size": 256, "image_processor_type": "OwnImageProcessor"}, "size 256 cannot be used; legal: height"),
        (CLIP | {"crop_size": {"height": 256, "width": 224}}, "crop_size .* cannot be used"),
        (CLIP | {"do_resize": False}, "crop_size .* cannot be used"),
        ([1], "must hold a JSON object"),
    ],
)
def test_what_cannot_be_said_exactly_is_refused_by_name(tmp_path, given, message):
    (tmp_path / "p.json").write_text(json.dumps(given))

    with pytest.raises(RegraftError, match=message):
        read_preprocess(tmp_path / "p.json")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RegraftError, match=r"none\.json cannot be read: No such file"):
        read_preprocess(tmp_path / "none.json")
