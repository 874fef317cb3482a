"""index.encoders.image: untrusted bytes, and the exact evaluation transform."""

from __future__ import annotations

import io
import resource
import struct
import warnings
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from index.encoders.image import (
    FORMATS,
    MAX_SCANS,
    MIN_SIDE,
    Loss,
    decode_image,
    losses,
    preprocess,
    preprocess_batch,
    reduction,
    seen_share,
)
from index.errors import InvalidImage
from index.version import Preprocess

SaveImage = Callable[..., bytes]


def photo(width: int = 60, height: int = 40, mode: str = "RGB", seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces its size and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_legal_format_is_decoded(image_bytes: SaveImage, kind: str) -> None:
    image = decode_image(image_bytes(photo(), kind))
    assert image.size == (60, 40)
    lossless = kind in {"PNG", "BMP", "TIFF"}
    off = np.abs(np.asarray(image.convert("RGB"), int) - np.asarray(photo(), int))
    assert off.max() == 0 if lossless else off.mean() < 60


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_truncated_file_is_refused(image_bytes: SaveImage, kind: str, share: float) -> None:
    data = image_bytes(photo(200, 150), kind)
    with pytest.raises(InvalidImage):
        decode_image(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\0", "not a readable image; legal formats: JPEG, PNG, WEBP, BMP, GIF, TIFF"),
        (b"hello, this is text" * 100, "not a readable image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable image"),
        (b"%PDF-1.7\n", "not a readable image"),
        (b"\xff\xd8\xff\xe0", "not a readable image"),
        (b"\x89PNG\r\n\x1a\n", "not a readable image"),
    ],
)
def test_bytes_that_are_no_image_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidImage, match=message):
        decode_image(data)


@pytest.mark.parametrize("kind", ["ICO", "PPM", "TGA", "PCX", "EPS"])
def test_other_formats_that_pillow_knows_are_refused(image_bytes: SaveImage, kind: str) -> None:
    data = image_bytes(photo(), kind)
    with pytest.raises(InvalidImage, match="legal formats"):
        decode_image(data)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 100), (100, 3)])
def test_a_side_below_the_minimum_is_refused(image_bytes: SaveImage, width: int, height: int) -> None:
    with pytest.raises(InvalidImage, match=rf"{width} x {height} pixels; each side must have at least {MIN_SIDE}"):
        decode_image(image_bytes(photo(width, height)))


def test_the_smallest_legal_image_is_decoded(image_bytes: SaveImage) -> None:
    assert decode_image(image_bytes(photo(MIN_SIDE, MIN_SIDE))).size == (MIN_SIDE, MIN_SIDE)


@pytest.mark.parametrize("side", [8000, 12_000, 30_000, 2**31 - 1])
def test_a_decompression_bomb_is_refused_by_its_header(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Image.Image] = []
    monkeypatch.setattr(Image.Image, "load", loaded.append)
    with pytest.raises(InvalidImage, match="at most 50000000"):
        decode_image(png_header(side, side))
    assert not loaded


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_refused_also_where_warnings_are_no_errors() -> None:
    with pytest.raises(InvalidImage, match="at most 50000000"):
        decode_image(png_header(12_000, 12_000))


def test_the_pixel_limit_is_exact(image_bytes: SaveImage) -> None:
    data = image_bytes(photo(10, 10))
    assert decode_image(data, max_pixels=100).size == (10, 10)
    with pytest.raises(InvalidImage, match="10 x 10 pixels; at most 99"):
        decode_image(data, max_pixels=99)


SCAN = b"\xff\xda"


