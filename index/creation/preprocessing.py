"""Convert the preprocessing of other libraries (`read_preprocess`): timm's data_config, Hugging Face's processors.

Anything that `Preprocess` cannot express exactly is refused: preprocessing that differs from training lowers recall
without an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from index.errors import InvalidArgument
from index.version import Preprocess
from index.version_folder.card import parse_preprocess
from index.version_folder.checked_json import parse_checked, read_bounded

RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of filters, as in Hugging Face's files, -> names."""
SHORTER_SIDE = ("CLIP", "ChineseCLIP", "ConvNext", "Levit", "Bit", "MobileNetV1", "MobileNetV2", "PoolFormer")
BOTH_SIDES = ("DeiT", "ViT", "Beit")
"""Prefixes of processors for which a number as `size` means both height and width."""
WHOLE = 384
"""From this size on ConvNeXt's processor resizes to the square without a crop."""
LEVIT = 256 / 224
"""The shorter side after the resize of LeViT's processor, relative to its `size`."""
INEXPRESSIBLE = (
    "do_pad",
    "do_thumbnail",
    "do_align_long_axis",
    "do_flip_channel_order",
    "do_color_quantize",
    "do_image_splitting",
    "crop_to_patches",
    "do_grayscale",
    "keep_aspect_ratio",
    "max_size",
    "size_divisor",
)
"""Fields of processors for steps that `Preprocess` lacks, or for sizes that depend on the image."""


def read_preprocess(path: Path) -> Preprocess:
    """Read a JSON file: the `preprocess` field of a card, a timm data_config, or a preprocessor_config.json.

    Raises:
        InvalidArgument: unreadable, none of the three, or a step that `Preprocess` cannot express.
        InvalidVersionFolder: a field of a card's `preprocess` is invalid.
    """
    try:
        value = parse_checked(read_bounded(path, path.name), path.name)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}", pointer="/preprocess") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path.name} must hold a JSON object", pointer="/preprocess")
    try:
        timm = value.get("pretrained_cfg", value)
        if "input_size" in timm:
            return from_timm(timm)
        if "image_processor_type" in value or "image_mean" in value or "do_resize" in value:
            return from_hugging_face(value)
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:  # fields of another type
        raise InvalidArgument(
            f"{path.name} is not in the format of its library ({error})", pointer="/preprocess"
        ) from error
    return parse_preprocess(value, path.name, "")


def from_timm(config: Mapping[str, Any]) -> Preprocess:
    """The equivalent of timm's `create_transform(**data_config)` for evaluation.

    Args:
        config: `input_size` (C, H, W), `crop_pct`, `crop_mode`, `interpolation`, `mean`, `std`; all with timm's
            defaults.
    """
    channels, height, width = _sizes(config["input_size"], 3, "input_size")
    percent = config.get("crop_pct") or 0.875
    scaled = math.floor(height / percent), math.floor(width / percent)
    mode = config.get("crop_mode") or "center"
    if mode not in {"center", "squash"}:
        raise _unknown("crop_mode", mode, "center, squash")
    if mode == "center" and scaled[0] != scaled[1]:
        raise InvalidArgument(
            f"crop_mode 'center' of {height} x {width} pixels is only supported for squares; legal: squash",
            pointer="/preprocess",
        )
    return _checked(
        height,
        width,
        channels,
        scaled[0] if mode == "center" else scaled,
        config.get("interpolation") or "bicubic",
        config.get("mean") or (0.485, 0.456, 0.406),
        config.get("std") or (0.229, 0.224, 0.225),
    )


def from_hugging_face(config: Mapping[str, Any]) -> Preprocess:
    """The equivalent of an image processor of transformers: resize, crop the centre, rescale, normalise.

    Args:
        config: the content of its preprocessor_config.json, or its `to_dict()`.
    """
    for field in INEXPRESSIBLE:
        if config.get(field):
            raise _unknown(field, config[field], "false")
    if (kind := _kind(config)).startswith("Perceiver"):
        raise InvalidArgument(f"{kind} crops before it resizes, which is not supported", pointer="/preprocess")
    resize, crop = _geometry(config)
    number = config.get("resample", 2)
    if number not in RESAMPLE:
        raise _unknown("resample", number, ", ".join(f"{n} ({name})" for n, name in RESAMPLE.items()))
    mean, std = [0.0] * 3, [1.0] * 3
    if config.get("do_normalize", True):
        mean, std = (_three(config, name) for name in ("image_mean", "image_std"))
    if config.get("rescale_offset"):  # EfficientNet: pixels are in [-1, 1] before normalisation
        mean = [m + 1 for m in mean]
    if config.get("include_top", kind.startswith("EfficientNet")):  # EfficientNet divides by `std` twice
        std = [s * again for s, again in zip(std, _three(config, "image_std"), strict=True)]
    # `Preprocess` divides pixels by 255; another factor of the file is moved into mean and std.
    factor = 255 * (float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0)
    if not math.isclose(factor, 1.0, rel_tol=1e-6):
        mean, std = [m / factor for m in mean], [s / factor for s in std]
    return _checked(*crop, 3, resize, RESAMPLE[number], mean, std, "floor")


