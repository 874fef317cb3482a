"""The base loss alone: no compatibility with anything. Every other method adds to it or compares itself with it."""

from __future__ import annotations

from torch import Tensor, nn

from training.method import EmbeddedBatch, MethodContext, Step


class Independent(nn.Module):
    """Classification of the new data's classes by the recipe's head."""

    trains_encoder = True
    edge_kind = None
    edge: nn.Module | None = None

    def __init__(self, context: MethodContext) -> None:
        super().__init__()
        self.transform = nn.Identity()
        self.classifier = context.classifier(context.dim)

    def forward(self, batch: EmbeddedBatch) -> Step:
        """The base loss."""
        return Step(self.classifier(batch.new_BD, batch.label_B))

    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """The base loss's own head."""
        return self.classifier.weights()
