"""Version folders and images for speed benchmarks: real architectures, random weights."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from index.version import EDGE_MODEL, ENCODER, PROBE, Card, Edge, EdgeKind, Preprocess, Score, Version
from index.version_folder.folder import load_version, write_card, write_edge

SIDE = 224
SMALL_EDGE = (512,)
"""Hidden layers of an item edge 128 -> 256."""
FCT_EDGE = (2200, 2200)
"""The same with 5.7 million parameters, as FCT's largest."""
RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    """Normal random weights (out, in, ...), the smaller the more inputs there are."""
    fan = int(np.prod(shape[1:])) or 1
    return RNG.normal(scale=fan**-0.5, size=shape).astype(np.float32)


class Net:
    """Builds an ONNX graph node by node."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.arrays: list[Any] = []

    def add(self, kind: str, inputs: list[str], arrays: dict[str, np.ndarray] | None = None, **attributes: Any) -> str:
        """A node of these inputs and arrays; the name of its output."""
        number = len(self.nodes)
        names = []
        for name, array in (arrays or {}).items():
            names.append(f"{name}{number}")
            self.arrays.append(numpy_helper.from_array(array, names[-1]))
        self.nodes.append(helper.make_node(kind, [*inputs, *names], [f"y{number}"], name=f"n{number}", **attributes))
        return f"y{number}"

    def conv(self, x: str, into: int, out: int, size: int, stride: int = 1, relu: bool = True) -> str:
        """A convolution that keeps the size, or divides it by the stride."""
        arrays = {"w": weights(out, into, size, size)}
        y = self.add("Conv", [x], arrays, strides=[stride] * 2, pads=[size // 2] * 4, kernel_shape=[size] * 2)
        return self.add("Relu", [y]) if relu else y


def resnet50(net: Net) -> tuple[str, int]:
    """ResNet-50 without BatchNorm; the name of its features and how many there are."""
    x = net.add("MaxPool", [net.conv("image", 3, 64, 7, 2)], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    width = 64
    for stage, (blocks, inner) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = net.conv(
                net.conv(net.conv(x, width, inner, 1), inner, inner, 3, stride), inner, 4 * inner, 1, relu=False
            )
            x = x if block else net.conv(x, width, 4 * inner, 1, stride, relu=False)
            width = 4 * inner
            x = net.add("Relu", [net.add("Add", [x, y])])
    return net.add("Flatten", [net.add("GlobalAveragePool", [x])]), width


def small(net: Net) -> tuple[str, int]:
    """Three convolutions, likewise."""
    x = net.conv(net.conv(net.conv("image", 3, 16, 7, 4), 16, 32, 3, 4), 32, 64, 3, 2)
    return net.add("Flatten", [net.add("GlobalAveragePool", [x])]), 64


def write_version(
    folder: Path,
    name: str,
    dim: int,
    body: Callable[[Net], tuple[str, int]],
    old: Version | None,
    hidden: tuple[int, ...] = SMALL_EDGE,
) -> Version:
    """A version folder of this body and, where there is an old version, a `forward` edge of these hidden layers."""
    folder.mkdir()
    net = Net()
    features, width = body(net)
    last = net.add("MatMul", [features], {"w": weights(width, dim)})
    net.nodes.append(helper.make_node("LpNormalization", [last], ["out"], axis=1))
    save(folder / ENCODER, net, {"image": ("N", 3, SIDE, SIDE)}, dim)
    spec = Preprocess(height=SIDE, width=SIDE, resize=256, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    card = Card(name, dim, {"kind": "cosine"}, spec, method="random")
    if old is not None:
        write_edge(folder, Edge(name, old.name, EdgeKind.FORWARD, {"cmc@1": Score(0.5, 0.4, 0.6)}, old.card.encoder))
        mlp = Net()
        out, width = "embedding", old.card.dim
        for size in hidden:
            out, width = mlp.add("Relu", [mlp.add("MatMul", [out], {"w": weights(width, size)})]), size
        out = mlp.add("MatMul", [out], {"w": weights(width, dim)})
        mlp.nodes.append(helper.make_node("LpNormalization", [out], ["out"], axis=1))
        model = folder / "edges" / old.name / EDGE_MODEL[EdgeKind.FORWARD]
        save(model, mlp, {"embedding": ("N", old.card.dim)}, dim)
    import onnxruntime as ort

    image = RNG.normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)
    (probe,) = ort.InferenceSession(str(folder / ENCODER)).run(None, {"image": image})
    np.savez(folder / PROBE, image=image, embedding=probe)
    write_card(folder, card)
    return load_version(folder)


def save(path: Path, net: Net, inputs: dict[str, tuple[Any, ...]], dim: int) -> None:
    """The graph as an ONNX model; its output is (N, dim)."""
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ("N", dim))
    graph = helper.make_graph(net.nodes, "g", given, [out], net.arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def picture(number: int) -> bytes:
    """A JPEG of 320 pixels, 8 x 8 blocks of random colours."""
    rng = np.random.default_rng(number)
    pixels = np.kron(rng.integers(0, 255, (8, 8, 3)), np.ones((40, 40, 1))).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=90)
    return stream.getvalue()
