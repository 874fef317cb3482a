"""The LightningModules: one step through the encoders, one loss from the method, one optimiser from the recipe."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from training.data.batching import TrainingBatch, mix_seeds
from training.method import EmbeddedBatch, Method, Step
from training.networks.backbones import Frozen
from training.networks.side_information import Objective, Psi
from training.recipes import Recipe


class BaseTraining(lightning.LightningModule):
    """Base of all trainings: the optimiser from the recipe, and random numbers that are the same after a restart."""

    views = 1
    """How often each image is in a batch, see `training.data.batching.BatchDataset`."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    @property
    def frozen_models(self) -> dict[str, Frozen]:
        """The frozen models whose outputs go with each batch, by name."""
        return {}

    def needs_images(self, cached: Collection[str]) -> bool:
        """Whether a step needs images when the outputs of the named models are cached."""
        return True

    def step(self, drawn: TrainingBatch) -> Step:
        """The loss of one batch, and its parts."""
        raise NotImplementedError

    def training_step(self, drawn: TrainingBatch, _: int) -> Tensor:
        """The loss of one batch."""
        step = self.step(drawn)
        if self.trainer.loggers:
            self.log_dict({"loss": step.loss, **step.logging}, prog_bar=True, batch_size=len(drawn[1]))
        return step.loss

    def on_train_batch_start(self, batch: TrainingBatch, batch_idx: int) -> None:
        """Seed the step's random numbers (dropout) by its number, so that they are the same after a restart."""
        seed = mix_seeds(self.recipe.seed, self.trainer.global_step, self.global_rank)
        # torch.manual_seed notes a stack trace for GPUs that are not in use, and keeps it.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def progress(self) -> float:
        """Share of the training that is done, 0 to 1."""
        return self.trainer.global_step / max(int(self.trainer.estimated_stepping_batches), 1)

    def configure_optimizers(self) -> Any:
        """The recipe's optimiser over all trainable parameters, its rate set before every step."""
        learning = [p for p in self.parameters() if p.requires_grad]
        recipe, total = self.recipe, int(self.trainer.estimated_stepping_batches)
        warmup = recipe.scale_epoch(recipe.warmup_epochs, total)
        optimiser = _optimiser(recipe, learning)
        drops = [recipe.scale_epoch(epoch, total) for epoch in recipe.milestones]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: rate_share(step, warmup, total, drops))
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Training(BaseTraining):
    """Trains `backbone` by `method`; the frozen models only give outputs.

    Args:
        backbone: images -> raw embeddings; frozen, too, where the method does not train it.
        method: embeddings -> loss; an nn.Module.
        recipe: the optimiser and its schedule.
        old: the frozen old model, images -> raw embeddings.
        independent: the frozen independently trained new model, likewise.
        old_psi, psi: images -> the side-information that the old and the new version store, for an item edge.
    """

    def __init__(
        self,
        backbone: nn.Module,
        method: Method,
        recipe: Recipe,
        old: Frozen | None = None,
        independent: Frozen | None = None,
        old_psi: Frozen | None = None,
        psi: Frozen | None = None,
    ) -> None:
        super().__init__(recipe)
        self.backbone = backbone if method.trains_encoder else Frozen(backbone)
        self.method = method
        self.old, self.independent = old, independent
        self.old_psi, self.psi = old_psi, psi

    @property
    def frozen_models(self) -> dict[str, Frozen]:
        new = self.backbone if isinstance(self.backbone, Frozen) else None
        models = {
            "new": new,
            "old": self.old,
            "independent": self.independent,
            "old_psi": self.old_psi,
            "psi": self.psi,
        }
        return {name: model for name, model in models.items() if model is not None}

    def needs_images(self, cached: Collection[str]) -> bool:
        return self.method.trains_encoder or not self.frozen_models.keys() <= set(cached)

    def step(self, drawn: TrainingBatch) -> Step:
        """The method's loss."""
        image_BCHW, label_B, cached = drawn
        live = {name: model(image_BCHW).float() for name, model in self.frozen_models.items() if name not in cached}
        seen = {**cached, **live}
        batch = EmbeddedBatch(
            # Under mixed precision encoders give half floats; the rest is cheap in float32.
            new_BD=seen["new"] if "new" in seen else self.backbone(image_BCHW).float(),
            label_B=label_B,
            old_BN=seen.get("old"),
            independent_BM=seen.get("independent"),
            progress=self.progress(),
            old_side_BS=seen.get("old_psi"),
            side_BT=seen.get("psi"),
        )
        return self.method(batch)


class PsiTraining(BaseTraining):
    """Trains side-information by its own objective.

    Args:
        psi: its backbone trains.
        objective: images -> loss.
        recipe: from `training.networks.side_information.recipe_of_psi`.
    """

    def __init__(self, psi: Psi, objective: Objective, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.psi, self.objective = psi, objective
        self.views = objective.views

    def step(self, drawn: TrainingBatch) -> Step:
        """The objective's loss."""
        image_BCHW, label_B, _ = drawn
        return Step(self.objective(self.psi.backbone, image_BCHW, label_B))


def rate_share(step: int, warmup: int, total: int, drops: Sequence[int] = ()) -> float:
    """Share of the full rate at a step: a line up over `warmup` steps, then half a cosine down to 0 at `total`.

    With `drops` a tenth less each time one of these steps is reached, in place of the cosine.
    """
    if step < warmup:
        return (step + 1) / warmup
    if drops:
        return float(0.1 ** sum(step >= drop for drop in drops))
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(total - warmup, 1))))


def _optimiser(recipe: Recipe, learning: list[nn.Parameter]) -> torch.optim.Optimizer:
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(learning, recipe.rate, momentum=0.9, weight_decay=recipe.weight_decay)
    return torch.optim.Adam(learning, recipe.rate, weight_decay=recipe.weight_decay)
