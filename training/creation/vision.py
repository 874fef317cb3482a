"""Versions of image models: timm's and torchvision's by name, and any module of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import timm
import timm.data
import timm.models
import torch
import torchvision
from torch import Tensor, nn

from index.creation.preprocessing import from_timm
from index.errors import InvalidArgument, did_you_mean
from index.space import space_from_json
from index.version import Card, Preprocess
from index.version_folder.card import parse_preprocess
from index.version_folder.folder import sha256
from training.creation.entrances import PrepareImage, write_images
from training.networks.backbones import DOWNLOAD, timm_trunk

COSINE = {"kind": "cosine"}


@dataclass(frozen=True)
class Timm:
    """A timm model by name, without its classifier, prepared by its own data_config.

    Args:
        name: "resnet50", or with a tag: "vit_small_patch14_dinov2.lvd142m".
        weights: a file of them, with or without a classifier of any size; None: timm's cache, or its download.
        space: the `space` field of a card.
    """

    name: str
    weights: Path | None = None
    space: Mapping[str, Any] = field(default_factory=lambda: dict(COSINE))

    def write(self, folder: Path, name: str) -> Card:
        model = timm_trunk(self.name, 3, DOWNLOAD if self.weights is None else "")[0]
        if self.weights is not None:
            _load(model, self.weights, self._read(self.weights))
        config = timm.data.resolve_model_data_config(model)
        made = TorchModule(
            model,
            from_timm(config),
            self.space,
            f"timm {timm.__version__}",
            timm.data.create_transform(**config, is_training=False),
            {"timm": self.name, **_weights(self.weights)},
        )
        return made.write(folder, name)

    def _read(self, weights: Path) -> dict[str, Tensor]:
        """The arrays of a file, by the names that this release of timm gives them."""
        with _readable(weights):
            arrays: dict[str, Tensor] = timm.models.load_state_dict(str(weights), device="cpu", weights_only=True)
        classifiers = timm.models.get_pretrained_cfg(self.name).classifier or ()
        names = (classifiers,) if isinstance(classifiers, str) else classifiers
        return {key: x for key, x in arrays.items() if not any(key.startswith(f"{name}.") for name in names)}


@dataclass(frozen=True)
class Torchvision:
    """A torchvision model by name, without the last layer of its classifier, prepared as its default weights are.

    So inception_v3 and googlenet scale their input anew, whatever the weights.

    Args: see `Timm`; the weights' file holds a state_dict.
    """

    name: str
    weights: Path | None = None
    space: Mapping[str, Any] = field(default_factory=lambda: dict(COSINE))

    def write(self, folder: Path, name: str) -> Card:
        known = torchvision.models.list_models(module=torchvision.models)
        if self.name not in known:
            near = did_you_mean(self.name, known) or "; torchvision.models.list_models() lists them"
            raise InvalidArgument(f"torchvision has no image model {self.name!r}{near}", pointer="/torchvision")
        default = torchvision.models.get_model_weights(self.name).DEFAULT
        transform = default.transforms()
        if self.weights is None:
            with _readable(None):
                model = torchvision.models.get_model(self.name, weights=default)
            _without_classifier(model)
        else:
            model = torchvision.models.get_model(self.name)
            if hasattr(model, "transform_input"):  # torchvision sets it where it loads weights itself
                model.transform_input = True
            head = _without_classifier(model)
            with _readable(self.weights):
                arrays = torch.load(self.weights, map_location="cpu", weights_only=True)
                arrays = {key: x for key, x in arrays.items() if not key.startswith(f"{head}.")}
            _load(model, self.weights, arrays)
        made = TorchModule(
            model,
            _of_torchvision(transform),
            self.space,
            f"torchvision {torchvision.__version__}",
            transform,
            {"torchvision": self.name, **_weights(self.weights)},
        )
        return made.write(folder, name)


@dataclass(frozen=True)
class TorchModule:
    """Any module of torch that makes (N, D) of (N, C, H, W).

    Args:
        module: traced by torch.export, so what it does must not depend on the numbers it is given.
        preprocess: from an image to its input.
        space: the `space` field of a card. For `cosine` its output is brought to length 1.
        source: what the card calls the library.
        reference: how that prepares an image of Pillow's; None: as `preprocess` says.
        recipe: what the card keeps of where it comes from.
    """

    module: nn.Module
    preprocess: Preprocess
    space: Mapping[str, Any] = field(default_factory=lambda: dict(COSINE))
    source: str = f"torch {torch.__version__}"
    reference: PrepareImage | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, name: str) -> Card:
        space = space_from_json(dict(self.space))
        dim, parity = write_images(folder, self.module, self.preprocess, space, self.source, self.reference)
        return Card(
            name,
            dim,
            space.as_json(),
            self.preprocess,
            method=self.source.partition(" ")[0],
            recipe={"source": self.source, **self.recipe},
            metrics={"parity": {"images": parity.as_json()}},
        )


def _load(model: nn.Module, weights: Path, arrays: Mapping[str, Tensor]) -> None:
    """Load a file's arrays, all of them and no others."""
    with _readable(weights):
        model.load_state_dict(dict(arrays))


def _without_classifier(model: nn.Module) -> str:
    """Take away the last linear layer; return its name."""
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise InvalidArgument("the model does not end with a linear layer", pointer="/torchvision")
    parent, _, last = linear[-1].rpartition(".")
    setattr(model.get_submodule(parent), last, nn.Identity())
    return str(linear[-1])


def _of_torchvision(transform: Any) -> Preprocess:
    """The preprocess of an `ImageClassification` preset."""
    try:
        ((crop,), (resize,)) = transform.crop_size, transform.resize_size
        interpolation = transform.interpolation.value
    except (AttributeError, ValueError, TypeError) as error:
        raise InvalidArgument(f"{transform} is not a preprocessing of whole images", pointer="/torchvision") from error
    given = Preprocess(crop, crop, "RGB", resize, False, interpolation, tuple(transform.mean), tuple(transform.std))
    return parse_preprocess(given.as_json(), "preprocess", "")


def _weights(file: Path | None) -> dict[str, str]:
    return {} if file is None else {"weights": file.name, "sha256": sha256(file)}


@contextmanager
def _readable(file: Path | None) -> Iterator[None]:
    """Turn what reading weights raises into one sentence."""
    try:
        yield
    except Exception as error:  # the network, the hub, or whatever a wrong file leads torch to
        place = "the library's cache or download" if file is None else str(file)
        why = "no such file" if file is not None and not file.is_file() else shorten(str(error), 300)
        raise InvalidArgument(
            f"weights are not available from {place}: {why}; set --weights FILE",
            pointer="/weights",
        ) from error
