"""Warnings of images of a request that lose much as a version's input, by cropping or scaling down."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from index.image import LEAST_SEEN, MOST_REDUCED, Loss, losses
from index.version import Preprocess

Size = tuple[int, int]

HOW = {
    Loss.UNSEEN: f"sees less than {LEAST_SEEN:.0%} of their area: the rest is cropped",
    Loss.REDUCED: f"makes their sides more than {MOST_REDUCED:g} times smaller: details are lost",
}


class ImageLosses:
    """Collects the images of a request that lose much, each once by version and loss; any thread may add one."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, Loss], dict[str, Size]] = defaultdict(dict)

    def note(self, version: str, spec: Preprocess, pointer: str, size: Size) -> None:
        """Note an image at `pointer` of the request, (width, height), that becomes a version's input."""
        for loss in losses(size, spec):
            self._lost[version, loss][pointer] = size

    def as_json(self) -> list[dict[str, Any]]:
        """One warning for each version and loss."""
        return [_warning(version, loss, dict(sizes)) for (version, loss), sizes in list(self._lost.items())]


def _warning(version: str, loss: Loss, sizes: dict[str, Size]) -> dict[str, Any]:
    pointer, (width, height) = next(iter(sizes.items()))
    detail = f"version {version!r} {HOW[loss]} (the first is {width} x {height} pixels)"
    return {"code": loss.value, "version": version, "count": len(sizes), "pointer": pointer, "detail": detail}
