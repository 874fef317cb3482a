"""Multiply-accumulates of ONNX models, counted in their graphs: `count_macs`, and of encoders and item edges.

Conv, ConvTranspose, Gemm and MatMul are counted, as in the papers; normalisation, pooling and activations are not. A
multiply-accumulate (MAC) is one multiplication and one addition. The body of a loop counts once per iteration.

onnx and onnxruntime are imported where they are used, so the service starts without them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from index.errors import InvalidVersionFolder
from index.version import EDGE_MODEL, ENCODER, SIDE, Card, Edge, Version

PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
LARGEST_SHAPE = 1024
"""Constants with more numbers are weights: no shape is computed from them."""


def count_macs(model: Path, inputs: dict[str, tuple[int, ...]]) -> int:
    """Multiply-accumulates of one run of an ONNX model.

    Args:
        model: an .onnx file.
        inputs: the shape of each input with its batch: (1, ...) counts one item.

    Raises:
        InvalidVersionFolder: a shape, the iterations of a loop, or the branch taken are only known at run time.
    """
    import onnx

    loaded = onnx.load(model, load_external_data=False)
    _fix_inputs(loaded, inputs)
    try:
        return _count(model.name, loaded)
    except InvalidVersionFolder:
        # onnx infers no shape that follows from Range and the like, as torch exports as_strided.
        folded = _fold(loaded)
        if folded is None:
            raise
        return _count(model.name, folded)


def _count(file: str, model: Any) -> int:
    """Multiply-accumulates of a loaded model with fixed inputs. Raises as `count_macs`."""
    from onnx import shape_inference

    inferred = shape_inference.infer_shapes(model, strict_mode=False, data_prop=True).graph
    return _GraphReader(file, _shapes(inferred), _constants(inferred)).macs(inferred)


def _fold(model: Any) -> Any | None:
    """The model after onnxruntime has computed what follows from its input shapes; None where it cannot be opened.

    Its weights become inputs, because only their shapes matter here.
    """
    import onnx
    import onnxruntime as ort

    graph, declared = model.graph, {given.name for given in model.graph.input}
    weights = [constant for constant in graph.initializer if math.prod(constant.dims) > LARGEST_SHAPE]
    shapes = [constant for constant in graph.initializer if math.prod(constant.dims) <= LARGEST_SHAPE]
    given = [onnx.helper.make_tensor_value_info(one.name, one.data_type, one.dims) for one in weights]
    graph.input.extend(one for one in given if one.name not in declared)
    del graph.initializer[:]
    graph.initializer.extend(shapes)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "folded.onnx")
        try:
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception:  # onnxruntime's have no base of their own
            return None
        return onnx.load(options.optimized_model_filepath)


def _fix_inputs(model: Any, inputs: dict[str, tuple[int, ...]]) -> None:
    for declared in model.graph.input:
        if declared.name not in inputs:
            continue
        shape = declared.type.tensor_type.shape
        del shape.dim[:]
        for size in inputs[declared.name]:
            shape.dim.add().dim_value = size
    # Shapes declared for another batch would override the inferred ones.
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


def _constants(graph: Any) -> dict[str, Any]:
    """The constants of a graph by name."""
    from onnx import numpy_helper

    made = {n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"}
    held = {**{constant.name: constant for constant in graph.initializer}, **made}
    small = {name: one for name, one in held.items() if math.prod(one.dims) == 1 and not one.external_data}
    return {name: numpy_helper.to_array(one) for name, one in small.items()}


@dataclass(frozen=True)
class _GraphReader:
    """Counts in a graph: its file, and shapes and scalar constants by name, including those of outer graphs."""

    file: str
    shapes: Mapping[str, tuple[int, ...] | None]
    constants: Mapping[str, Any]

    def macs(self, graph: Any) -> int:
        """The multiply-accumulates of all nodes."""
        return sum(
            self._macs_of_product(node) if node.op_type in PRODUCTS else self._macs_in_bodies(node)
            for node in graph.node
        )

    def _macs_in_bodies(self, node: Any) -> int:
        """Multiply-accumulates of a node's subgraphs: loops times iterations, branches if they cost the same."""
        bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        counts = {self._in_body(body).macs(body) for body in bodies}
        if not any(counts):
            return 0
        if len(counts) > 1:
            raise self._unknown(f"which branch {node.op_type} {node.name!r} takes")
        return counts.pop() * (self._iterations(node, bodies[0]) if node.op_type in ("Loop", "Scan") else 1)

    def _in_body(self, body: Any) -> _GraphReader:
        shapes, constants = {**self.shapes, **_shapes(body)}, {**self.constants, **_constants(body)}
        return _GraphReader(self.file, shapes, constants)

    def _iterations(self, node: Any, body: Any) -> int:
        """The number of iterations of a loop."""
        about = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Scan":
            first = node.input[len(node.input) - about["num_scan_inputs"].i]
            axes = about["scan_input_axes"].ints if "scan_input_axes" in about else [0]
            return self._shape(first, node)[axes[0]]
        limit, going = (self.constants.get(name) for name in node.input[:2])
        same = {made.output[0]: made.input[0] for made in body.node if made.op_type == "Identity"}
        on = same.get(body.output[0].name, body.output[0].name)
        goes_on = on == body.input[1].name or bool(self._in_body(body).constants.get(on, False))
        if limit is None or not goes_on or (node.input[1] and not (going is not None and bool(going))):
            raise self._unknown(f"how often {node.op_type} {node.name!r} runs")
        return int(limit)

    def _macs_of_product(self, node: Any) -> int:
        first, second = (self._shape(name, node) for name in node.input[:2])
        if node.op_type == "ConvTranspose":
            # Each input number is multiplied by the whole kernel of its group: weight (C, M / groups, k...).
            return math.prod(first) * math.prod(second[1:])
        if node.op_type == "Conv":
            # Each output number is the sum over one kernel: weight (M, C / groups, k...).
            return math.prod(self._shape(node.output[0], node)) * math.prod(second[1:])
        if node.op_type == "Gemm":
            transposed = {a.name: a.i for a in node.attribute}
            return math.prod(first) * (second[0] if transposed.get("transB") else second[1])
        return math.prod(self._shape(node.output[0], node)) * first[-1]

    def _shape(self, name: str, node: Any) -> tuple[int, ...]:
        shape = self.shapes.get(name)
        if shape is None:
            raise self._unknown(f"the shape of {name!r}, used by {node.op_type} {node.name!r},")
        return shape

    def _unknown(self, what: str) -> InvalidVersionFolder:
        return InvalidVersionFolder(f"{self.file}: {what} is not known")


def encoder_macs(version: Version) -> int:
    """Multiply-accumulates of embedding one image, with its side-information. Raises as `count_macs`."""
    spec = version.card.preprocess
    assert spec is not None
    files = [ENCODER, SIDE] if version.card.side_dim else [ENCODER]
    shape = (1, spec.channels, spec.height, spec.width)
    return sum(count_macs(version.folder / file, {_only_input(version.folder / file): shape}) for file in files)


def forward_macs(edge: Edge, old: Card) -> int:
    """Multiply-accumulates of transforming one stored item along an item edge. Raises as `count_macs`."""
    assert edge.folder is not None
    return count_macs(edge.folder / EDGE_MODEL[edge.kind], {"embedding": (1, old.dim), "side": (1, old.side_dim)})


def _only_input(model: Path) -> str:
    import onnx

    graph = onnx.load(model, load_external_data=False).graph
    constants = {constant.name for constant in graph.initializer}
    return next(str(given.name) for given in graph.input if given.name not in constants)
