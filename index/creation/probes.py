"""Test inputs for a created encoder, and the comparison with its source model (`compare`).

Images of odd sizes, modes and EXIF orientations; long and short texts in many scripts. Always the same.

Shape suffixes: N inputs, D dimension, C channels, H height, W width.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from index.encoders.image import Pixels
from index.errors import RegraftError
from index.space import Vectors
from index.version import PROBE, TEXT_PROBE

PROBES = 100
SIZES = (
    (224, 224),
    (300, 201),
    (167, 250),
    (97, 61),
    (4, 4),
    (5, 90),
    (301, 7),
    (400, 65),
    (225, 224),
    (31, 33),
    (256, 256),
)
"""(width, height); their number is coprime to those of modes and orientations, so that 100 files cover all pairs."""
MODES = (("RGB", "JPEG"), ("L", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("LA", "PNG"), ("CMYK", "JPEG"), ("1", "PNG"))
TURNS = 8
EXIF_ORIENTATION = 0x0112
LIMIT = 1e-3
"""Largest legal difference from the source, relative to the largest number of an embedding."""

ALIKE = 1e-6
"""Difference of all embeddings, relative to the largest number, that is nothing but rounding."""

SENTENCES = (
    "a photo of a cat",
    "A PHOTO OF A CAT!",
    "x",
    "42",
    "  spaces   around,\tand a tab\nand a line ",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Ça c'est déjà vu à l'été naïf",
    "быстрая коричневая лиса",
    "敏捷的棕色狐狸跳过懒狗",
    "素早い茶色の狐",
    "빠른 갈색 여우",
    "الثعلب البني السريع",
    "השועל החום המהיר",
    "तेज़ भूरी लोमड़ी",
    "สุนัขจิ้งจอกสีน้ำตาล",
    "γρήγορη καφέ αλεπού",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🦊",
    "e\u0301 is e with a combining accent; \u200bzero width\u200b",
    "https://example.org/a?b=c&d=%20#e",
    "def f(x): return x ** 2  # code",
    "<s>[CLS] special [SEP]</s> tokens <pad> as text",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)
LONG = 9_000
"""Characters of the longest texts, beyond the token limit of any version."""


class ParityError(RegraftError):
    """The exported encoder differs from the model that it was made of."""

    code = "parity"


@dataclass(frozen=True)
class Parity:
    """The difference between a created encoder and its source, end to end over `inputs` inputs."""

    source: str
    inputs: int
    largest_difference: float
    least_cosine: float

    def as_json(self) -> dict[str, Any]:
        """The entry in a card's `metrics`."""
        return asdict(self)


def compare(made_ND: Vectors, source_ND: Vectors, source: str, what: str, limit: float = LIMIT) -> Parity:
    """Compare the outputs of a created encoder and its source for the same inputs.

    Args:
        made_ND: embeddings of the created encoder.
        source_ND: embeddings of the source.
        source: name of the source, for the card.
        what: name of the file, for the message.
        limit: largest legal difference, relative to the largest number of the source.

    Raises:
        ParityError: the difference is larger, or the source embeds all inputs alike.
    """
    if float(np.ptp(source_ND, axis=0).max()) <= ALIKE * float(np.abs(source_ND).max()):
        raise ParityError(f"{source} returns the same embedding for all {len(source_ND)} inputs")
    off_N = np.abs(made_ND - source_ND).max(axis=1)
    off = float(off_N.max())
    scale = float(np.abs(source_ND).max())
    lengths_N = np.linalg.norm(made_ND, axis=1) * np.linalg.norm(source_ND, axis=1)
    cosine_N = (made_ND * source_ND).sum(axis=1) / np.maximum(lengths_N, np.finfo(np.float32).tiny)
    if not off <= limit * scale:
        raise ParityError(
            f"{what} differs from {source} by {off:.2g} on input {int(off_N.argmax())} of {len(made_ND)}; "
            f"at most {limit * scale:.2g} is legal"
        )
    return Parity(source, len(made_ND), float(f"{off:.3g}"), float(f"{cosine_N.min():.7f}"))


@functools.cache
def probe_files() -> tuple[bytes, ...]:
    """`PROBES` image files of many sizes, modes and EXIF orientations."""
    return tuple(_file(number) for number in range(PROBES))


def probe_texts() -> list[str]:
    """`PROBES` texts of 1 to `LONG` characters."""
    repeated = [(text + " ") * times for times in (1, 7, 60) for text in SENTENCES]
    pairs = [f"{one} {other}" for one, other in zip(SENTENCES, SENTENCES[3:] + SENTENCES[:3], strict=True)]
    letters = [chr(code) * 3 for code in range(ord("a"), ord("a") + PROBES)]
    return [text[:LONG] for text in (*repeated, *pairs, *letters)][:PROBES]


def write_image_probe(folder: Path, image_1CHW: Pixels, embedding_1D: Vectors) -> None:
    """Write probe.npz."""
    np.savez(folder / PROBE, image=image_1CHW, embedding=embedding_1D)


def write_text_probe(folder: Path, text: str, embedding_D: Sequence[float]) -> None:
    """Write text/probe.json."""
    (folder / TEXT_PROBE).write_text(json.dumps({"text": text, "embedding": [float(x) for x in embedding_D]}) + "\n")


def _file(number: int) -> bytes:
    (mode, form), size = MODES[number % len(MODES)], SIZES[number % len(SIZES)]
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = number % TURNS + 1
    stream = io.BytesIO()
    _picture(number, size).convert(mode).save(stream, form, exif=exif)
    return stream.getvalue()


def _picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """An image like a photo: few large shapes, and fine noise."""
    rng = np.random.default_rng(seed)
    shapes = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = rng.normal(scale=12, size=(size[1], size[0], 3))
    return Image.fromarray((np.asarray(shapes) + noise).clip(0, 255).astype(np.uint8))
