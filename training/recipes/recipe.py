"""`Recipe`: every setting of a training, and its JSON in a card."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from index.errors import InvalidArgument
from index.version import Preprocess

Option = str | float | int | bool
OMITTED_IF_EMPTY = {"old_embeddings", "milestones", "last_relu", "held_out", "patience", "side_crops"}
"""Fields that the first cards lack: left out where empty, so that those cards still equal their recipes."""


@dataclass(frozen=True)
class Recipe:
    """Every setting that a trained version depends on.

    Args:
        name: the recipe's name in `RECIPES`.
        summary: one line for `regraft train --help`.
        method: how it is made compatible: l2, lwf, bct, oca, fct, contrast, hot_refresh, advbct, hoc, bt2 or hbct
            (docs/methods.md); independent: with nothing.
        options: the method's own settings, which `regraft train RECIPE --save FILE.toml` explains.
        data: where images come from: folders, arrays, cifar100, digits_old or digits_new, see `training.sources`.
        root: the folder or file of `data`, where it has one.
        unreadable: "refuse" or "skip" an image that cannot be decoded, see `training.sources.load_data`.
        classes: train on the first so many classes only; None: all.
        class_share: of those, train on a random share, above 0 to 1.
        fraction: train on a random share of the images, above 0 to 1.
        split_seed: decides the shares; not `seed`, so that runs of several seeds train on the same images.
        preprocess: how an image becomes the encoder's input, in training's evaluation and in serving.
        augment: how training images are changed at random: none, shift, flip, crop_flip, resized_crop_flip,
            resized_crop_jitter, small_crop_flip or small_crop_jitter, see `training.data.transforms`.
        backbone: "timm/" and a timm model name; or, for images of so many pixels, small_cnn (8), quick_cnn_28,
            small_cnn_32, slim_resnet_64, resnet20_32 or resnet18_32; or vit_b16_enlarged.
        pretrained: start from timm's pretrained weights.
        weights: a file to read them from, in place of timm's download; or the folder of a version that has the same
            backbone, to go on from it.
        dim: dimension of the backbone's embedding.
        last_relu: cut its numbers off at 0, as the public models of FCT and BT2 do.
        head: of the base loss: softmax, norm_softmax, cosface, arcface or lorentz_mlr.
        label_smoothing: of the base loss, 0 to 1.
        space: "cosine", "l2" or "lorentz", how the exported embeddings compare.
        old: the version to be compatible with: its folder, or a recipe that is trained first. A folder without weights
            is asked by its encoder.onnx, once for each image.
        old_embeddings: an .npz of the old version's embeddings, where it embeds text or the like instead of images, see
            `training.stored_embeddings`.
        independent: the independently trained new model, where the method needs one; likewise.
        side: what is stored of an item beside its embedding, for the forward transform of a later version: none,
            simclr, autoencoder, alternate or alternate_mixup.
        side_dim: how many numbers of it; 0: as many as `dim`.
        side_bits: store their signs, one bit each.
        side_epochs: how long it is trained; 0: `epochs`.
        side_augment: what it is trained with; "": `augment`.
        side_temperature: of the contrast of side=simclr.
        side_crops: further views of an image that side=simclr compares, small parts of it; 0: two whole views.
        optimiser: "adam" or "sgd" (momentum 0.9).
        rate: the highest learning rate; it rises for `warmup_epochs`, then falls as a cosine.
        milestones: epochs after each of which the rate falls to a tenth, in place of the cosine; as 60,120,160.
        weight_decay: of the optimiser.
        epochs: times over all training images.
        warmup_epochs: of these, the first so many with a rising rate; not more than `epochs`. If only `epochs` is set,
            below it, it keeps its share of the training, rounded down.
        held_out: a share of each class's training images, 0 to 0.9, to measure on after each epoch instead; the best
            epoch's weights become the version, see `training.validation`.
        patience: end after so many epochs without a better one; 0: never. Needs `held_out`.
        batch_size: images in a step, over all processes.
        precision: "32-true", "bf16-mixed" or, on a GPU, "16-mixed"; geometry and large scales stay in float32.
        cache_old: make the old and the independent model's embeddings once, before training, from images as evaluation
            sees them; without augmentation they are what each step would make. Always so for one with another
            preprocess.
        workers: processes that decode and augment images; 0: none beside the training itself.
        threads: CPU threads of the training; 0: torch decides. One is fastest for tiny models, and makes what they
            become independent of the machine's number of cores.
        seed: decides the weights and the order; the same seed on the same machine gives the same version.
    """

    name: str
    summary: str = ""
    method: str = "independent"
    options: Mapping[str, Option] = field(default_factory=dict)
    data: str = "arrays"
    root: str = ""
    unreadable: str = "refuse"
    classes: int | None = None
    class_share: float = 1.0
    fraction: float = 1.0
    split_seed: int = 0
    preprocess: Preprocess = field(default_factory=lambda: Preprocess(224, 224, resize=256))
    augment: str = "none"
    backbone: str = "timm/resnet18"
    pretrained: bool = False
    weights: str = ""
    dim: int = 128
    last_relu: bool = False
    head: str = "softmax"
    label_smoothing: float = 0.0
    space: str = "cosine"
    old: str = ""
    old_embeddings: str = ""
    independent: str = ""
    side: str = "none"
    side_dim: int = 0
    side_bits: bool = False
    side_epochs: int = 0
    side_augment: str = ""
    side_temperature: float = 0.5
    side_crops: int = 0
    optimiser: str = "adam"
    rate: float = 1e-3
    milestones: tuple[int, ...] = ()
    weight_decay: float = 0.0
    epochs: int = 100
    warmup_epochs: int = 0
    held_out: float = 0.0
    patience: int = 0
    batch_size: int = 128
    precision: str = "32-true"
    cache_old: bool = False
    workers: int = 0
    threads: int = 0
    seed: int = 0

    def scale_epoch(self, epoch: int, total: int) -> int:
        """Where an epoch of this training is in one of `total` epochs or steps, rounded down."""
        return epoch * total // max(self.epochs, 1)

    def as_json(self) -> dict[str, Any]:
        """The `recipe` field of a card, all but the summary; `recipe_from_json` reads it."""
        settings = {name: value for name, value in vars(self).items() if value or name not in OMITTED_IF_EMPTY}
        del settings["summary"]
        milestones = {"milestones": list(self.milestones)} if self.milestones else {}
        return {**settings, **milestones, "options": dict(self.options), "preprocess": self.preprocess.as_json()}


def field_descriptions(described: object = Recipe) -> dict[str, str]:
    """Every field of a recipe -> its description in the docstring of `Recipe`; likewise a method's arguments."""
    arguments = inspect.cleandoc(described.__doc__ or "").partition("Args:\n")[2]
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def recipe_from_json(value: Mapping[str, Any]) -> Recipe:
    """Read the `recipe` field of a card.

    Raises:
        InvalidArgument: it was not written by this package.
    """
    try:
        spec: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value["preprocess"].items()}
        milestones = tuple(value.get("milestones", ()))
        return Recipe(**{**value, "milestones": milestones, "preprocess": Preprocess(**spec)})
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"the card's recipe was not written by this release: {error}") from error