def with_scans(image: bytes, more: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    begin = image.rindex(SCAN)
    return image[:-2] + image[begin:-2] * more + image[-2:]


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded(
    image_bytes: SaveImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = image_bytes(photo(), "JPEG", progressive=True)
    legal = MAX_SCANS - data.count(SCAN)
    assert decode_image(with_scans(data, legal)).size == (60, 40)

    loaded: list[Image.Image] = []
    monkeypatch.setattr(Image.Image, "load", loaded.append)
    with pytest.raises(InvalidImage, match="more than 100 scans"):
        decode_image(with_scans(data, legal + 1))
    assert not loaded


def test_a_marker_without_a_length_hides_no_scans(image_bytes: SaveImage) -> None:
    data = with_scans(image_bytes(photo(), "JPEG", progressive=True), MAX_SCANS)
    begin = data.index(SCAN, data.index(SCAN) + 1)  # in the first scan, where decoders search for the next marker
    hidden = data[:begin] + b"\xff\x05\xff\xff" + data[begin:]

    with pytest.raises(InvalidImage, match="more than 100 scans"):
        decode_image(hidden)


def test_a_bmp_with_run_lengths_is_refused_before_it_is_decoded(image_bytes: SaveImage) -> None:
    """Of 8 bits (compression 1): one run a line, then the end of the line."""
    data = bytearray(image_bytes(Image.new("L", (60, 40)), "BMP"))
    begin = int.from_bytes(data[10:14], "little")
    data[30:34] = (1).to_bytes(4, "little")
    runs = bytes([60, 7, 0, 0]) * 40 + bytes([0, 1])
    with Image.open(io.BytesIO(data[:begin] + runs)) as image:  # Pillow reads it
        assert image.getextrema() == (7, 7)

    with pytest.raises(InvalidImage, match="run-length encoding"):
        decode_image(bytes(data[:begin] + runs))


@pytest.mark.parametrize("progressive", [False, True])
def test_scans_beside_the_image_do_not_count(image_bytes: SaveImage, progressive: bool) -> None:
    data = image_bytes(photo(), "JPEG", progressive=progressive)
    comment = b"\xff\xfe" + (2 + 400).to_bytes(2) + SCAN * 200

    assert decode_image(data[:2] + comment + data[2:] + SCAN * 200).size == (60, 40)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright(image_bytes: SaveImage, kind: str, orientation: int) -> None:
    """The stored pixels of a sideways camera; upright, the bright quarter is at the top left."""
    upright = np.zeros((40, 60), np.uint8)
    upright[:20, :30] = 255
    turns: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        1: lambda a: a,
        2: np.fliplr,
        3: lambda a: np.rot90(a, 2),
        4: np.flipud,
        5: np.transpose,
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a.T, 2),
        8: lambda a: np.rot90(a, 3),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(turns[orientation](upright))).convert("RGB")
    image = decode_image(image_bytes(stored, kind, exif=exif))
    off = np.abs(np.asarray(image.convert("L"), int) - upright)
    assert image.size == (60, 40)
    assert off.mean() < 10


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage!", b"Exif\0\0II*\0", b"Exif\0\0" + bytes(50)])
def test_a_whole_picture_with_unreadable_exif_is_decoded(image_bytes: SaveImage, kind: str, exif: bytes) -> None:
    assert decode_image(image_bytes(photo(), kind, exif=exif)).size == (60, 40)


def test_one_broken_field_of_exif_hides_no_orientation(image_bytes: SaveImage) -> None:
    fields = struct.pack("<HHII", 0x0100, 2, 1, ord("x")) + struct.pack("<HHII", 0x0112, 3, 1, 6)  # a width in letters
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + fields + bytes(4)
    assert decode_image(image_bytes(photo(), exif=exif)).size == (40, 60)


def test_sixteen_bit_grey_keeps_its_shades(image_bytes: SaveImage) -> None:
    grey = np.linspace(0, 65_535, 64).astype(np.uint16).reshape(8, 8)
    image = decode_image(image_bytes(Image.fromarray(grey)))
    np.testing.assert_array_equal(np.asarray(image), grey >> 8)


def grey_tiff(values: np.ndarray, bits: int, photometric: int) -> bytes:
    """An uncompressed grey TIFF of 12 or 16 bits a pixel, which Pillow reads and does not write."""
    height, width = values.shape
    pixels = values.astype("<u2").tobytes()
    if bits == 12:  # two pixels in three bytes, the higher bits first
        pixels = bytes.fromhex("".join(f"{value:03x}" for value in values.ravel()))
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height, 279: len(pixels)}
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + struct.pack("<H", len(tags)) + directory + bytes(4)


