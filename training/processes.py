"""The processes of one training: one, or as many as `torchrun` started. They all do the same; the first one writes."""

from __future__ import annotations

import os

import torch.distributed as dist


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


def wait_for_all() -> None:
    """Return once every process has come here, so that all of them find what the first one wrote."""
    if world() > 1 and dist.is_initialized():
        dist.barrier()


def part() -> None:
    """Leave the group that Lightning formed, at the very end."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
