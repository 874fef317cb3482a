"""Versions that several files train against, and image sets. One thread: on tiny tensors a pool costs tenfold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from staging.inputs.recipes import quick, torchlib_read_once, train_weights, without_exporter
from training import export
from training import train as path
from training.data.checks import warn_once
from training.data.images import Arrays, Data, ImageSet
from training.sources import load_data

torch.set_num_threads(1)
_can_export = export.can_export


@cache
def _read(source: str) -> Data:
    return load_data(source, "", "refuse", None)


def _loaded(source: str, root: str, unreadable: str, stored: object) -> Data:
    plain = source.startswith("digits") and stored is None
    return _read(source) if plain else load_data(source, root, unreadable, stored)


@pytest.fixture(scope="module", autouse=True)
def _digits_are_read_once() -> Iterator[None]:
    """Reading and sizing them takes as long as training on them does; read for all files, patched for one at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, "load_data", _loaded)
        yield


@pytest.fixture(scope="session", autouse=True)
def _torchlib_is_read_once() -> Iterator[None]:
    with torchlib_read_once():
        yield


@pytest.fixture(autouse=True)
def _warnings_are_new() -> None:
    """Another test of this process may have caused the same one."""
    warn_once.cache_clear()


@pytest.fixture
def weights_only() -> Iterator[None]:
    """As where no ONNX exporter is installed."""
    with without_exporter():
        yield


@pytest.fixture(scope="session")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An old version of two epochs, with its ONNX model."""
    with pytest.MonkeyPatch.context() as patch:
        # The first file to want it may be one that trains without an exporter.
        patch.setattr(export, "can_export", _can_export)
        return path.train(quick("digits_v1"), tmp_path_factory.mktemp("shared") / "v1", progress=False)


@pytest.fixture(scope="session")
def independent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An independent new version of two epochs; its weights only."""
    return train_weights(quick("digits_independent"), tmp_path_factory.mktemp("shared") / "independent")


@pytest.fixture(scope="session")
def hyperbolic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An old version for HBCT; its weights only."""
    return train_weights(quick("digits_hyperbolic"), tmp_path_factory.mktemp("shared") / "hyperbolic")


@pytest.fixture(scope="session")
def image_set(make_image: Callable) -> Callable[[int, int, int], ImageSet]:
    """(images, classes, seed) -> small images of random classes."""

    def drawn(count: int, classes: int, seed: int) -> ImageSet:
        labels = np.random.default_rng(seed).integers(classes, size=count)
        pixels = [np.asarray(make_image(int(label), seed + n)) for n, label in enumerate(labels)]
        return ImageSet(Arrays(np.stack(pixels)), labels)

    return drawn
