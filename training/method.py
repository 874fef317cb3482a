"""The interface of methods: a method turns the embeddings of one batch into a loss, and adds to what is exported.

The loop in `training.train` and `training.module` never names a method; a method never sees an image, the optimiser
or the loop. `training.methods.METHODS` maps names to classes that are called as `METHODS[name](context, **options)`.

Shape suffixes: B batch, D new dimension, N old dimension, M independent new dimension, C classes of the new data,
K classes the old head knows, S and T side-information of the old and the new version. Embeddings are raw (z):
normalise where the source does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from index.errors import InvalidArgument
from index.version import EdgeKind


@dataclass(frozen=True)
class EmbeddedBatch:
    """What a method sees of one batch: the same images through up to three encoders.

    Args:
        new_BD: output of the backbone being trained (of the frozen one where `trains_encoder` is False).
        label_B: class of each image, 0 to C - 1.
        old_BN: the frozen old model's embedding; None without an old version.
        old_side_BS: what the old version stores beside it; None where it stores nothing, or nothing reads it.
        side_BT: what the new version will store beside its own embedding; likewise.
        independent_BM: the frozen independently trained new model's embedding; None without one.
        progress: how much of the training is done, 0 to 1.
    """

    new_BD: Tensor
    label_B: Tensor
    old_BN: Tensor | None = None
    independent_BM: Tensor | None = None
    progress: float = 0.0
    old_side_BS: Tensor | None = None
    side_BT: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """The result of a method for one batch: the loss to minimise, and its terms by name, to log."""

    loss: Tensor
    logging: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class OldSummary:
    """What a method is told of the old version when it is built: its space, its head, and statistics on the new data.

    Args:
        mean_CN: mean old embedding of each class of the new data.
        label_C: row of the old head for each class of the new data, `losses.UNKNOWN` where it has none. Without a head:
            any other number for a class that the old version was trained on.
        weight_KN: the old head, linear in unit embeddings; None when the old version was saved without one.
        bias_K: its bias, where it has one.
        space: how the old version compares.
        centre_CN: mean of the unit old embeddings of each class.
        radius_C: distance of the farthest of them from it, outliers apart.
        side_dim: S, how many numbers of side-information it stores with each item.
        head_scale: s where the old head's logits are s times cosines, and so its rows of length s.
        reach: largest distance of an old embedding from the origin, in space lorentz (K = 1).
    """

    mean_CN: Tensor
    label_C: Tensor
    weight_KN: Tensor | None = None
    bias_K: Tensor | None = None
    space: str = "cosine"
    centre_CN: Tensor | None = None
    radius_C: Tensor | None = None
    side_dim: int = 0
    head_scale: float | None = None
    reach: float = 0.0

    @property
    def dim(self) -> int:
        """N."""
        return self.mean_CN.shape[1]

    def class_means(self, raw: bool) -> Tensor:
        """(C, N) the rows of a class-mean classifier: means of unit old embeddings, or of raw ones."""
        if raw:
            return self.mean_CN
        assert self.centre_CN is not None
        return self.centre_CN

    def head(self, needed_by: str) -> tuple[Tensor, Tensor | None]:
        """The old head's weight and bias.

        Raises:
            InvalidArgument: the old version holds none, as one whose embeddings come from a file.
        """
        if self.weight_KN is None:
            raise InvalidArgument(
                f"{needed_by} requires the old version's classifier, but it was saved without a classifier head; "
                "influence=synthesised of method bct requires none",
                pointer="/old",
            )
        return self.weight_KN, self.bias_K


@dataclass(frozen=True)
class MethodContext:
    """What a method is built from: sizes, the base loss's head, and the old version.

    Args:
        dim: D, what the backbone gives.
        classes: C.
        classifier: builds the base loss, with the recipe's head, for a dimension.
        old: None for a first version.
        space: "cosine", "l2" or "lorentz".
        side_dim: T, how many numbers of side-information the new version will store; `side_bits`: they are signs.
        independent_dim: M, 0 without an independent version; None where it does not matter any more, because a version
            is read back.
        independent_head: its linear head, weight (C, M) and bias, where it has one.
    """

    dim: int
    classes: int
    classifier: Callable[[int], Classifier]
    old: OldSummary | None = None
    space: str = "cosine"
    side_dim: int = 0
    side_bits: bool = False
    independent_dim: int | None = None
    independent_head: tuple[Tensor, Tensor | None] | None = None

    def require_old(self, method: str) -> OldSummary:
        """The old version.

        Raises:
            InvalidArgument: there is none.
        """
        if self.old is None:
            raise InvalidArgument(f"method {method} requires an old version: set old=FOLDER", pointer="/old")
        return self.old


class Classifier(nn.Module):
    """The base loss: a head of `training.networks.heads` under cross-entropy."""

    def __init__(self, head: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.head, self.label_smoothing = head, label_smoothing

    def forward(self, z_BD: Tensor, label_B: Tensor) -> Tensor:
        """Mean cross-entropy of (B, D) raw embeddings."""
        return F.cross_entropy(self.head(z_BD, label_B), label_B, label_smoothing=self.label_smoothing)

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Weight (C, D) of the head, and its bias where it has one."""
        weight, bias = self.head.get_parameter("weight"), dict(self.head.named_parameters()).get("bias")
        return weight.detach(), None if bias is None else bias.detach()


class ItemEdge(nn.Module):
    """What moves stored items to the new space: an edge of kind `forward`."""

    def forward(self, embedding: Tensor, side: Tensor | None = None) -> Tensor:
        """(B, N) stored embeddings and (B, S) side-information -> (B, D), ready to compare."""
        return self.transform_items(embedding, side)["moved"]

    @abstractmethod
    def transform_items(self, embedding: Tensor, side: Tensor | None = None) -> dict[str, Tensor]:
        """The outputs of edge.onnx by name, `moved` first: see `index.edges.transform.Forward` for the others."""

    @abstractmethod
    def is_stable(self, embedding: Tensor, side: Tensor | None = None) -> Tensor:
        """(B,) whether rounding on another machine changes outputs by rounding errors only: no sign could change."""


class Method(Protocol):
    """One paper. An nn.Module, so that what it learns beside the backbone is trained with it."""

    @property
    def trains_encoder(self) -> bool:
        """False: the backbone is the frozen independent model and only the method's own parameters learn (FCT)."""

    @property
    def edge_kind(self) -> EdgeKind | None:
        """How the new version compares with the old one; None when it does not."""

    @property
    def transform(self) -> nn.Module:
        """Exported on top of the backbone: (B, D) backbone output -> the raw embedding that is stored."""

    @property
    def edge(self) -> nn.Module | None:
        """Exported as the edge's ONNX model, where its kind has one; an `ItemEdge` where that kind is `forward`."""

    def __call__(self, batch: EmbeddedBatch) -> Step:
        """The loss of one batch."""

    def head_weights(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight (C, D) and bias of a linear head on the stored embedding, for a later version's influence loss.

        None when what this method trains has no such head.
        """

    def parameters(self) -> Iterator[nn.Parameter]:
        """What trains beside the backbone."""
