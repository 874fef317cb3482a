"""What models cost: multiply-accumulates counted in ONNX graphs, and backfills reckoned on paper.

Counted are the operators that multiply and add matrices - Conv, ConvTranspose, Gemm, MatMul - as the papers do; what
normalises, pools or activates is left out. A multiply-accumulate is one multiplication and one addition.

onnx is imported where it is used: the service starts without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from index.errors import InvalidArgument, InvalidVersionFolder
from index.version import EDGE_MODEL, ENCODER, SIDE, Card, Edge, EmbeddingApi, Version

FLOAT_BYTES = 4


def count_macs(model: Path, inputs: dict[str, tuple[int, ...]]) -> int:
    """Multiply-accumulates of one run of an ONNX model.

    Args:
        model: an .onnx file.
        inputs: the shape of each input, the batch included: (1, ...) counts one item.

    Raises:
        InvalidVersionFolder: the shapes inside the model cannot be known without running it.
    """
    import onnx
    from onnx import shape_inference

    loaded = onnx.load(model, load_external_data=False)
    _fix_inputs(loaded, inputs)
    inferred = shape_inference.infer_shapes(loaded, strict_mode=False, data_prop=True).graph
    return _graph_macs(inferred, _shapes(inferred), model.name)


@dataclass(frozen=True)
class Cost:
    """What moving one item by one way costs: multiply-accumulates, and seconds of one worker where they are known."""

    macs: int | None
    seconds: float | None


@dataclass(frozen=True)
class Reckoned:
    """A backfill on paper: seconds of wall clock, multiply-accumulates, and bytes of stored vectors."""

    items: int
    seconds: float | None
    macs: int | None
    bytes_before: int
    bytes_after: int


def reckon(
    items: int, cost: Cost, *, old_floats: int, new_floats: int, workers: int = 1, rate: float | None = None
) -> Reckoned:
    """Reckon a backfill of `items` items; old embeddings are kept, as they are until their version is retired.

    Args:
        items: at least 0.
        cost: of one item.
        old_floats: numbers stored per item so far, vector and side-information.
        new_floats: numbers stored per item in addition.
        workers: that share the items; they are taken to be independent.
        rate: items a second over all workers at most.
    """
    if items < 0 or workers < 1 or (rate is not None and rate <= 0):
        raise InvalidArgument("items must be at least 0, workers at least 1, and rate above 0")
    seconds = None if cost.seconds is None else items * cost.seconds / workers
    if rate is not None:
        seconds = max(seconds or 0.0, items / rate)
    return Reckoned(
        items,
        seconds,
        None if cost.macs is None else items * cost.macs,
        items * old_floats * FLOAT_BYTES,
        items * (old_floats + new_floats) * FLOAT_BYTES,
    )


def provider_seconds(api: EmbeddingApi, items: int, tokens: float) -> float:
    """The least time in which one process may have a provider embed items of so many tokens each, by its limits."""
    calls = math.ceil(items / api.batch_size)
    minutes = max(calls / (api.requests_per_minute or math.inf), items * tokens / (api.tokens_per_minute or math.inf))
    return 60 * minutes


def provider_price(api: EmbeddingApi, items: int, tokens: float) -> float | None:
    """What a provider asks for that; None: its price is not known."""
    return None if api.price is None else items * tokens * api.price / 1e6


def _fix_inputs(model: Any, inputs: dict[str, tuple[int, ...]]) -> None:
    for declared in model.graph.input:
        if declared.name not in inputs:
            continue
        shape = declared.type.tensor_type.shape
        del shape.dim[:]
        for size in inputs[declared.name]:
            shape.dim.add().dim_value = size
    # What was declared with a free batch would win over what is inferred.
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")


def _shapes(graph: Any) -> dict[str, tuple[int, ...] | None]:
    found: dict[str, tuple[int, ...] | None] = {constant.name: tuple(constant.dims) for constant in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        sizes = value.type.tensor_type.shape.dim
        known = value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in sizes)
        found[value.name] = tuple(d.dim_value for d in sizes) if known else found.get(value.name)
    return found


def _graph_macs(graph: Any, shapes: dict[str, tuple[int, ...] | None], file: str) -> int:
    return sum(_node_macs(node, shapes, file) for node in graph.node)


def _node_macs(node: Any, shapes: dict[str, tuple[int, ...] | None], file: str) -> int:
    if node.op_type not in {"Conv", "ConvTranspose", "Gemm", "MatMul"}:
        return 0
    first, second = (_known(name, shapes, node, file) for name in node.input[:2])
    if node.op_type == "ConvTranspose":
        # Each input number meets the whole kernel of its group: weight (C, M / groups, k...).
        return math.prod(first) * math.prod(second[1:])
    if node.op_type == "Conv":
        # Each output number adds up one kernel: weight (M, C / groups, k...).
        return math.prod(_known(node.output[0], shapes, node, file)) * math.prod(second[1:])
    if node.op_type == "Gemm":
        transposed = {a.name: a.i for a in node.attribute}
        rows, inner = reversed(first) if transposed.get("transA") else first
        columns = second[0] if transposed.get("transB") else second[1]
        return rows * inner * columns
    return math.prod(_known(node.output[0], shapes, node, file)) * first[-1]


def _known(name: str, shapes: dict[str, tuple[int, ...] | None], node: Any, file: str) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None:
        raise InvalidVersionFolder(f"{file}: the shape of {name!r}, used by {node.op_type} {node.name!r}, is not known")
    return shape


def encoder_macs(version: Version) -> int:
    """Multiply-accumulates of embedding one image by a version, its side-information included. Raises as count_macs."""
    spec = version.card.preprocess
    assert spec is not None
    files = [ENCODER, SIDE] if version.card.side_dim else [ENCODER]
    shape = (1, spec.channels, spec.height, spec.width)
    return sum(count_macs(version.folder / file, {_only_input(version.folder / file): shape}) for file in files)


def forward_macs(edge: Edge, old: Card) -> int:
    """Multiply-accumulates of moving one stored item over an item edge. Raises as count_macs does."""
    assert edge.folder is not None
    return count_macs(edge.folder / EDGE_MODEL[edge.kind], {"embedding": (1, old.dim), "side": (1, old.side_dim)})


def _only_input(model: Path) -> str:
    import onnx

    graph = onnx.load(model, load_external_data=False).graph
    constants = {constant.name for constant in graph.initializer}
    return next(str(given.name) for given in graph.input if given.name not in constants)
