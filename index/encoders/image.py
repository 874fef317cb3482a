"""Images: decode untrusted bytes (`decode_image`), and preprocess pixels into the encoder's input (`preprocess`).

`preprocess` computes the same as torchvision's evaluation transform on PIL images (Resize, CenterCrop, ToTensor,
Normalize); tests/congruence compares the two. Shape suffixes: N images, C channels, H height, W width.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION

from index.encoders.jpeg import BEGINNING, has_scans_beyond
from index.errors import InvalidImage, raise_if_out_of_memory
from index.version import Preprocess

Pixels = NDArray[np.float32]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 50_000_000
PILLOWS_PIXELS = 178_956_970
"""Pillow refuses images with more pixels, whatever its settings."""
MIN_SIDE = 4
"""Shortest legal side: smaller images are almost always tracking pixels or broken exports."""
MAX_SCANS = 100
"""Most scans of a JPEG; encoders write about ten. A further one of 75 bytes takes a seventh of the time of those."""
RUN_LENGTHS = "bmp_rle"
"""Pillow's only decoder in Python among those of `FORMATS`: a thousand bytes may keep it busy for ten seconds."""
LEAST_SEEN = 0.25
"""Smallest share of an image's area that a version should see; of a 3:1 panorama a square crop keeps a third."""
MOST_REDUCED = 16.0
"""Largest factor by which a version should reduce an image's sides: 3,584 pixels become 224."""
MAX_RESIZED = 32_000_000
"""Largest resized image, in pixels, that is computed as a whole; of a larger one only the crop is."""
UNBOUNDED = {"I": "32-bit integers", "F": "floating point"}
"""Pillow's greyscale modes without a defined white."""
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> the transpose that makes the image upright; 1 is upright."""
ONLY_TO = {"LAB": "RGB", "La": "LA"}
"""Modes that Pillow converts to one other mode only: CIELAB, and grey with premultiplied alpha."""
WHITE_IS_ZERO = 0
"""The TIFF photometric interpretation that Pillow ignores above 8 bits."""
FILTER_SUPPORT = 3
"""Radius in pixels of Pillow's widest filter, Lanczos."""


class Loss(StrEnum):
    """What a picture loses on its way into an encoder, when it is much larger than what the version reads."""

    UNSEEN = "image_mostly_unseen"
    REDUCED = "image_much_reduced"


def decode_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode the first frame of an image completely, turned upright by its EXIF orientation.

    Args:
        data: the content of the file.
        max_pixels: images with more pixels are refused, by their header, before anything is decoded.

    Returns:
        The image in mode L, LA, RGB, RGBA or another 8-bit mode that Pillow converts to both RGB and L.

    Raises:
        InvalidImage: empty, not one of `FORMATS`, corrupt or truncated, too many pixels or scans, a side below
            `MIN_SIDE`, grey that is `UNBOUNDED`, or a BMP with run lengths.
    """
    return load_image(open_image(data, max_pixels=max_pixels))


def open_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The first half of `decode_image`: read the header, decode no pixels."""
    if not data:
        raise InvalidImage("the image is empty (0 bytes)")
    image = _open(data, max_pixels)
    width, height = image.size
    if width * height > max_pixels:
        raise InvalidImage(f"the image has {width} x {height} pixels; at most {max_pixels} pixels are decoded")
    if min(width, height) < MIN_SIDE:
        raise InvalidImage(f"the image is {width} x {height} pixels; each side must have at least {MIN_SIDE}")
    if data.startswith(BEGINNING) and has_scans_beyond(data, MAX_SCANS):
        raise InvalidImage(f"the image has more than {MAX_SCANS} scans; a JPEG has about ten")
    if any(tile.codec_name == RUN_LENGTHS for tile in image.tile):
        raise InvalidImage("the image is a BMP with run-length encoding; store it without, or as PNG")
    if (kind := UNBOUNDED.get(image.mode)) is not None:
        raise InvalidImage(f"the image is grey in {kind}, of which no value is white; store it with 8 or 16 bits")
    return image


def load_image(image: Image.Image) -> Image.Image:
    """The second half of `decode_image`: decode the pixels, upright, 8 bits per channel."""
    try:
        image.load()
        return _upright(_eight_bit(image))
    except Exception as error:  # on corrupt bytes decoders raise many types of exceptions
        raise_if_out_of_memory(error)
        raise InvalidImage(f"the image is corrupt or truncated ({error})") from error


def preprocess(image: Image.Image, spec: Preprocess) -> Pixels:
    """One decoded image -> the encoder's input, float32 (C, H, W). See `Preprocess` for the steps."""
    resampling = Image.Resampling[spec.interpolation.upper()]
    image = image.convert(spec.mode)
    if spec.stretch:
        image = image.resize((spec.width, spec.height), resampling)
    else:
        if spec.resize is not None:
            image = _resize(image, spec, resampling)
        image = centre(image, spec)
    pixels_HWC = np.asarray(image, np.float32).reshape(spec.height, spec.width, spec.channels) / np.float32(255)
    mean_C, std_C = np.asarray(spec.mean, np.float32), np.asarray(spec.std, np.float32)
    return np.ascontiguousarray(((pixels_HWC - mean_C) / std_C).transpose(2, 0, 1))


def preprocess_batch(images: Sequence[Image.Image], spec: Preprocess) -> Pixels:
    """Decoded images -> float32 (N, C, H, W); N may be 0."""
    batch = np.empty((len(images), spec.channels, spec.height, spec.width), np.float32)
    for row, image in enumerate(images):
        batch[row] = preprocess(image, spec)
    return batch