def _geometry(config: Mapping[str, Any]) -> tuple[int | tuple[int, int] | None, tuple[int, int]]:
    """The fields `resize` and (`height`, `width`) of `Preprocess`."""
    size, has_resize = _size(config), config.get("do_resize", True)
    is_poolformer = _kind(config).startswith("PoolFormer")
    square = isinstance(size, Mapping) and {"height", "width"} <= {name for name, side in size.items() if side}
    if has_resize and config.get("crop_pct") and size.get("shortest_edge") and not is_poolformer:  # ConvNeXt
        shorter = int(size["shortest_edge"])
        resize: Any = (shorter, shorter) if shorter >= WHOLE else int(shorter / config["crop_pct"])
        return resize, (shorter, shorter)
    resize = None
    if has_resize:
        if not square and (not size.get("shortest_edge") or size.get("longest_edge")):
            raise _unknown("size", dict(size), "height and width, or shortest_edge")
        resize = (int(size["height"]), int(size["width"])) if square else int(size["shortest_edge"])
        if (step := config.get("ensure_multiple_of")) and isinstance(resize, tuple) and any(x % step for x in resize):
            raise _unknown("ensure_multiple_of", step, "a divisor of height and width")
        if is_poolformer and (percent := config.get("crop_pct")):
            sides = {int(side / percent) for side in (resize if isinstance(resize, tuple) else (resize,))}
            if len(sides) > 1:
                raise _unknown("size", dict(size), "shortest_edge, or equal height and width")
            (resize,) = sides
    if config.get("do_center_crop", is_poolformer):
        crop = config.get("crop_size") or size
        crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
        cropped = int(crop["height"]), int(crop["width"])
        if resize is None or (isinstance(resize, int) and max(cropped) > resize):
            raise _unknown("crop_size", dict(crop), "at most the resized size, because padding is not supported")
        return resize, cropped
    if not isinstance(resize, tuple):
        raise InvalidArgument(
            "images would have different sizes: a size of height and width, or do_center_crop, is required",
            pointer="/preprocess",
        )
    return resize, resize


def _kind(config: Mapping[str, Any]) -> str:
    """The name of the processor; "" if the file does not state it."""
    return str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")


def _size(config: Mapping[str, Any]) -> Any:
    """The size of the resize. In older files a number is the shorter side or both sides, by the processor."""
    size, kind = config.get("size") or {}, _kind(config)
    if isinstance(size, int):
        if not kind.startswith(SHORTER_SIDE):
            if config.get("do_center_crop") and not kind.startswith(BOTH_SIDES):
                raise _unknown("size", size, "height and width, or shortest_edge: a number means either")
            return {"height": size, "width": size}
        size = {"shortest_edge": size}
    if kind.startswith("Levit") and size.get("shortest_edge"):
        return {"shortest_edge": int(LEVIT * size["shortest_edge"])}
    return size


def _checked(
    height: int,
    width: int,
    channels: int,
    resize: int | tuple[int, int] | None,
    interpolation: str,
    mean: Any,
    std: Any,
    cropped: str = "round",
) -> Preprocess:
    mode = next((name for name, count in Preprocess.MODES.items() if count == channels), None)
    if mode is None:
        raise _unknown("channels", channels, "1, 3")
    stretch = resize == (height, width)
    given = Preprocess(
        height, width, mode, None if stretch else resize, stretch, interpolation, tuple(mean), tuple(std), cropped
    )
    return parse_preprocess(given.as_json(), "preprocess", "")


def _sizes(value: Any, count: int, field: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != count or not all(type(side) is int for side in value):
        raise _unknown(field, value, f"{count} whole numbers")
    return tuple(value)


def _three(config: Mapping[str, Any], field: str) -> list[float]:
    value = config.get(field)
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise _unknown(field, value, "three numbers")
    return [float(number) for number in value]


def _unknown(field: str, value: object, legal: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {value!r} cannot be used; legal: {legal}", pointer=f"/preprocess/{field}")
