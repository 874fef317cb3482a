"""Multiply-accumulates against graphs counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from index.errors import InvalidVersionFolder
from index.evaluation.macs import count_macs, encoder_macs
from index.version_folder.folder import load_version


def save(path: Path, nodes: list[Any], input_shape: tuple[Any, ...], **arrays: np.ndarray) -> Path:
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, input_shape)
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    constants = [numpy_helper.from_array(a.astype(np.float32), name) for name, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", [given], [out], constants)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("attributes", "weight", "expected"),
    [
        # 3x3 over 8x8 with padding: 8 * 8 places * 6 kernels * (2 * 9) numbers.
        ({"pads": [1, 1, 1, 1]}, (6, 2, 3, 3), 8 * 8 * 6 * 18),
        # Without padding 6 x 6 places, with stride 2 then 3 x 3.
        ({}, (6, 2, 3, 3), 6 * 6 * 6 * 18),
        ({"strides": [2, 2]}, (6, 2, 3, 3), 3 * 3 * 6 * 18),
        # Depthwise: each kernel sees one channel.
        ({"pads": [1, 1, 1, 1], "group": 2}, (2, 1, 3, 3), 8 * 8 * 2 * 9),
        ({}, (5, 2, 1, 1), 8 * 8 * 5 * 2),
    ],
)
def test_a_convolution(tmp_path: Path, attributes: dict[str, Any], weight: tuple[int, ...], expected: int) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["out"], **attributes)
    model = save(tmp_path / "m.onnx", [node], ("N", 2, 8, 8), w=np.zeros(weight))

    assert count_macs(model, {"x": (1, 2, 8, 8)}) == expected
    assert count_macs(model, {"x": (4, 2, 8, 8)}) == 4 * expected


def test_a_transposed_convolution_counts_each_input_number_times_its_kernel(tmp_path: Path) -> None:
    node = helper.make_node("ConvTranspose", ["x", "w"], ["out"], strides=[2, 2])
    model = save(tmp_path / "m.onnx", [node], ("N", 2, 4, 4), w=np.zeros((2, 3, 2, 2)))

    assert count_macs(model, {"x": (1, 2, 4, 4)}) == 2 * 4 * 4 * 3 * 2 * 2


@pytest.mark.parametrize(
    ("transposed", "given", "weight"),
    [({}, (1, 5), (5, 7)), ({"transB": 1}, (1, 5), (7, 5)), ({"transA": 1}, (5, 1), (5, 7))],
)
def test_a_dense_layer(
    tmp_path: Path, transposed: dict[str, int], given: tuple[int, int], weight: tuple[int, int]
) -> None:
    node = helper.make_node("Gemm", ["x", "w", "b"], ["out"], **transposed)
    model = save(tmp_path / "m.onnx", [node], ("N", "M"), w=np.zeros(weight), b=np.zeros(7))

    assert count_macs(model, {"x": given}) == 35


def test_layers_add_up_and_what_is_no_product_of_matrices_is_free(tmp_path: Path) -> None:
    """Attention: (3, 4) @ (4, 6) twice, then scores (3, 3) of width 6, softmax, and their product with (3, 6)."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"]),
        helper.make_node("MatMul", ["x", "w"], ["k"]),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"], axis=2),
        helper.make_node("MatMul", ["p", "q"], ["out"]),
    ]
    model = save(tmp_path / "m.onnx", nodes, ("N", 3, 4), w=np.zeros((4, 6)))

    assert count_macs(model, {"x": (1, 3, 4)}) == 2 * 3 * 4 * 6 + 3 * 3 * 6 + 3 * 3 * 6
    # Exported for one image at a time.
    declared = onnx.load(model)
    declared.graph.value_info.append(helper.make_tensor_value_info("q", TensorProto.FLOAT, (1, 3, 6)))
    declared.graph.output[0].CopyFrom(helper.make_tensor_value_info("out", TensorProto.FLOAT, (1, 3, 6)))
    onnx.save(declared, model)
    assert count_macs(model, {"x": (4, 3, 4)}) == 4 * count_macs(model, {"x": (1, 3, 4)})


def test_a_flattened_image_keeps_its_size(tmp_path: Path) -> None:
    nodes = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("MatMul", ["f", "w"], ["out"])]
    model = save(tmp_path / "m.onnx", nodes, ("N", 1, 8, 8), w=np.zeros((64, 5)))

    assert count_macs(model, {"x": (1, 1, 8, 8)}) == 64 * 5


