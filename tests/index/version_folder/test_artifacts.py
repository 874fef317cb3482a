"""index.version_folder.artifacts: binary files from strangers."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from index.errors import InvalidVersionFolder
from index.version_folder.artifacts import legal_opsets, open_model, read_arrays

OPSETS = legal_opsets()


def build_model(*, opset: int = 17, operator: str = "Relu", nested: Any = None, weight: Any = None) -> Any:
    nodes = [helper.make_node(operator, ["x"], ["y"])]
    if nested is not None:
        nodes.append(helper.make_node("Constant", [], ["c"], value=nested))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ("N", 2)) for n in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [weight] if weight is not None else [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def outside(name: str) -> Any:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=name)
    return tensor


def save(folder: Path, model: Any) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_a_plain_model_opens_and_runs(tmp_path: Path) -> None:
    session = open_model(save(tmp_path, build_model()), "m.onnx")
    x = np.array([[-1, 2]], np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], [[0, 2]])


@pytest.mark.parametrize("opset", [1, OPSETS.start - 1, OPSETS.stop])
def test_an_opset_outside_the_legal_range_is_refused(tmp_path: Path, opset: int) -> None:
    with pytest.raises(InvalidVersionFolder, match=rf"m.onnx has opset {opset}; legal: {OPSETS.start} to"):
        open_model(save(tmp_path, build_model(opset=opset)), "m.onnx")


@pytest.mark.parametrize("place", ["weight", "nested"])
@pytest.mark.parametrize("name", ["secret.bin", "../secret.bin", "/etc/passwd"])
def test_external_data_is_refused_wherever_it_hides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str
) -> None:
    (tmp_path / "secret.bin").write_bytes(np.ones(4, np.float32).tobytes())
    monkeypatch.chdir(tmp_path)  # onnxruntime would look here
    model = build_model(**{place: outside(name)})
    with pytest.raises(InvalidVersionFolder, match="external data"):
        open_model(save(tmp_path, model), "m.onnx")


def test_external_data_in_a_subgraph_is_refused(tmp_path: Path) -> None:
    branch = helper.make_graph([helper.make_node("Identity", ["w"], ["out"])], "branch", [], [], [outside("w.bin")])
    model = build_model()
    model.graph.node.append(helper.make_node("If", ["y"], ["z"], then_branch=branch, else_branch=branch))
    with pytest.raises(InvalidVersionFolder, match="external data"):
        open_model(save(tmp_path, model), "m.onnx")


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08" * 100])
def test_bytes_that_are_no_model_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(InvalidVersionFolder, match=r"m\.onnx") as caught:
        open_model(tmp_path / "m.onnx", "m.onnx")
    assert caught.value.pointer == "/m.onnx"


def test_an_unknown_operator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidVersionFolder, match="cannot be loaded"):
        open_model(save(tmp_path, build_model(operator="NoSuchOperator")), "m.onnx")


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def test_arrays_come_back_as_float32_and_optional_ones_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npz(weight=np.ones((2, 3)), unused=np.ones(1)))
    found = read_arrays(tmp_path / "a.npz", "a.npz", {"weight": (2, 3), "bias": (3,)}, frozenset({"bias"}))
    assert list(found) == ["weight"]
    assert found["weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable"),
        (b"PK\x03\x04 broken", "not a readable"),
        (npz(weight=np.ones((2, 3)))[:-40], "not a readable"),
        (npz(weight=np.array([[object()] * 3] * 2)), "must be floats"),  # a pickle, never loaded
        (npz(other=np.ones((2, 3))), "has no array 'weight'"),
        (npz(weight=np.ones((3, 2))), r"floats of shape \(2, 3\)"),
        (npz(weight=np.ones((2, 3), int)), "must be floats"),
        (npz(weight=np.full((2, 3), "x")), "must be floats"),
        (npz(weight=np.array([[1, 2, np.nan]] * 2)), "finite"),
    ],
)
def test_broken_arrays_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(InvalidVersionFolder, match=message):
        read_arrays(tmp_path / "a.npz", "a.npz", {"weight": (2, 3)})


def test_a_single_npy_array_is_not_an_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 3)))
    with pytest.raises(InvalidVersionFolder, match="not a readable"):
        read_arrays(tmp_path / "a.npy", "a.npy", {"weight": (2, 3)})


def test_a_flipped_byte_inside_a_compressed_array_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez_compressed(stream, weight=np.random.default_rng(0).normal(size=(2, 300)))
    content = bytearray(stream.getvalue())
    content[200] ^= 0xFF
    (tmp_path / "a.npz").write_bytes(bytes(content))
    with pytest.raises(InvalidVersionFolder, match="not a readable"):
        read_arrays(tmp_path / "a.npz", "a.npz", {"weight": (2, 300)})


def test_the_newest_legal_opset_is_what_the_onnx_package_defines() -> None:
    assert onnx.defs.onnx_opset_version() in OPSETS


def announced(path: Path, shape: tuple[int, ...], body: int, version: tuple[int, int] = (1, 0)) -> Path:
    """An .npz whose array `a` announces a shape, and holds so many bytes of zeros."""
    header = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode() + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header) if version == (1, 0) else body)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out, out.open("a.npy", "w") as stream:
        stream.write(b"\x93NUMPY" + bytes(version) + length + header)
        for _ in range(body >> 20):
            stream.write(bytes(1 << 20))
    return path


@pytest.mark.parametrize(
    ("shape", "version", "wanted", "message"),
    [
        ((1 << 24,), (1, 0), (3,), r"must be floats of shape \(3,\), not float32 of shape \(16777216,\)"),
        ((3,), (2, 0), (3,), r"version \(2, 0\)"),
        ((1 << 40,), (1, 0), (1 << 40,), "would have more than"),
    ],
    ids=["shape", "header", "both"],
)
def test_an_array_is_not_read_before_its_shape_is_known(
    tmp_path: Path, shape: tuple[int, ...], version: tuple[int, int], wanted: tuple[int, ...], message: str
) -> None:
    path = announced(tmp_path / "a.npz", shape, 64 << 20, version)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidVersionFolder, match=message):
            read_arrays(path, "a.npz", {"a": wanted})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_number_beyond_float32_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([1e300]))
    with pytest.raises(InvalidVersionFolder, match="a must be finite numbers"):
        read_arrays(tmp_path / "a.npz", "a.npz", {"a": (1,)})
