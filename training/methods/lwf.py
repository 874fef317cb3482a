"""Learning without forgetting (LwF, Li and Hoiem 2016, arXiv 1606.09282), as a baseline of BCT (arXiv 2003.11942).

Decided where the sources are silent: the old head stays frozen and reads the new embedding's first components; where no
class is new (more data of the same classes) every sample is distilled; temperature 2 is LwF's.
"""

from __future__ import annotations

from torch import Tensor

from index.errors import InvalidArgument
from training.losses.gather import gather_batch
from training.losses.losses import distillation, linear_logits
from training.method import EmbeddedBatch, MethodContext
from training.methods.compatible import Compatible, check_raw_logits, cosine_scale


class Lwf(Compatible):
    """Base loss + weight * KL from the old classifier's outputs, on samples of new classes.

    Args:
        context: see `MethodContext`; the old version must hold its head.
        weight: of the distillation.
        logits: `cosine` (`scale` times the cosines) or `raw` (the old head as it is).
        scale: of the cosine logits; 0: sqrt(2) log(K - 1) for the head's K rows, see `cosine_scale`.
        temperature: of both distributions.
    """

    bias_K: Tensor | None

    def __init__(
        self,
        context: MethodContext,
        *,
        weight: float = 1.0,
        logits: str = "cosine",
        scale: float = 16.0,
        temperature: float = 2.0,
    ) -> None:
        super().__init__(context, "lwf", weight, raw=logits == "raw")
        if logits not in {"cosine", "raw"}:
            raise InvalidArgument(f"logits must be one of cosine, raw, not {logits!r}", pointer="/logits")
        old = context.require_old("lwf")
        if logits == "raw":
            check_raw_logits(old)
        weight_KN, bias_K = old.head("lwf")
        self.register_buffer("weight_KN", weight_KN)
        self.register_buffer("bias_K", bias_K)
        self.scale = cosine_scale(scale, len(weight_KN)) if logits == "cosine" else None
        self.temperature = temperature
        self.distils_all = bool(self.get_buffer("known_C").all())

    def influence_loss(self, batch: EmbeddedBatch) -> Tensor:
        """KL of the old head's class distributions on the old and the new embedding."""
        batch = gather_batch(batch)
        new_BN, old_BN = self.pair(batch)
        keep_B = None if self.distils_all else ~self.known(batch)
        return distillation(self.old_logits(new_BN), self.old_logits(old_BN), keep_B, self.temperature)

    def old_logits(self, z_BN: Tensor) -> Tensor:
        """(B, N) embeddings -> (B, K) logits of the old head, without its margin."""
        return linear_logits(z_BN, self.get_buffer("weight_KN"), self.bias_K, self.scale)
