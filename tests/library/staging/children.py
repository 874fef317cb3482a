"""Processes forked from the one that runs the tests, so that torch is already imported; not for CUDA."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch


def child(target: Callable[..., None], *given: Any) -> BaseProcess:
    """Start a process that calls `target`, a function of a module; the caller must wait for it."""
    on_cuda = torch.cuda.is_available()
    context = multiprocessing.get_context("spawn") if on_cuda else multiprocessing.get_context("fork")
    process = context.Process(target=target, args=given)
    process.start()
    return process
