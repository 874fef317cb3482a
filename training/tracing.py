"""From a module of torch to an ONNX model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

OPSET = 18


def to_onnx(
    module: nn.Module, given: Mapping[str, Tensor], made: list[str], *, second: bool = False, packed: bool = False
) -> bytes:
    """A module as an ONNX model: the first axis free, no paths of this machine inside.

    Args:
        module: gives one tensor, or a tuple of as many as `made`.
        given: its inputs by name.
        made: names of its outputs.
        second: the second axis is free too.
        packed: its one parameter is `*given`.
    """
    free = {0: torch.export.Dim("batch")} | ({1: torch.export.Dim("length")} if second else {})
    shapes = tuple(dict(free) for _ in given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations, nothing a caller could act on
        program = torch.onnx.export(
            module.eval(),
            # One image would be taken for a fixed size.
            tuple(example[:1].repeat(2, *[1] * (example.ndim - 1)) for example in given.values()),
            input_names=list(given),
            output_names=made,
            dynamic_shapes=(shapes,) if packed else shapes,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    del model.metadata_props[:]
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.value_info, model.graph):
        del part.metadata_props[:]
        part.doc_string = ""
    content: bytes = model.SerializeToString(deterministic=True)
    return content
