"""AdvBCT (Pan 2023, arXiv 2305.02610): adversarial alignment, and an elastic boundary around each old class centre.

Decided where the source is silent, as in its public code: discriminator of one hidden layer of 100; the strength of the
reversed gradient rises as 2 / (1 + exp(-10 p)) - 1 over training (p from 0 to 1) while the adversarial loss fades as
1 - p; a class's radius is the largest distance of an old embedding from the centre that is no outlier, both of unit
length before the mean; the boundary moves from there towards `threshold` by a share that is learned for each class.
All classes of the new data with two images or more have a boundary, and its loss weighs 10: at 1 the boundary acts too
weakly on digits (three training seeds, old/old 82.1 % CMC-1): new/old 70.4 (sd 7.3); at 10 it is 81 (sd below 2), old
classes alone 61.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from training.losses.gather import gather_batch
from training.losses.losses import boundary_loss, discriminator_loss, reverse_gradient
from training.method import EmbeddedBatch, MethodContext, Step
from training.methods.compatible import Compatible


class AdvBct(Compatible):
    """Base loss + weight * boundary loss + (1 - progress) * adversarial loss.

    Args:
        context: see `MethodContext`.
        weight: of the boundary loss.
        adversarial_weight: of the adversarial loss at the start.
        threshold: the radius that every boundary is drawn towards, as a distance of unit vectors.
        over: whether `all` classes of two images or more have a boundary, or `old` ones.
        hidden: width of the discriminator.
    """

    def __init__(
        self,
        context: MethodContext,
        *,
        weight: float = 10.0,
        adversarial_weight: float = 1.0,
        threshold: float = 0.5,
        over: str = "all",
        hidden: int = 100,
    ) -> None:
        super().__init__(context, "advbct", weight)
        self.check_over(over)
        self.over = over
        old = context.require_old("advbct")
        self.discriminator = nn.Sequential(
            nn.Linear(old.dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )
        self.elastic_C = nn.Parameter(torch.empty(context.classes).uniform_(-1, 1))
        self.adversarial_weight, self.threshold = adversarial_weight, threshold
        self.register_buffer("centre_CN", old.centre_CN)
        self.register_buffer("radius_C", old.radius_C)

    def forward(self, batch: EmbeddedBatch) -> Step:
        """Compatible's base and boundary losses, and the discriminator's."""
        step, adversarial = super().forward(batch), self.adversarial_loss(batch)
        faded = self.adversarial_weight * (1 - batch.progress) * adversarial
        return Step(step.loss + faded, {**step.logging, "adversarial": adversarial})

    def adversarial_loss(self, batch: EmbeddedBatch) -> Tensor:
        """The discriminator's loss; its gradient is reversed for the encoder, which makes new embeddings look old."""
        new_BN, old_BN = self.pair(batch)
        strength = 2 / (1 + math.exp(-10 * batch.progress)) - 1
        new_B, old_B = self.discriminator(reverse_gradient(new_BN, strength)), self.discriminator(old_BN)
        return discriminator_loss(new_B[:, 0], old_B[:, 0])

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """Mean distance of new embeddings beyond the elastic boundary of their class."""
        batch = gather_batch(batch)
        radius_B = self.radius()[batch.label_B]
        if self.over == "old":
            radius_B = torch.where(self.known(batch), radius_B, torch.inf)
        return boundary_loss(self.pair(batch)[0], self.get_buffer("centre_CN")[batch.label_B], radius_B)

    def radius(self) -> Tensor:
        """(C,) between the old radius of each class and the threshold; infinity where the class has no radius."""
        radius_C = self.get_buffer("radius_C")
        # Interpolating with infinity would give NaN, also as the gradient.
        finite_C = radius_C.nan_to_num(posinf=0.0)
        mixed_C = finite_C + (self.threshold - finite_C) * torch.sigmoid(self.elastic_C)
        return torch.where(radius_C.isfinite(), mixed_C, torch.inf)
