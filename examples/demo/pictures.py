"""The handwritten digits as files: items, queries, and the images that are added and deleted during the demo."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from regraft import ImageItem
from training.data.digits import Digits, load_digits_split

COMING_AND_GOING = 200


@dataclass(frozen=True)
class Pictures:
    """Permanent items, their digits by id, queries (never items) with their digits, and temporary images."""

    items: Sequence[ImageItem]
    item_digits: Mapping[str, int]
    queries: Sequence[bytes]
    query_digits: NDArray[np.int64]
    visitors: Sequence[ImageItem]


def load_pictures(*, items: int | None = None, queries: int | None = None) -> Pictures:
    """Load the fixed split; `items` and `queries`: only this many of each."""
    split = load_digits_split()
    stored = _as_items(split.gallery, "digit")[:items]
    return Pictures(
        items=stored,
        item_digits={item.id: (item.metadata or {})["digit"] for item in stored},
        queries=[_png(image) for image in split.query.images[:queries]],
        query_digits=split.query.labels[:queries],
        visitors=_as_items(split.new_train, "visitor")[:COMING_AND_GOING],
    )


def _as_items(part: Digits, prefix: str) -> list[ImageItem]:
    pairs = zip(part.images, part.labels, strict=True)
    return [ImageItem(f"{prefix}-{n:04}", _png(image), {"digit": int(digit)}) for n, (image, digit) in enumerate(pairs)]


def _png(image: NDArray[np.uint8]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()
