"""The processes of one training: one, or as many as `torchrun` started. All train alike; rank zero writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from index.errors import InvalidArgument

BARRIER_TIMEOUT = timedelta(days=7)
"""How long the others wait for rank zero, which measures and exports."""


def rank() -> int:
    """This process's number, 0 to `world() - 1`."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """Number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world() -> int:
    """Number of them that run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_rank_zero() -> bool:
    """Whether this process has rank 0: the one that measures and writes."""
    return rank() == 0


def require_one(what: str) -> None:
    """Refuse several processes, each of which would write all that one does.

    Raises:
        InvalidArgument: there are several.
    """
    if world() > 1:
        raise InvalidArgument(f"{what} must run in one process; only `regraft train` supports several")


@contextmanager
def barrier_after() -> Iterator[None]:
    """Let all processes leave the block together, so that they find what rank zero wrote inside it.

    Lightning's own group gives up on a process that does not arrive within half an hour.
    """
    if world() == 1 or not dist.is_initialized():
        yield
        return
    group = dist.new_group(backend="gloo", timeout=BARRIER_TIMEOUT)
    yield
    assert isinstance(group, dist.ProcessGroup)
    dist.barrier(group)


def leave_group() -> None:
    """Leave the process group that Lightning formed, at the very end."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