def test_a_shape_that_only_running_tells_is_an_error_that_names_it(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["n"]), helper.make_node("Cast", ["n"], ["f"], to=1)]
    nodes.append(helper.make_node("MatMul", ["w", "f"], ["out"], name="last"))
    model = save(tmp_path / "m.onnx", nodes, ("N", 5), w=np.zeros((3, 2)))
    with pytest.raises(InvalidVersionFolder, match=r"m\.onnx: the shape of '(f|out)', used by MatMul 'last'"):
        count_macs(model, {"x": (1, 5)})


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_shape_that_follows_from_a_range_is_computed(tmp_path: Path, is_declared: bool) -> None:
    """A 1 x 1 convolution of 3 channels to 16 over 8 x 8 places, then 1,024 numbers to 5."""
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"]),
        helper.make_node("Shape", ["c"], ["s"]),
        helper.make_node("ReduceProd", ["s"], ["count"], keepdims=0),
        helper.make_node("Range", ["zero", "count", "one"], ["places"]),
        helper.make_node("Reshape", ["c", "flat"], ["f"]),
        helper.make_node("Gather", ["f", "places"], ["g"]),
        helper.make_node("Reshape", ["g", "rows"], ["r"]),
        helper.make_node("Gemm", ["r", "w"], ["out"], name="last"),
    ]
    path = save(tmp_path / "m.onnx", nodes, ("N", 3, 8, 8), k=np.zeros((16, 3, 1, 1)), w=np.zeros((1024, 5)))
    model = onnx.load(path)
    for name, value in {"zero": 0, "one": 1, "flat": [-1], "rows": [-1, 1024]}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    if is_declared:  # as models of the first ONNX versions declare their weights
        model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (1024, 5)))
    onnx.save(model, path)

    expected = 64 * 16 * 3 + 1024 * 5
    assert count_macs(path, {"x": (1, 3, 8, 8)}) == expected
    assert count_macs(path, {"x": (4, 3, 8, 8)}) == 4 * expected


def test_an_encoder_that_torch_exported_with_as_strided_is_counted() -> None:
    """photos-v2, a slim ResNet on 64 x 64 pixels: a stem of stride 4, and three blocks, two of them with shortcuts."""
    version = load_version(Path(__file__).parents[3] / "examples" / "photos-v2")
    stem = 16 * 16 * 32 * 3 * 7 * 7
    first = 16 * 16 * 32 * (32 + 32) * 9
    second = 8 * 8 * 64 * (32 * 9 + 64 * 9 + 32)
    third = 4 * 4 * 96 * (64 * 9 + 96 * 9 + 64)

    assert encoder_macs(version) == stem + first + second + third + 96 * 96


def inside(op: str, bodies: dict[str, list[Any]], taken: list[str], given: list[Any], **about: Any) -> Any:
    made = [helper.make_tensor_value_info(name, *kind) for name, kind in (("on", (9, [])), ("y", (1, None)))]
    made = made if op == "Loop" else made[1:]
    graphs = {name: helper.make_graph(nodes, name, given, made) for name, nodes in bodies.items()}
    return helper.make_node(op, taken, ["out"], name="inner", **graphs, **about)


ROW = [helper.make_tensor_value_info("row", TensorProto.FLOAT, None)]
LOOP = [helper.make_tensor_value_info("i", TensorProto.INT64, []), helper.make_tensor_value_info("c", 9, [])]
ONCE = [helper.make_node("MatMul", ["x", "w"], ["y"])]
NEVER = [helper.make_node("Identity", ["x"], ["y"])]
GO_ON = helper.make_node("Identity", ["c"], ["on"])
STOP = helper.make_node("Not", ["c"], ["on"])


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        # Three rows of (1, 4) by (4, 6).
        (
            inside(
                "Scan",
                {"body": [helper.make_node("MatMul", ["row", "w"], ["y"])]},
                ["x"],
                ROW,
                num_scan_inputs=1,
                scan_input_axes=[1],
            ),
            3 * 4 * 6,
        ),
        (inside("If", {"then_branch": ONCE, "else_branch": ONCE}, ["t"], []), 3 * 4 * 6),
        (inside("If", {"then_branch": ONCE, "else_branch": NEVER}, ["t"], []), 3 * 4 * 6),
        (inside("If", {"then_branch": ONCE, "else_branch": NEVER}, ["asked"], []), "which branch If 'inner' takes"),
        (inside("Loop", {"body": [GO_ON, *ONCE]}, ["n", "t"], LOOP), 5 * 3 * 4 * 6),
        (inside("Loop", {"body": [GO_ON, *ONCE]}, ["n", ""], LOOP), 5 * 3 * 4 * 6),
        (inside("Loop", {"body": [GO_ON, *ONCE]}, ["", "t"], LOOP), "how often Loop 'inner' runs"),
        (inside("Loop", {"body": [STOP, *ONCE]}, ["n", "t"], LOOP), "how often Loop 'inner' runs"),
        (inside("Loop", {"body": [STOP, *NEVER]}, ["", "t"], LOOP), 0),
    ],
)
def test_what_a_node_runs_counts_as_often_as_it_does(tmp_path: Path, node: Any, expected: int | str) -> None:
    model = onnx.load(save(tmp_path / "m.onnx", [node], ("N", 3, 4), w=np.zeros((4, 6))))
    for name, value in (("n", np.array(5)), ("t", np.array(True))):
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    model.graph.input.append(helper.make_tensor_value_info("asked", TensorProto.BOOL, []))
    onnx.save(model, tmp_path / "m.onnx")

    if isinstance(expected, int):
        assert count_macs(tmp_path / "m.onnx", {"x": (1, 3, 4)}) == expected
    else:
        with pytest.raises(InvalidVersionFolder, match=expected):
            count_macs(tmp_path / "m.onnx", {"x": (1, 3, 4)})
