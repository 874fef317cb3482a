"""The processes of one training: one, or as many as `torchrun` started. They all do the same; the first one writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from index.errors import InvalidArgument

PATIENCE = timedelta(days=7)
"""How long the others wait for the first process, which measures and exports."""


def rank() -> int:
    """This process's number, 0 to `world() - 1`."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_this_machine() -> int:
    """How many of them run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def leads() -> bool:
    """Whether this process is the one that measures and writes."""
    return rank() == 0


def require_one(what: str) -> None:
    """Refuse several processes, each of which would write all that one does.

    Raises:
        InvalidArgument: there are several.
    """
    if world() > 1:
        raise InvalidArgument(f"{what} runs in one process; of several `regraft train` alone makes one training")


@contextmanager
def meeting() -> Iterator[None]:
    """The first process measures and writes inside the block, and all leave together, so that they find what it wrote.

    Lightning's own group gives up on a process that is not there within half an hour.
    """
    if world() == 1 or not dist.is_initialized():
        yield
        return
    together = dist.new_group(backend="gloo", timeout=PATIENCE)
    yield
    assert isinstance(together, dist.ProcessGroup)
    dist.barrier(together)


def part() -> None:
    """Leave the group that Lightning formed, at the very end."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
