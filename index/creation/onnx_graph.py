"""Rewrite an ONNX model for a version folder: float32 (N, C, H, W) -> (N, D), N free.

`index.creation.onnx_texts` rewrites models of texts.

Each `with_...` function returns the rewritten model. Shape suffixes: N images, C channels, H height, W width, D
dimension, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from index.errors import InvalidArgument, raise_if_out_of_memory
from index.version import Preprocess
from index.version_folder.artifacts import legal_opsets

ModelProto = Any
"""onnx.ModelProto; the package onnx is untyped."""

RunModel = Callable[[NDArray[np.float32]], NDArray[np.float32]]

PIXELS = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.DOUBLE: "float64",
    TensorProto.UINT8: "uint8",
}
"""Legal types of a model's input."""
FREE_INITIALIZERS = 4
"""The version of ONNX's format since which initializers need not be inputs too."""
BATCH_AXIS = "N"
PREFIX = "regraft_"
"""Prefix of added names."""
TOLERANCE = 1e-3
"""Largest relative difference between a model and its rewritten form."""


def open_session(model: ModelProto) -> RunModel:
    """Open a model with one input and one output, to run on images.

    Raises:
        InvalidArgument: it cannot be loaded; or, when called, fails.
    """
    run = open_named_session(model)
    name = model.graph.input[0].name
    return lambda images_NCHW: run({name: images_NCHW})


