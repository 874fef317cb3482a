"""Held-out training images, measured after every epoch: the best weights are kept, and a training can stop early.

The measure is CMC-1 among the held-out images, each leaving itself out: of the new version by itself and, where it has
an edge, of its queries among the old version's items; the mean of both.
"""

from __future__ import annotations

from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor

from index.errors import InvalidArgument
from index.space import Vectors
from index.version import EdgeKind
from training.data.images import Data, ImageSet, batches
from training.divergence import check_finite
from training.measurement import HELD_OUT_PREFIX, apply_edge, compare, run_over
from training.module import Training
from training.trained import OUTPUTS


def hold_out(images: ImageSet, share: float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Images to train on, and a random share of each class to measure on, two at least.

    Two of each class at least stay to train on, so none is held out of less than four.

    Raises:
        InvalidArgument: fewer than two classes have four; with one, every answer would be right.
    """
    generator = np.random.default_rng(seed)
    held = np.zeros(len(images), bool)
    for label in np.unique(images.labels):
        rows = generator.permutation(np.flatnonzero(images.labels == label))
        wanted = min(max(2, round(share * len(rows))), len(rows) - 2)
        held[rows[: wanted if len(rows) >= 4 else 0]] = True
    if (classes := len(np.unique(images.labels[held]))) < 2:
        found = "only one class has" if classes else "no class has"
        raise InvalidArgument(
            f"no training images can be held out, which requires two classes of four images: {found} as many",
            pointer="/held_out",
        )
    return images.take(np.flatnonzero(~held)), images.take(np.flatnonzero(held))


class Validation(lightning.Callback):
    """Measures after each epoch, and remembers the best one's weights.

    Args:
        images: held out of the training.
        patience: end the training after so many epochs without a better one; 0: never.
        old_space: the old version's space.
    """

    def __init__(self, images: ImageSet, patience: int, old_space: str) -> None:
        self.data = Data(images, images, images, same=True)
        self.patience, self.old_space = patience, old_space
        self.best: dict[str, Any] = {"value": -1.0, "epoch": -1, "weights": {}}
        self.old: tuple[Vectors | None, Vectors | None] | None = None

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        assert isinstance(pl_module, Training)
        values = self.measure_pairs(pl_module)
        if trainer.loggers:
            pl_module.log_dict({f"{HELD_OUT_PREFIX}{pair}": value for pair, value in values.items()})
        value = float(trainer.strategy.broadcast(sum(values.values()) / len(values)))
        if value > self.best["value"]:
            self.best = {"value": value, "epoch": trainer.current_epoch, "weights": _weights(pl_module)}
        elif self.is_over(trainer.current_epoch):
            trainer.should_stop = True

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        # A checkpoint may be of the epoch that ended the training.
        trainer.should_stop = self.is_over(trainer.current_epoch - 1)

    def is_over(self, epoch: int) -> bool:
        """Whether the best epoch is `patience` or more epochs back, so that the training ends with this one."""
        return 0 < self.patience <= epoch - int(self.best["epoch"])

    def measure_pairs(self, module: Training) -> dict[str, float]:
        """CMC-1 by pair: new/new and, with an edge, new/old."""
        images, recipe, method = self.data.query, module.recipe, module.method
        if self.old is None:
            self.old = self.embed_by_old(module)
        new_SD = _embed(module, images)
        check_finite(new_SD)
        values = {"new/new": compare(new_SD, new_SD, self.data, recipe.space).cmc(1)}
        old_SN, side_SS = self.old
        if old_SN is not None and method.edge_kind is not None:
            was_training = module.training
            module.eval()
            pair = apply_edge(method.edge_kind, method.edge, recipe.space, new_SD, old_SN, side_SS)
            module.train(was_training)
            space = recipe.space if method.edge_kind is EdgeKind.FORWARD else self.old_space
            values["new/old"] = compare(*pair, self.data, space).cmc(1)
        return values

    def embed_by_old(self, module: Training) -> tuple[Vectors | None, Vectors | None]:
        """The old version's embeddings and side-information of the held-out images."""
        images, spec, device = self.data.query, module.recipe.preprocess, module.device
        stored: list[Vectors | None] = []
        for model, ready in ((module.old, OUTPUTS[self.old_space]), (module.old_psi, torch.nn.Identity())):
            made = None if model is None else ready(run_over(images, model, model.preprocess or spec)).numpy()
            if model is not None:
                model.to(device)
            stored.append(made)
        return (images.stored if images.stored is not None else stored[0]), stored[1]

    def restore(self, module: torch.nn.Module) -> None:
        """Give the module the weights of the best epoch."""
        if self.best["weights"]:
            module.load_state_dict(self.best["weights"], strict=False)

    def told(self) -> str:
        """Which epoch's weights became the version, and what they were chosen by."""
        return f"epoch {self.best['epoch'] + 1} was the best: CMC-1 {self.best['value']:.3f} on the held-out images"

    def state_dict(self) -> dict[str, Any]:
        return self.best

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict


def _weights(module: Training) -> dict[str, Tensor]:
    """The weights of the backbone and the method, on the CPU."""
    prefixes = ("backbone.", "method.")
    return {name: x.detach().cpu().clone() for name, x in module.state_dict().items() if name.startswith(prefixes)}


@torch.no_grad()
def _embed(module: Training, images: ImageSet) -> Vectors:
    """(S, D) embeddings by the module with its current weights, ready to compare."""
    was_training, ready = module.training, OUTPUTS[module.recipe.space]
    module.eval()
    made = [
        ready(module.method.transform(module.backbone(image_BCHW.to(module.device)).float())).cpu()
        for image_BCHW, _ in batches(images, module.recipe.preprocess)
    ]
    module.train(was_training)
    return torch.cat(made).numpy()