@pytest.mark.parametrize(("bits", "photometric"), [(12, 1), (16, 1), (16, 0)])
def test_grey_tiffs_keep_their_shades_and_their_white(bits: int, photometric: int) -> None:
    shades = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    values = (shades if photometric else 255 - shades).astype(int) << (bits - 8)
    np.testing.assert_array_equal(np.asarray(decode_image(grey_tiff(values, bits, photometric))), shades)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_pixel_mode_reaches_the_encoder(image_bytes: SaveImage, mode: str) -> None:
    wide = Image.fromarray(np.asarray(photo(8, 8, "L"), np.uint16) * 257)
    data = image_bytes(wide if mode == "I;16" else photo(8, 8).convert(mode), "TIFF")
    for wanted, channels in Preprocess.MODES.items():
        pixels = preprocess(decode_image(data), Preprocess(8, 8, wanted, mean=(0.0,) * channels, std=(1.0,) * channels))
        assert pixels.shape == (channels, 8, 8)
        assert pixels.min() >= 0
        assert pixels.max() <= 1
        assert pixels.std() > 0.1


@pytest.mark.parametrize("mode", ["I", "F"])
def test_grey_without_a_white_is_refused(image_bytes: SaveImage, mode: str) -> None:
    with pytest.raises(InvalidImage, match="8 or 16 bits"):
        decode_image(image_bytes(photo(8, 8, "L").convert(mode), "TIFF"))


def test_a_palette_with_transparency_is_decoded_without_a_warning(image_bytes: SaveImage) -> None:
    data = image_bytes(photo(8, 8).quantize(4), transparency=bytes([0, 128, 255, 255]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_image(data).convert("RGB").size == (8, 8)


def test_an_animation_gives_its_first_frame(image_bytes: SaveImage) -> None:
    first, second = Image.new("L", (8, 8), 10), Image.new("L", (8, 8), 200)
    data = image_bytes(first, "GIF", save_all=True, append_images=[second])
    assert np.asarray(decode_image(data).convert("L")).max() < 100


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(FORMATS),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=8),
)
@pytest.mark.filterwarnings("ignore")  # Pillow warns about odd metadata; the service must survive that too
def test_flipped_bytes_never_raise_anything_else(kind: str, flips: list[tuple[int, int]]) -> None:
    stream = io.BytesIO()
    photo(20, 20).save(stream, kind)
    data = bytearray(stream.getvalue())
    for place, value in flips:
        data[place % len(data)] ^= value
    try:
        image = decode_image(bytes(data), max_pixels=100_000)
    except InvalidImage:
        return
    assert min(image.size) >= MIN_SIDE
    assert image.width * image.height <= 100_000


