"""Base class of methods whose loss is base + weight * influence, and whose queries search old items directly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from index.errors import InvalidArgument
from index.version import EdgeKind
from training.losses.losses import UNKNOWN, fit_dim
from training.method import EmbeddedBatch, MethodContext, OldSummary, Step

MEAN_LOGITS = ("unit", "cosine", "raw")
"""Logits of a classifier of class means: unit embeddings on unit means, scaled cosines, or both as they are."""


def adacos_scale(classes: int) -> float:
    """sqrt(2) log(C - 1): the scale of cosines at which a softmax over C classes is neither too flat nor too steep.

    AdaCos (Zhang 2019, arXiv 1905.00292, eq. 12): there the own class's probability rises most steeply at 45 degrees.
    """
    return math.sqrt(2) * math.log(max(classes - 1, 2))


def cosine_scale(scale: float, classes: int) -> float:
    """`scale`, or where it is 0 AdaCos's for the number of classes.

    Raises:
        InvalidArgument: `scale` is below 0.
    """
    if scale < 0:
        raise InvalidArgument(
            f"scale must be 0 (chosen by the number of classes) or more, not {scale:g}", pointer="/scale"
        )
    return scale or adacos_scale(classes)


def check_choice(option: str, value: str, legal: Sequence[str]) -> None:
    """Refuse an option's unknown value.

    Raises:
        InvalidArgument: lists the legal ones.
    """
    if value not in legal:
        raise InvalidArgument(f"{option} must be one of {', '.join(legal)}, not {value!r}", pointer=f"/{option}")


def check_spaces(context: MethodContext, old: OldSummary, raw: bool = False) -> None:
    """Refuse spaces in which lengths count, for a method that trains directions only.

    Args:
        context: of the new version.
        old: the old version, whose items are searched in its space.
        raw: the method trains lengths, too.

    Raises:
        InvalidArgument: names the legal spaces.
    """
    legal = ("cosine", "l2") if raw else ("cosine",)
    reason = "" if raw else ": it trains directions, not lengths"
    if context.space not in legal:
        raise InvalidArgument(
            f"the method requires space={' or '.join(legal)}, not {context.space}{reason}", pointer="/space"
        )
    if old.space != context.space:
        raise InvalidArgument(
            f"the method requires an old version of space {context.space}, not {old.space}{reason}", pointer="/old"
        )


def check_raw_logits(old: OldSummary) -> None:
    """Refuse raw logits of an old head whose logits are scaled cosines.

    Raises:
        InvalidArgument: names the settings that fit it.
    """
    if old.head_scale is not None:
        raise InvalidArgument(
            f"logits=raw uses lengths, but the old head's logits are cosines times {old.head_scale:g}: "
            f"set logits=cosine scale={old.head_scale:g}",
            pointer="/logits",
        )


class PadToOld(nn.Module):
    """Pads a shorter new embedding with zeros to the old dimension."""

    def __init__(self, old_dim: int) -> None:
        super().__init__()
        self.old_dim = old_dim

    def forward(self, new_BD: Tensor) -> Tensor:
        """(B, D) -> (B, N)."""
        return fit_dim(new_BD, self.old_dim)


def compatible_edge(dim: int, old_dim: int) -> tuple[EdgeKind, nn.Module | None]:
    """Kind and model, if any, of the edge of a version whose first components are compatible with the old space."""
    if dim == old_dim:
        return EdgeKind.IDENTITY, None
    return (EdgeKind.TRUNCATE, None) if dim > old_dim else (EdgeKind.ONNX, PadToOld(old_dim))


class Compatible(nn.Module):
    """Base loss + weight * influence loss; a subclass defines the latter.

    Args:
        context: see `MethodContext`.
        method: its name, for the error when there is no old version.
        weight: of the influence loss.
        raw: the method trains lengths, not directions alone.

    Raises:
        InvalidArgument: there is no old version, or see `check_spaces`.
    """

    trains_encoder = True

    def __init__(self, context: MethodContext, method: str, weight: float, raw: bool = False) -> None:
        super().__init__()
        old = context.require_old(method)
        check_spaces(context, old, raw)
        self.edge_kind, self.edge = compatible_edge(context.dim, old.dim)
        self.transform = nn.Identity()
        self.classifier = context.classifier(context.dim)
        self.weight, self.old_dim = weight, old.dim
        self.register_buffer("known_C", old.label_C != UNKNOWN)

    def forward(self, batch: EmbeddedBatch) -> Step:
        """Base loss + weight * influence loss."""
        base, influence = self.classifier(batch.new_BD, batch.label_B), self.influence_loss(batch)
        return Step(base + self.weight * influence, {"base": base, "influence": influence})

    def check_over(self, over: str) -> None:
        """Refuse an option `over` that is unknown, or `old` where it would leave nothing to learn from.

        Raises:
            InvalidArgument: names the legal values.
        """
        check_choice("over", over, ("all", "old"))
        if over == "old" and not bool(self.get_buffer("known_C").any()):
            raise InvalidArgument(
                "over=old has no effect, because the old version knows none of the new classes; use over=all",
                pointer="/over",
            )

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """The loss that makes new embeddings compatible with old ones."""
        raise NotImplementedError

    def pair(self, batch: EmbeddedBatch) -> tuple[Tensor, Tensor]:
        """New embeddings, cut or padded to the old dimension, and old ones: (B, N), (B, N)."""
        assert batch.old_BN is not None
        return fit_dim(batch.new_BD, self.old_dim), batch.old_BN

    def known(self, batch: EmbeddedBatch) -> Tensor:
        """(B,) whether the old head knows the sample's class."""
        return self.get_buffer("known_C")[batch.label_B]

    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """The base loss's own head."""
        return self.classifier.weights()
