"""Images: from untrusted bytes to pixels, and from pixels to the encoder's input.

`preprocess` is the serving twin of torchvision's evaluation transform on PIL images (Resize, CenterCrop, ToTensor,
Normalize); tests/congruence compares the two. Shape suffixes: N images, C channels, H height, W width.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION

from index.errors import InvalidImage, raise_if_out_of_memory
from index.version import Preprocess

Pixels = NDArray[np.float32]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 50_000_000
PILLOWS_PIXELS = 178_956_970
"""Pillow opens no image of more, whatever it is asked for."""
MIN_SIDE = 4
"""Shorter sides hold nothing to recognise and are almost always tracking pixels or broken exports."""
LEAST_SEEN = 0.25
"""Share of a picture's area that a version should see at least: the centre of a 3:1 panorama is a third of it."""
MOST_REDUCED = 16.0
"""How much smaller a version should make a picture's sides at most: 3,584 pixels become 224."""
MAX_RESIZED = 32_000_000
"""Pixels of a resized image of which more is kept than the part that is cropped from it."""
UNBOUNDED = {"I": "32-bit integers", "F": "floating point"}
"""Pillow's modes of grey that nothing says what is white of."""
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
"""What makes a picture of each EXIF orientation upright; 1 is."""
ONLY_TO = {"LAB": "RGB", "La": "LA"}
"""Modes that Pillow converts to a single other one: CIELAB, and grey that is multiplied by its transparency."""
WHITE_IS_ZERO = 0
"""The photometric interpretation of TIFF that Pillow heeds up to 8 bits only."""
FILTER_SUPPORT = 3
"""How many pixels away Pillow's widest filter, Lanczos, looks."""


class Loss(StrEnum):
    """What a picture loses on its way into an encoder, when it is much larger than what the version reads."""

    UNSEEN = "image_mostly_unseen"
    REDUCED = "image_much_reduced"


def decode_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode one image completely, the first frame of several, turned upright as its EXIF orientation says.

    Args:
        data: the file as it was sent.
        max_pixels: refuse more than this, judged by the header before anything is decoded.

    Returns:
        The image in mode L, LA, RGB, RGBA or another of Pillow's 8-bit modes, one that converts to RGB and to L.

    Raises:
        InvalidImage: empty, not one of `FORMATS`, corrupt or truncated, too many pixels, a side below `MIN_SIDE`, or
            grey that is `UNBOUNDED`.
    """
    return load_image(open_image(data, max_pixels=max_pixels))


def open_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The first half of `decode_image`: what the header says, with no pixel decoded yet."""
    if not data:
        raise InvalidImage("the image is empty (0 bytes)")
    image = _open(data, max_pixels)
    width, height = image.size
    if width * height > max_pixels:
        raise InvalidImage(f"the image has {width} x {height} pixels; at most {max_pixels} pixels are decoded")
    if min(width, height) < MIN_SIDE:
        raise InvalidImage(f"the image is {width} x {height} pixels; each side needs at least {MIN_SIDE}")
    if (kind := UNBOUNDED.get(image.mode)) is not None:
        raise InvalidImage(f"the image is grey in {kind}, of which no value is white; store it with 8 or 16 bits")
    return image


def load_image(image: Image.Image) -> Image.Image:
    """The second half: the pixels, upright and of 8 bits."""
    try:
        image.load()
        return _upright(_eight_bit(image))
    except Exception as error:  # decoders raise whatever the broken bytes lead them to
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
    """What a picture of this (width, height) loses in `preprocess`: see `LEAST_SEEN` and `MOST_REDUCED`."""
    unseen, reduced = seen_share(size, spec) < LEAST_SEEN, reduction(size, spec) > MOST_REDUCED
    return [loss for loss, holds in ((Loss.UNSEEN, unseen), (Loss.REDUCED, reduced)) if holds]


def seen_share(size: tuple[int, int], spec: Preprocess) -> float:
    """Share of a picture's area that reaches the encoder, above 0 to 1: the rest is cropped."""
    if spec.stretch:
        return 1.0
    width, height = _resized(size, spec)
    return min(1.0, spec.width / width) * min(1.0, spec.height / height)


