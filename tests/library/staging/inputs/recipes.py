"""Short trainings on the digits, a second or two each, most of it for the export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch._export import utils as exporting
from torch.onnx._internal.exporter._registration import ONNXRegistry

from training import export
from training.recipes import Recipe, find_recipe
from training.train import train


def quick(name: str, **changes: Any) -> Recipe:
    """A recipe reduced to two epochs of large batches."""
    short: dict[str, Any] = {"epochs": 2, "side_epochs": 1, "warmup_epochs": 0, "batch_size": 256}
    return replace(find_recipe(name), **{**short, **changes})


@contextmanager
def without_exporter() -> Iterator[None]:
    """Act as if no ONNX exporter were installed, as the export takes most of the time of so short a training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "can_export", lambda: False)
        yield


_torchlib = cache(ONNXRegistry.from_torchlib)
_decompositions = cache(exporting._materialize_cpp_cia_ops)


@contextmanager
def torchlib_read_once() -> Iterator[None]:
    """Cache torchlib's operators, which each export reads again: two thirds of its time for a small module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(_torchlib))
        patch.setattr(exporting, "_materialize_cpp_cia_ops", _decompositions)
        yield


def train_weights(recipe: Recipe, out: Path) -> Path:
    """Train a version with weights and without an ONNX model."""
    with without_exporter():
        return train(recipe, out, progress=False)
