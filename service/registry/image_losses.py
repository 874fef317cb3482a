"""Warnings about images of a request that lose much in a version's preprocessing, by cropping or scaling down."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from index.encoders.image import LEAST_SEEN, MOST_REDUCED, Loss, losses
from index.version import Preprocess

Size = tuple[int, int]

HOW = {
    Loss.UNSEEN: f"uses less than {LEAST_SEEN:.0%} of their area: the rest is cropped",
    Loss.REDUCED: f"reduces their sides by more than {MOST_REDUCED:g} times: details are lost",
}


class ImageLosses:
    """Collects the images of a request that lose much, each once per version and loss. Thread-safe."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, Loss], dict[str, Size]] = defaultdict(dict)

    def note(self, version: str, spec: Preprocess, pointer: str, size: Size) -> None:
        """Record the losses of the image at `pointer` of the request, of `size` (width, height), by a version."""
        for loss in losses(size, spec):
            self._lost[version, loss][pointer] = size

    def as_json(self) -> list[dict[str, Any]]:
        """One warning per version and loss."""
        return [_warning(version, loss, dict(sizes)) for (version, loss), sizes in list(self._lost.items())]


def _warning(version: str, loss: Loss, sizes: dict[str, Size]) -> dict[str, Any]:
    pointer, (width, height) = next(iter(sizes.items()))
    detail = f"version {version!r} {HOW[loss]} (the first is {width} x {height} pixels)"
    return {"code": loss.value, "version": version, "count": len(sizes), "pointer": pointer, "detail": detail}