def reduction(size: tuple[int, int], spec: Preprocess) -> float:
    """How many of a picture's pixels, along the side that shrinks most, become one; below 1 where it is enlarged."""
    if spec.stretch:
        return max(size[0] / spec.width, size[1] / spec.height)
    if isinstance(spec.resize, tuple):
        return max(size[0] / spec.resize[1], size[1] / spec.resize[0])
    return 1.0 if spec.resize is None else min(size) / spec.resize


def _open(data: bytes, max_pixels: int) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidImage(f"the image has too many pixels; at most {max_pixels} are decoded") from error
    except Exception as error:  # parsers of headers raise whatever the broken bytes lead them to
        raise_if_out_of_memory(error)
        raise InvalidImage(f"the bytes are not a readable image; legal formats: {', '.join(FORMATS)}") from error


def _eight_bit(image: Image.Image) -> Image.Image:
    """Bring grey of 12 and 16 bits to 8 (Pillow's own conversion would clip it) and palettes to their colours.

    What Pillow converts to a single other mode becomes that.
    """
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
    """Turn an image as its EXIF orientation says. One that cannot be read turns nothing: the picture is whole.

    Not Pillow's `exif_transpose`, which writes the other fields anew and fails where one of them is broken.
    """
    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception as error:  # whatever broken bytes lead its parser to
        raise_if_out_of_memory(error)
        return image
    return image if turn is None else image.transpose(turn)


def _scaled(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """(width, height) with the shorter side brought to `shorter`, rounded as torchvision does."""
    width, height = size
    longer = int(shorter * max(size) / min(size))
    return (shorter, longer) if width <= height else (longer, shorter)


def _resized(size: tuple[int, int], spec: Preprocess) -> tuple[int, int]:
    """(width, height) after the resize that comes before the crop."""
    if spec.resize is None or isinstance(spec.resize, int):
        return size if spec.resize is None else _scaled(size, spec.resize)
    return spec.resize[1], spec.resize[0]


def _resize(image: Image.Image, spec: Preprocess, resampling: Image.Resampling) -> Image.Image:
    """The image resized; of a very long one only what `centre` keeps of it."""
    size = _resized(image.size, spec)
    if size[0] * size[1] <= MAX_RESIZED:
        return image.resize(size, resampling)
    # The very pixels that a resize of all of it would have there, up to rounding. First across and then down, as Pillow
    # resizes: it rounds in between.
    starts = _margin(size[0] - spec.width, spec), _margin(size[1] - spec.height, spec)
    across = _kept(image.width, size[0], spec.width, starts[0])
    down = _kept(image.height, size[1], spec.height, starts[1])
    near = image.crop((across.first, down.first, across.last, down.last))
    near = near.resize((across.pixels, near.height), resampling, (across.left, 0, across.right, near.height))
    return near.resize((across.pixels, down.pixels), resampling, (0, down.left, near.width, down.right))


@dataclass(frozen=True)
class _Part:
    """What is kept of one side: the original's pixels from `first` to before `last`, and what they become.

    They become `pixels` pixels, made of what lies from `left` to `right`, counted from `first`: Pillow keeps these in
    float32, which is not exact far away.
    """

    first: int
    last: int
    pixels: int
    left: float
    right: float


def _margin(beyond: int, spec: Preprocess) -> int:
    """How many of the pixels that are too many lie before the crop."""
    return beyond // 2 if spec.crop == "floor" else round(beyond / 2)


def _kept(given: int, resized: int, wanted: int, start: int) -> _Part:
    """The middle of a side that is resized: `wanted` pixels of it from `start` on, or all of them."""
    if resized <= wanted:
        return _Part(0, given, resized, 0.0, float(given))
    scale = given / resized
    left, right = start * scale, (start + wanted) * scale
    beyond = FILTER_SUPPORT * max(scale, 1.0) + 1
    first, last = max(int(left - beyond), 0), min(int(right + beyond) + 1, given)
    return _Part(first, last, wanted, left - first, right - first)


def centre(image: Image.Image, spec: Preprocess) -> Image.Image:
    """Crop the centre; an image that is too small is first padded with black, rounded as torchvision does."""
    width, height = spec.width, spec.height
    across, down = max(width - image.width, 0), max(height - image.height, 0)
    if across or down:
        image = ImageOps.expand(image, (across // 2, down // 2, (across + 1) // 2, (down + 1) // 2))
    left, top = _margin(image.width - width, spec), _margin(image.height - height, spec)
    return image.crop((left, top, left + width, top + height))
