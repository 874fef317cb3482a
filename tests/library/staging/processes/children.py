"""Processes forked from the one that runs the tests, so that torch is already imported; not for CUDA."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

# Autograd decides at the first backward of a process whether it starts threads, after which no fork may use it. It does
# if a fake tensor was made before (as by an export to ONNX), which counts as a device: so the first one is here.
torch.autograd.backward(torch.ones(1, requires_grad=True).sum())


def child(target: Callable[..., None], *given: Any) -> BaseProcess:
    """Start a process that calls `target`, a function of a module; the caller must wait for it."""
    context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else multiprocessing.get_context("fork")
    process = context.Process(target=target, args=given)
    process.start()
    return process


@contextmanager
def forking_instead_of_spawning() -> Iterator[None]:
    """Fork the processes that would be spawned: each would import torch, which takes longer than a short training."""
    get_context = multiprocessing.get_context

    def forking(method: str | None = None) -> BaseContext:
        return get_context("fork" if method == "spawn" and not torch.cuda.is_available() else method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", forking)
        yield