def losses(size: tuple[int, int], spec: Preprocess) -> list[Loss]:
    """The losses of an image of this (width, height) in `preprocess`, by `LEAST_SEEN` and `MOST_REDUCED`."""
    unseen, reduced = seen_share(size, spec) < LEAST_SEEN, reduction(size, spec) > MOST_REDUCED
    return [loss for loss, holds in ((Loss.UNSEEN, unseen), (Loss.REDUCED, reduced)) if holds]


def seen_share(size: tuple[int, int], spec: Preprocess) -> float:
    """Share of an image's area that is not cropped, in (0, 1]."""
    if spec.stretch:
        return 1.0
    width, height = _resized(size, spec)
    return min(1.0, spec.width / width) * min(1.0, spec.height / height)


def reduction(size: tuple[int, int], spec: Preprocess) -> float:
    """Factor by which the side that shrinks most is reduced; below 1 if it is enlarged."""
    if spec.stretch:
        return max(size[0] / spec.width, size[1] / spec.height)
    if isinstance(spec.resize, tuple):
        return max(size[0] / spec.resize[1], size[1] / spec.resize[0])
    return 1.0 if spec.resize is None else min(size) / spec.resize


def _open(data: bytes, max_pixels: int) -> ImageFile.ImageFile:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidImage(f"the image has too many pixels; at most {max_pixels} are decoded") from error
    except Exception as error:  # on corrupt bytes parsers raise many types of exceptions
        raise_if_out_of_memory(error)
        raise InvalidImage(f"the bytes are not a readable image; legal formats: {', '.join(FORMATS)}") from error


def _eight_bit(image: Image.Image) -> Image.Image:
    """Convert grey of 12 and 16 bits to 8 bits (Pillow would clip it), palettes to colours, and modes of `ONLY_TO`."""
    if image.mode.startswith("I;16"):
        tiff = getattr(image, "tag_v2", {})
        bits = tiff.get(BITSPERSAMPLE, (16,))[0]
        shades = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
        grey = Image.fromarray(~shades if tiff.get(PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO else shades)
        grey.info = image.info
        return grey
    if image.mode in {"P", "PA"}:
        return image.convert("RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB")
    return image.convert(ONLY_TO[image.mode]) if image.mode in ONLY_TO else image


def _upright(image: Image.Image) -> Image.Image:
    """Turn an image upright by its EXIF orientation; unreadable EXIF data are ignored.

    Pillow's `exif_transpose` also rewrites the other fields, and fails if one of them is corrupt.
    """
    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception as error:  # on corrupt bytes the parser raises many types
        raise_if_out_of_memory(error)
        return image
    return image if turn is None else image.transpose(turn)


def _scaled(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """(width, height) after resizing the shorter side to `shorter`, rounded as torchvision does."""
    width, height = size
    longer = int(shorter * max(size) / min(size))
    return (shorter, longer) if width <= height else (longer, shorter)


def _resized(size: tuple[int, int], spec: Preprocess) -> tuple[int, int]:
    """(width, height) after the resize that comes before the crop."""
    if spec.resize is None or isinstance(spec.resize, int):
        return size if spec.resize is None else _scaled(size, spec.resize)
    return spec.resize[1], spec.resize[0]


def _resize(image: Image.Image, spec: Preprocess, resampling: Image.Resampling) -> Image.Image:
    """Resize an image; of a result above `MAX_RESIZED` compute only the part that `centre` keeps."""
    size = _resized(image.size, spec)
    if size[0] * size[1] <= MAX_RESIZED:
        return image.resize(size, resampling)
    # Same pixels as in a resize of the whole image, up to rounding. Horizontal first, then vertical, as Pillow does,
    # because it rounds in between.
    starts = _margin(size[0] - spec.width, spec), _margin(size[1] - spec.height, spec)
    across = _kept(image.width, size[0], spec.width, starts[0])
    down = _kept(image.height, size[1], spec.height, starts[1])
    near = image.crop((across.first, down.first, across.last, down.last))
    near = near.resize((across.pixels, near.height), resampling, (across.left, 0, across.right, near.height))
    return near.resize((across.pixels, down.pixels), resampling, (0, down.left, near.width, down.right))


@dataclass(frozen=True)
class _Part:
    """The part of one side that is kept: pixels [`first`, `last`) of the original are resized to `pixels` pixels.

    The source of the resize is [`left`, `right`), relative to `first`, because Pillow computes it in float32, which is
    inexact for large numbers.
    """

    first: int
    last: int
    pixels: int
    left: float
    right: float


def _margin(beyond: int, spec: Preprocess) -> int:
    """Number of surplus pixels before the crop, out of `beyond` on both sides of it."""
    return beyond // 2 if spec.crop == "floor" else round(beyond / 2)


def _kept(given: int, resized: int, wanted: int, start: int) -> _Part:
    """The part of a side from `given` to `resized` pixels that is kept: `wanted` pixels from `start` on, or all."""
    if resized <= wanted:
        return _Part(0, given, resized, 0.0, float(given))
    scale = given / resized
    left, right = start * scale, (start + wanted) * scale
    beyond = FILTER_SUPPORT * max(scale, 1.0) + 1
    first, last = max(int(left - beyond), 0), min(int(right + beyond) + 1, given)
    return _Part(first, last, wanted, left - first, right - first)


def centre(image: Image.Image, spec: Preprocess) -> Image.Image:
    """Crop the centre; a smaller image is first padded with black. Rounded as in torchvision (or `spec.crop`)."""
    width, height = spec.width, spec.height
    across, down = max(width - image.width, 0), max(height - image.height, 0)
    if across or down:
        image = ImageOps.expand(image, (across // 2, down // 2, (across + 1) // 2, (down + 1) // 2))
    left, top = _margin(image.width - width, spec), _margin(image.height - height, spec)
    return image.crop((left, top, left + width, top + height))
