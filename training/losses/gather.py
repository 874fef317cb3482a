"""One batch across all processes, for losses that compare samples with each other.

Shape suffixes: B batch of one process, W processes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.method import EmbeddedBatch


def gather_batch(batch: EmbeddedBatch) -> EmbeddedBatch:
    """The batches of all processes as one, in the order of their ranks; the batch itself where there is one process.

    A loss of the gathered batch is the same number everywhere. Gradients of all processes flow back to the one that a
    row came from, so their average under DDP is the gradient of one process with the whole batch. All processes must
    hold batches of equal size.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return batch
    old_BN, independent_BM = (None if x is None else gather(x) for x in (batch.old_BN, batch.independent_BM))
    new_BD, label_B = gather(batch.new_BD), gather(batch.label_B)
    return replace(batch, new_BD=new_BD, label_B=label_B, old_BN=old_BN, independent_BM=independent_BM)


def gather(x_B: Tensor) -> Tensor:
    """(B, ...) of each process -> (W B, ...) on all of them, differentiable."""
    gathered: Tensor = _Gather.apply(x_B)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x_B: Tensor) -> Tensor:
        parts = [torch.empty_like(x_B) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x_B.contiguous())
        return torch.cat(parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.rows = len(inputs[0])

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        # Gloo has no reduce-scatter: sum everything, keep the own rows.
        total = gradient[0].contiguous()
        dist.all_reduce(total)
        return total[ctx.rows * dist.get_rank() :][: ctx.rows]