def open_named_session(model: ModelProto) -> Callable[[Mapping[str, Any]], NDArray[np.float32]]:
    """Open a model with one output, to run on its inputs by name. Raises InvalidArgument as `open_session`."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    with _refusing():
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(inputs: Mapping[str, Any]) -> NDArray[np.float32]:
        with _refusing():
            (given,) = session.run(None, dict(inputs))
            return np.asarray(given, np.float32)

    return run


def run_one_by_one(run: RunModel, images_NCHW: NDArray[np.float32]) -> NDArray[np.float32]:
    """Run a model on each image alone, (N, ...).

    Raises:
        InvalidArgument: it fails, or its output is not finite or not of shape (1, ...).
    """
    rows = [run(image_CHW[None]) for image_CHW in images_NCHW]
    check_rows(rows, "image")
    return np.concatenate(rows)


def check_rows(rows: Sequence[NDArray[np.float32]], what: str) -> None:
    """Check the outputs of a model for single inputs; `what`: "image" or "text".

    Raises:
        InvalidArgument: one is not finite or not of shape (1, ...).
    """
    if (wrong := next((row.shape for row in rows if row.shape[:1] != (1,)), None)) is not None:
        raise InvalidArgument(f"the model returns shape {wrong} for one {what}, not (1, ...)", pointer="/onnx")
    if not all(np.isfinite(row).all() for row in rows):
        raise InvalidArgument("the model returns numbers that are not finite", pointer="/onnx")


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # onnxruntime's own exception types share no public base
        raise_if_out_of_memory(error)
        raise InvalidArgument(f"the model does not run ({error})", pointer="/onnx") from error


def with_one_output(model: ModelProto, name: str) -> ModelProto:
    """Keep one output: `name`, or the only one. Initializers are removed from the inputs, as in newer files.

    Raises:
        InvalidArgument: several outputs or an unknown name, or an illegal opset.
    """
    model = _of_legal_opset(model)
    graph = model.graph
    constants = {constant.name for constant in graph.initializer}
    _keep(graph.input, lambda value: value.name not in constants)
    model.ir_version = max(model.ir_version, FREE_INITIALIZERS)
    names = [value.name for value in graph.output]
    if name not in names and (name or len(names) != 1):
        raise InvalidArgument(f"--output must name one of the model's outputs: {', '.join(names)}", pointer="/output")
    _keep(graph.output, lambda value: value.name == (name or names[0]))
    inputs = {value.name for value in graph.input}
    if any(held.startswith(PREFIX) for held in inputs.union(*(node.output for node in graph.node))):
        # A version's own encoder. The inputs of texts keep their names.
        model = onnx.compose.add_prefix(model, "given_", rename_inputs=any(name.startswith(PREFIX) for name in inputs))
    return model


def check_one_input(model: ModelProto) -> None:
    """Raise InvalidArgument unless a model has one input."""
    if len(model.graph.input) != 1:
        found = ", ".join(value.name for value in model.graph.input) or "none"
        why = f"the model must have one input, images; it has: {found}; a model of texts requires --tokenizer"
        raise InvalidArgument(why, pointer="/onnx")


def _of_legal_opset(model: ModelProto) -> ModelProto:
    """Convert a model of an older opset to a legal one. Raises InvalidArgument."""
    oldest = legal_opsets().start
    opset = next((o.version for o in model.opset_import if o.domain in {"", "ai.onnx"}), 0)
    if opset >= oldest:
        return model
    try:
        return onnx.version_converter.convert_version(model, oldest)
    except Exception as error:  # the converter raises plain `Exception`
        why = f"the model has opset {opset} and cannot be converted to {oldest} ({error})"
        raise InvalidArgument(why, pointer="/onnx") from error


def with_pixel_input(model: ModelProto, spec: Preprocess) -> ModelProto:
    """Change the input to float32 (N, C, H, W), from another type of PIXELS or (N, H, W, C).

    Raises:
        InvalidArgument: the input has another size or type, or is uint8 and the preprocess normalises.
    """
    given = model.graph.input[0]
    if (kind := given.type.tensor_type.elem_type) not in PIXELS:
        raise InvalidArgument(
            f"the model's input has type {TensorProto.DataType.Name(kind)}; legal: {', '.join(PIXELS.values())}",
            pointer="/onnx",
        )
    if kind == TensorProto.UINT8 and (any(spec.mean) or any(std != 1 for std in spec.std)):
        raise InvalidArgument(
            "the model takes uint8, pixels from 0 to 255, which cannot be normalised: leave out mean and std",
            pointer="/preprocess",
        )
    size = (spec.channels, spec.height, spec.width)
    declared = shape_of(given)
    last = (spec.height, spec.width, spec.channels)
    channels_last = len(declared) == 4 and not _fits(declared[1:], size) and _fits(declared[1:], last)
    if len(declared) != 4 or not (channels_last or _fits(declared[1:], size)):
        raise InvalidArgument(
            f"the model's input is {declared}, but its preprocess gives (N, {', '.join(map(str, size))})",
            pointer="/preprocess",
        )
    if kind == TensorProto.FLOAT and not channels_last:
        return model
    name = given.name
    steps = (
        [helper.make_node("Transpose", [f"{PREFIX}pixels"], [f"{PREFIX}last"], perm=[0, 2, 3, 1])]
        if channels_last
        else []
    )
    before = steps[-1].output[0] if steps else f"{PREFIX}pixels"
    if kind == TensorProto.UINT8:
        model.graph.initializer.append(numpy_helper.from_array(np.array(255, np.float32), f"{PREFIX}white"))
        steps.append(helper.make_node("Mul", [before, f"{PREFIX}white"], [f"{PREFIX}scaled"]))
        steps.append(helper.make_node("Round", [f"{PREFIX}scaled"], [before := f"{PREFIX}whole"]))
    steps.append(helper.make_node("Cast", [before], [name], to=kind))
    _keep(model.graph.input, lambda _: False)
    model.graph.input.append(
        helper.make_tensor_value_info(f"{PREFIX}pixels", TensorProto.FLOAT, (declared[0] or BATCH_AXIS, *size))
    )
    for step in reversed(steps):
        model.graph.node.insert(0, step)
    return model


def with_free_batch(model: ModelProto, images_NCHW: NDArray[np.float32]) -> ModelProto:
    """Make the first axis free: unchanged, by declaring it free, or by a loop over images.

    Args:
        model: a model with input (N, C, H, W) or (1, C, H, W).
        images_NCHW: at least two images, to test it.

    Raises:
        InvalidArgument: its first axis is fixed to more than 1.
    """
    fixed = shape_of(model.graph.input[0])[0]
    if fixed not in {None, 1}:
        raise InvalidArgument(
            f"the model's batch size is {fixed}; legal: 1, or any number (export it with a free first axis)",
            pointer="/onnx",
        )
    alone = run_one_by_one(open_session(model), images_NCHW)
    for made in (_declared_free(model), _looped(model, images_NCHW.shape[1:], alone.shape[1:])):
        try:
            together = open_session(made)(images_NCHW)
        except InvalidArgument:
            continue
        if together.shape == alone.shape and np.abs(together - alone).max() <= TOLERANCE * np.abs(alone).max():
            return made
    raise InvalidArgument("the model's output for an image depends on the other images of the batch", pointer="/onnx")


def has_channels_last(shape: Sequence[int], spec: Preprocess) -> bool:
    """Whether an output (N, *shape) is a map (N, H, W, D), as of TensorFlow, and not (N, D, H, W).

    A map has the proportions of the image, up to a pixel. If those of both places fit, D is first.
    """

    def is_map(high: int, wide: int) -> bool:
        return abs(high * spec.width - wide * spec.height) < max(spec.height, spec.width)

    return len(shape) == 3 and is_map(shape[0], shape[1]) and not is_map(shape[1], shape[2])


def with_channels_first(model: ModelProto) -> ModelProto:
    """Change the output from (N, H, W, D) to (N, D, H, W)."""
    last = model.graph.output[0].name
    return ending(model, [helper.make_node("Transpose", [last], [f"{PREFIX}maps"], perm=[0, 3, 1, 2])])


def with_pooling(model: ModelProto, shape: Sequence[int], pool: str) -> ModelProto:
    """Pool the output (N, D), (N, T, D) or (N, D, H, W) to (N, D).

    Args:
        model: a model with an output (N, *shape).
        shape: the shape of the output without N.
        pool: `none`, `mean` (over tokens or pixels) or `cls` (the first token).

    Raises:
        InvalidArgument: the pooling does not fit the shape.
    """
    legal = {1: ("none",), 2: ("mean", "cls"), 3: ("mean",)}.get(len(shape), ())
    if len(shape) == 3 and tuple(shape[1:]) == (1, 1):
        legal = ("none", "mean")
    if pool not in legal:
        raise InvalidArgument(
            f"--pool {pool} cannot be used: the model returns (N, {', '.join(map(str, shape))}); "
            f"legal: {', '.join(legal) or 'none, because no pooling gives (N, D)'}",
            pointer="/pool",
        )
    last = model.graph.output[0].name
    if pool == "cls":
        model.graph.initializer.append(numpy_helper.from_array(np.array(0), f"{PREFIX}first"))
        return ending(model, [helper.make_node("Gather", [last, f"{PREFIX}first"], [f"{PREFIX}pooled"], axis=1)])
    if len(shape) == 1:
        return model
    steps = [helper.make_node("Transpose", [last], [f"{PREFIX}turned"], perm=[0, 2, 1])] if len(shape) == 2 else []
    before = steps[-1].output[0] if steps else last
    steps.append(helper.make_node("GlobalAveragePool", [before], [f"{PREFIX}averaged"]))
    steps.append(helper.make_node("Flatten", [f"{PREFIX}averaged"], [f"{PREFIX}pooled"], axis=1))
    return ending(model, steps)


def with_float_output(model: ModelProto, dim: int, *, unit: bool) -> ModelProto:
    """Declare the output float32 (N, `dim`), normalised to length 1 if `unit`."""
    steps, last = [], model.graph.output[0].name
    if model.graph.output[0].type.tensor_type.elem_type != TensorProto.FLOAT:
        steps.append(helper.make_node("Cast", [last], [f"{PREFIX}float"], to=TensorProto.FLOAT))
    if unit:
        before = steps[-1].output[0] if steps else last
        steps.append(helper.make_node("LpNormalization", [before], [f"{PREFIX}unit"], axis=1, p=2))
    if steps:
        model = ending(model, steps, TensorProto.FLOAT)
    _declare(model.graph.output[0], (BATCH_AXIS, dim))
    return model


def ending(model: ModelProto, steps: Sequence[Any], kind: int | None = None) -> ModelProto:
    """Append nodes after the output; the output of the last node becomes the model's."""
    kind = kind or model.graph.output[0].type.tensor_type.elem_type
    model.graph.node.extend(steps)
    _keep(model.graph.output, lambda _: False)
    model.graph.output.append(helper.make_tensor_value_info(steps[-1].output[0], kind, None))
    return model