def test_preprocessing_by_hand_is_centre_crop_scale_and_normalise() -> None:
    image = Image.fromarray(np.arange(36, dtype=np.uint8).reshape(6, 6))
    pixels = preprocess(image, Preprocess(2, 4, "L", mean=(0.5,), std=(0.25,)))
    expected = (np.array([[13, 14, 15, 16], [19, 20, 21, 22]]) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(pixels, expected[None], atol=1e-6)
    assert pixels.dtype == np.float32
    assert pixels.flags["C_CONTIGUOUS"]


def test_an_image_smaller_than_the_crop_is_padded_with_black() -> None:
    pixels = preprocess(Image.new("L", (2, 2), 255), Preprocess(4, 5, "L", mean=(0.0,), std=(1.0,)))
    expected = np.zeros((1, 4, 5))
    expected[0, 1:3, 1:3] = 1
    np.testing.assert_array_equal(pixels, expected)


def test_colours_have_their_own_mean_and_deviation() -> None:
    spec = Preprocess(4, 4, "RGB", stretch=True, mean=(0.0, 0.5, 1.0), std=(1.0, 2.0, 4.0))
    pixels = preprocess(Image.new("RGB", (9, 7), (255, 255, 0)), spec)
    np.testing.assert_allclose(pixels[:, 0, 0], [1, 0.25, -0.25])


def test_a_batch_is_its_images_one_by_one() -> None:
    spec = Preprocess(8, 8, "RGB", resize=9)
    images = [photo(20 + i, 15, seed=i) for i in range(3)]
    np.testing.assert_array_equal(preprocess_batch(images, spec), np.stack([preprocess(i, spec) for i in images]))
    assert preprocess_batch([], spec).shape == (0, 3, 8, 8)


CENTRE = Preprocess(8, 8)
USUAL = Preprocess(224, 224, resize=256)
SMALL = Preprocess(64, 64, resize=64)
WHOLE = Preprocess(64, 32, stretch=True)


@pytest.mark.parametrize(
    ("spec", "size", "share", "factor"),
    [
        (CENTRE, (8, 8), 1, 1),
        (CENTRE, (4, 16), 1 / 2, 1),  # the padding around it is not the picture's
        (CENTRE, (640, 480), 64 / (640 * 480), 1),
        (SMALL, (64, 64), 1, 1),
        (SMALL, (128, 64), 1 / 2, 1),
        (SMALL, (32, 32), 1, 1 / 2),
        (SMALL, (3000, 4000), 64 / 85, 3000 / 64),
        (WHOLE, (640, 640), 1, 20),
    ],
)
def test_how_much_of_a_picture_is_seen_and_how_much_smaller_it_is(spec, size, share, factor):
    assert (seen_share(size, spec), reduction(size, spec)) == pytest.approx((share, factor))


@pytest.mark.parametrize(
    ("spec", "size", "lost"),
    [
        (CENTRE, (16, 16), []),
        (CENTRE, (17, 16), [Loss.UNSEEN]),
        (SMALL, (1024, 1024), []),
        (SMALL, (1025, 1025), [Loss.REDUCED]),
        (SMALL, (256, 64), []),
        (SMALL, (64, 260), [Loss.UNSEEN]),
        (SMALL, (5000, 1100), [Loss.UNSEEN, Loss.REDUCED]),
        (USUAL, (4000, 3000), []),  # an ordinary photo, the ordinary way
        (WHOLE, (2000, 20), [Loss.REDUCED]),
    ],
)
def test_a_picture_much_larger_than_what_is_read_loses_something_that_is_named(spec, size, lost):
    assert losses(size, spec) == lost


@given(side=st.integers(4, 300), longer=st.integers(0, 300), upright=st.booleans())
def test_what_is_said_to_be_seen_is_what_reaches_the_encoder(side: int, longer: int, upright: bool) -> None:
    size = (side, side + longer) if upright else (side + longer, side)
    white = Image.new("L", size, 255)

    seen = preprocess(white, Preprocess(32, 32, mode="L", mean=(0.0,), std=(1.0,))).sum()

    assert seen_share(size, Preprocess(32, 32)) == pytest.approx(seen / (size[0] * size[1]))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_colours_that_pillow_converts_to_one_mode_only_reach_every_encoder(mode: str, image_bytes: SaveImage) -> None:
    spec = Preprocess(8, 8, mode, resize=8, mean=(0.0,) * len(mode), std=(1.0,) * len(mode))
    faint = image_bytes(Image.new("LA", (16, 16), (64, 128)), "TIFF")
    # Tag 338: 2, alpha beside the grey, becomes 1, grey multiplied by it.
    multiplied = faint.replace(struct.pack("<HHII", 338, 3, 1, 2), struct.pack("<HHII", 338, 3, 1, 1))
    lab = image_bytes(Image.merge("LAB", photo().split()), "TIFF")

    assert preprocess(decode_image(multiplied), spec) == pytest.approx(0.5, abs=0.01)
    assert np.ptp(preprocess(decode_image(lab), spec)) > 0.1


@pytest.mark.parametrize("size", [(500_000, 4), (4, 500_000)])
@pytest.mark.parametrize("resize", [224, 4096])
def test_a_very_long_image_takes_no_more_memory_than_it_has(size: tuple[int, int], resize: int) -> None:
    image = Image.new("RGB", size)  # resized as a whole: gigabytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    preprocess(image, Preprocess(224, 224, resize=resize))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB
