"""FCT (Ramanujan 2022, CVPR, "Forward Compatible Training"): a transform moves old items to the new model's space.

Old and new version are trained independently; the transform h learns to predict an image's new embedding from what is
stored of it: its old embedding and, where the old version has it, side-information psi. Where the new version stores
side-information too, g learns to predict that from the same inputs, so that items can move on to a third version
without their images.

Shape suffixes: B batch, N old dimension, S side-information (0: none), D new dimension, T the new version's own
side-information (0: none).
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from index.errors import InvalidArgument
from index.version import EdgeKind
from training.losses.losses import distillation, gaussian_nll, linear_logits, mean_square
from training.method import EmbeddedBatch, ItemEdge, MethodContext, Step
from training.methods.compatible import check_choice
from training.networks.side_information import finished, is_stable


class ForwardNetwork(ItemEdge):
    """h or g: a branch for each input, concatenated; about 5.7 million parameters at the paper's widths.

    Args:
        old_dim: N.
        side_dim: S.
        new_dim: D.
        branch: width of the branches (256 in the paper).
        trunk: width after the concatenation (2048 in the paper).
        unit: normalise the output, for a cosine space.
        uncertain: also predict a variance of each item.
        g: of h, the network that predicts the new version's side-information.
        bits: that side-information is signs.
    """

    def __init__(
        self,
        old_dim: int,
        side_dim: int,
        new_dim: int,
        branch: int,
        trunk: int,
        unit: bool,
        *,
        uncertain: bool = False,
        g: ForwardNetwork | None = None,
        bits: bool = False,
    ) -> None:
        super().__init__()
        self.old = _layers(old_dim, branch, branch)
        self.side = _layers(side_dim, branch, branch) if side_dim else None
        joined = branch if self.side is None else 2 * branch
        self.trunk = nn.Sequential(_layers(joined, trunk, trunk), nn.Linear(trunk, new_dim))
        self.log_variance = nn.Linear(trunk, 1) if uncertain else None
        self.g, self.bits = g, bits
        self.unit, self.statistics_fixed = unit, False

    def predict(self, embedding: Tensor, side: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(B, N) and (B, S) -> (B, D), ready to compare, and the log-variance of each item (B,), if it is learned."""
        parts = [self.old(embedding)]
        if self.side is not None:
            assert side is not None
            parts.append(self.side(side))
        joined, last = self.trunk
        hidden = joined(torch.cat(parts, dim=1))
        out: Tensor = last(hidden)
        log_variance_B = None if self.log_variance is None else self.log_variance(hidden)[:, 0]
        return F.normalize(out) if self.unit else out, log_variance_B

    def transform_items(self, embedding: Tensor, side: Tensor | None = None) -> dict[str, Tensor]:
        """Outputs of edge.onnx: `moved` (B, D), and where they are learned `next_side` (B, T) and `variance` (B, 1)."""
        moved_BD, log_variance_B = self.predict(embedding, side)
        outputs = {"moved": moved_BD}
        if self.g is not None:
            outputs["next_side"] = finished(self.g(embedding, side), self.bits)
        if log_variance_B is not None:
            outputs["variance"] = log_variance_B.exp()[:, None]
        return outputs

    @torch.inference_mode()
    def is_stable(self, embedding: Tensor, side: Tensor | None = None) -> Tensor:
        """(B,) whether no sign that g predicts could differ by a rounding error."""
        if self.g is None:
            return torch.ones(len(embedding), dtype=torch.bool)
        return is_stable(self.g(embedding, side), self.bits)

    def train(self, mode: bool = True) -> Self:
        """BatchNorm stays in eval mode once its statistics are fixed."""
        super().train(mode)
        for module in self.modules():
            if self.statistics_fixed and isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self

    def fix_statistics(self) -> None:
        """Normalise by the running statistics from now on, as serving will."""
        if not self.statistics_fixed:
            self.statistics_fixed = True
            self.train(self.training)


class Fct(nn.Module):
    """|h(old, psi) - new|^2, mean over dimensions, with the frozen independent model's embedding; and the same for g.

    objective=kl trains h by the KL divergence of the independent version's class distributions on both embeddings
    instead; its logits are those of its head in space l2, else 16 times the cosines. g keeps the square.

    Args:
        context: needs an old version; the backbone is the independent version's.
        branch: width of h's branches.
        trunk: width of h's joined layers.
        fix_from: share of the training after which BatchNorm is frozen.
        objective: `square` or `kl`.
        uncertainty: also learn a variance of each item, by Gaussian likelihood in place of the square (FastFill,
            Jaeckle 2023, arXiv 2303.04766); it orders a backfill.

    Raises:
        InvalidArgument: an unknown objective; or `kl` with uncertainty, without a linear head, or in space l2 with one
            that reads directions (it has no bias).
    """

    trains_encoder = False
    edge_kind = EdgeKind.FORWARD
    head_CD: Tensor | None
    bias_C: Tensor | None

    def __init__(
        self,
        context: MethodContext,
        *,
        branch: int = 256,
        trunk: int = 2048,
        fix_from: float = 0.5,
        objective: str = "square",
        uncertainty: bool = False,
    ) -> None:
        super().__init__()
        old = context.require_old("fct")
        self.transform = nn.Identity()
        self.unit, self.old_unit = context.space == "cosine", old.space == "cosine"
        input_dims = (old.dim, old.side_dim)
        g = None
        if context.side_dim:
            # Signs are learned as they are, 1 and -1: g's output is not normalised then.
            g = ForwardNetwork(*input_dims, context.side_dim, branch, trunk, not context.side_bits)
        self.edge = ForwardNetwork(
            *input_dims, context.dim, branch, trunk, self.unit, uncertain=uncertainty, g=g, bits=context.side_bits
        )
        self.fix_from, self.objective = fix_from, objective
        check_choice("objective", objective, ("square", "kl"))
        if objective == "kl" and uncertainty:
            raise InvalidArgument("uncertainty requires objective=square", pointer="/uncertainty")
        weight_CD, bias_C = context.independent_head or (None, None)
        if objective == "kl" and not self.unit and weight_CD is not None and bias_C is None:
            raise InvalidArgument(
                f"objective=kl in space {context.space} requires an independent version with head=softmax: its other "
                "heads use only directions, so lengths would be arbitrary",
                pointer="/objective",
            )
        self.register_buffer("head_CD", weight_CD, persistent=False)
        self.register_buffer("bias_C", bias_C, persistent=False)

    def forward(self, batch: EmbeddedBatch) -> Step:
        """The transform's error on one batch."""
        assert batch.old_BN is not None
        if batch.progress >= self.fix_from:
            self.edge.fix_statistics()
        stored_BN = F.normalize(batch.old_BN) if self.old_unit else batch.old_BN
        new_BD = F.normalize(batch.new_BD) if self.unit else batch.new_BD
        moved_BD, log_variance_B = self.edge.predict(stored_BN, batch.old_side_BS)
        square = mean_square(moved_BD, new_BD)
        if self.objective == "kl":
            loss = distillation(self.class_logits(moved_BD), self.class_logits(new_BD))
        else:
            loss = square if log_variance_B is None else gaussian_nll(moved_BD, log_variance_B, new_BD)
        if self.edge.g is None:
            return Step(loss, {"square": square})
        assert batch.side_BT is not None
        side = mean_square(self.edge.g(stored_BN, batch.old_side_BS), batch.side_BT)
        return Step(loss + side, {"square": square, "side": side})

    def class_logits(self, z_BD: Tensor) -> Tensor:
        """(B, C) logits of the independent version's head."""
        if self.head_CD is None:
            raise InvalidArgument(
                "objective=kl requires an independent version with a linear head", pointer="/objective"
            )
        return linear_logits(z_BD, self.head_CD, self.bias_C, 16.0 if self.unit else None)

    def head_weights(self) -> None:
        """None: the independent version's head stays in use."""


def _layers(before: int, hidden: int, after: int) -> nn.Sequential:
    """Two linear layers, each with BatchNorm and ReLU."""
    first = [nn.Linear(before, hidden), nn.BatchNorm1d(hidden), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(hidden, after), nn.BatchNorm1d(after), nn.ReLU())