def _declared_free(model: ModelProto) -> ModelProto:
    """Declare the first axis free; if sizes inside the graph are fixed too, the model fails when it is run."""
    made = _copy(model)
    sides = shape_of(made.graph.input[0])
    _declare(made.graph.input[0], (BATCH_AXIS, *(side or f"side{axis}" for axis, side in enumerate(sides[1:]))))
    made.graph.output[0].type.tensor_type.ClearField("shape")
    del made.graph.value_info[:]
    return made


def _looped(model: ModelProto, image: Sequence[int], made: Sequence[int]) -> ModelProto:
    """A model that runs `model` on each image of a batch in a loop: always exact, but slower."""
    body, domains = _copy(model).graph, list(model.opset_import)
    given, gives = body.input[0].name, body.output[0]
    kind, last = gives.type.tensor_type.elem_type, gives.name
    for name, shape in (("one", (1, *image)), ("all", tuple(made))):
        body.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"{PREFIX}{name}"))
    body.node.insert(0, helper.make_node("Reshape", [f"{PREFIX}image", f"{PREFIX}one"], [given]))
    body.node.append(helper.make_node("Reshape", [last, f"{PREFIX}all"], [f"{PREFIX}row"]))
    _keep(body.input, lambda _: False)
    _keep(body.output, lambda _: False)
    body.input.append(helper.make_tensor_value_info(f"{PREFIX}image", TensorProto.FLOAT, tuple(image)))
    body.output.append(helper.make_tensor_value_info(f"{PREFIX}row", kind, tuple(made)))
    node = helper.make_node("Scan", [f"{PREFIX}images"], [f"{PREFIX}rows"], body=body, num_scan_inputs=1)
    outer = helper.make_graph(
        [node],
        "looped",
        [helper.make_tensor_value_info(f"{PREFIX}images", TensorProto.FLOAT, (BATCH_AXIS, *image))],
        [helper.make_tensor_value_info(f"{PREFIX}rows", kind, (BATCH_AXIS, *made))],
    )
    wrapped = helper.make_model(outer, opset_imports=domains, ir_version=model.ir_version)
    wrapped.functions.extend(model.functions)
    return wrapped


def shape_of(value: Any) -> list[int | None]:
    """The sizes of an input or output; None for a free size, which some exporters write as -1."""
    return [side.dim_value if side.dim_value > 0 else None for side in value.type.tensor_type.shape.dim]


def _declare(value: Any, shape: Sequence[int | str | None]) -> None:
    kind, name = value.type.tensor_type.elem_type, value.name
    value.CopyFrom(helper.make_tensor_value_info(name, kind, shape))


def _fits(declared: Sequence[int | None], size: Sequence[int]) -> bool:
    return all(side in {None, wanted} for side, wanted in zip(declared, size, strict=True))


def _keep(values: Any, wanted: Any) -> None:
    kept = [value for value in values if wanted(value)]
    del values[:]
    values.extend(kept)


def _copy(model: ModelProto) -> ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied
