"""Version.create: what it writes a service takes, and what cannot be written leaves nothing behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from index.creation import onnx_graph, probes
from index.creation.onnx_file import OnnxFile
from index.creation.supplied import Supplied
from index.encoders.encoder import Encoder, verify_version
from index.encoders.image import decode_image
from index.errors import InvalidArgument, InvalidVersionFolder, RegraftError
from index.isolated import Limits, verify_isolated
from index.version import Card, Preprocess
from regraft import Version

SPEC = Preprocess(8, 8, "RGB", 9, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def save(
    path: Path, nodes: list, given: tuple, made: tuple, *, kind: int = TensorProto.FLOAT, opset: int = 17, **arrays
) -> Path:
    """An ONNX model `images` -> `made`, with a second output `other`."""
    nodes.append(helper.make_node("Identity", ["images"], ["other"]))
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("images", kind, given)],
        [helper.make_tensor_value_info("made", kind, made), helper.make_tensor_value_info("other", kind, given)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path)
    return path


def linear(
    path: Path, batch: int | str = "N", *, fixed: bool = False, kind: int = TensorProto.FLOAT, scale: float = 1.0
) -> Path:
    """(batch, 3, 8, 8) -> (batch, 5); `fixed` flattens to a shape that holds the batch as a number."""
    how = helper.make_node("Flatten", ["images"], ["flat"])
    if fixed:
        how = helper.make_node("Reshape", ["images", "shape"], ["flat"])
    dtype = np.float16 if kind == TensorProto.FLOAT16 else np.float32
    arrays = {"weight": (scale * weights(192, 5)).astype(dtype), "shape": np.array([1, 192])}
    nodes = [how, helper.make_node("MatMul", ["flat", "weight"], ["made"])]
    return save(path, nodes, (batch, 3, 8, 8), (batch, 5), kind=kind, **arrays)


def old_linear(path: Path) -> Path:
    """`linear`, fixed inside, as files were before version 4 of the format: initializers are inputs too."""
    model = onnx.load(linear(path, 1, fixed=True))
    model.ir_version, model.opset_import[0].version = 3, 8
    for array in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(array.name, array.data_type, array.dims))
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def conv(
    path: Path, made: tuple, *, last: bool = False, tokens: bool = False, averaged: bool = False, turned: bool = False
) -> Path:
    """Patches of 4 x 4 pixels -> (N, 6, 2, 2), or tokens (N, 4, 6); `last`: of (N, H, W, C).

    `averaged`: their mean, (N, 6, 1, 1). `turned`: maps with channels last.
    """
    nodes = [helper.make_node("Transpose", ["images"], ["first"], perm=[0, 3, 1, 2])] if last else []
    nodes.append(helper.make_node("Conv", ["first" if last else "images", "weight"], ["maps"], strides=[4, 4]))
    arrays = {"weight": weights(6, 3, 4, 4)}
    if tokens:
        arrays["shape"] = np.array([0, 6, 4])
        nodes.append(helper.make_node("Reshape", ["maps", "shape"], ["rows"]))
        nodes.append(helper.make_node("Transpose", ["rows"], ["made"], perm=[0, 2, 1]))
    else:
        nodes.append(helper.make_node("GlobalAveragePool" if averaged else "Identity", ["maps"], ["few"]))
        perm = [0, 2, 3, 1] if turned else [0, 1, 2, 3]
        nodes.append(helper.make_node("Transpose", ["few"], ["made"], perm=perm))
    return save(path, nodes, (1, 8, 8, 3) if last else (1, 3, 8, 8), made, **arrays)


def cast(path: Path, kind: int) -> Path:
    """Of pixels (N, 8, 8, 3) in a type: their numbers from 0 to 255, times weights."""
    nodes = [
        helper.make_node("Cast", ["images"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["numbers"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["made"]),
    ]
    model = onnx.load(save(path, nodes, ("N", 8, 8, 3), ("N", 5), kind=kind, weight=weights(192, 5)))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    onnx.save(model, path)
    return path


def patches(pixels: np.ndarray) -> np.ndarray:
    """The plain twin of `conv`: (C, H, W) -> tokens (4, 6)."""
    cut = [pixels[:, y : y + 4, x : x + 4].ravel() for y in (0, 4) for x in (0, 4)]
    return np.stack(cut) @ weights(6, 3, 4, 4).reshape(6, -1).T


def mean(path: Path, axes: list[int] | None = None, *, opset: int = 17) -> Path:
    """(N, 3, 8, 8) -> the mean over `axes`, without them; over all of them a number."""
    node = helper.make_node("ReduceMean", ["images"], ["made"], keepdims=0, **({"axes": axes} if axes else {}))
    return save(path, [node], ("N", 3, 8, 8), (), opset=opset)


MODELS = {
    "free": (linear, "none", lambda x: x.ravel() @ weights(192, 5)),
    "declared -1": (lambda path: linear(path, -1), "none", lambda x: x.ravel() @ weights(192, 5)),
    "declared fixed": (lambda path: linear(path, 1), "none", lambda x: x.ravel() @ weights(192, 5)),
    "fixed inside": (lambda path: linear(path, 1, fixed=True), "none", lambda x: x.ravel() @ weights(192, 5)),
    "fixed inside, of 2018": (old_linear, "none", lambda x: x.ravel() @ weights(192, 5)),
    "half": (lambda path: linear(path, kind=TensorProto.FLOAT16), "none", lambda x: x.ravel() @ weights(192, 5)),
    "maps": (lambda path: conv(path, (1, 6, 2, 2)), "mean", lambda x: patches(x).mean(axis=0)),
    "channels last": (lambda path: conv(path, (1, 6, 2, 2), last=True), "mean", lambda x: patches(x).mean(axis=0)),
    "maps, channels last": (
        lambda path: conv(path, (1, 2, 2, 6), last=True, turned=True),
        "mean",
        lambda x: patches(x).mean(axis=0),
    ),
    "one pixel, channels last": (
        lambda path: conv(path, (1, 1, 1, 6), last=True, averaged=True, turned=True),
        "none",
        lambda x: patches(x).mean(axis=0),
    ),
    "tokens": (lambda path: conv(path, (1, 4, 6), tokens=True), "mean", lambda x: patches(x).mean(axis=0)),
    "class token": (lambda path: conv(path, (1, 4, 6), tokens=True), "cls", lambda x: patches(x)[0]),
}


@pytest.mark.parametrize(
    ("model", "space"), [*((model, "cosine") for model in MODELS), ("fixed inside", "l2"), ("tokens", "l2")]
)
def test_an_onnx_file_becomes_a_version_that_a_registration_takes(tmp_path, model, space, make_image):
    build, pool, twin = MODELS[model]
    source = OnnxFile(build(tmp_path / "model.onnx"), SPEC, {"kind": space}, pool, "made")

    made = Version.create(tmp_path / "mine", source)

    assert verify_isolated(made.folder, {}, Limits(60)).name == "mine"
    assert made.card.metrics["parity"]["images"]["inputs"] == probes.PROBES
    pixels = np.random.default_rng(0).normal(size=(5, 3, 8, 8)).astype(np.float32)
    expected = np.stack([twin(image) for image in pixels])
    if space == "cosine":
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    given = Encoder(made).vectors(pixels)
    np.testing.assert_allclose(given, expected, atol=(2e-2 if model == "half" else 1e-5) * np.abs(expected).max())


@pytest.mark.parametrize("kind", [TensorProto.UINT8, TensorProto.DOUBLE])
def test_a_model_of_another_type_of_pixels_gets_them_exactly(tmp_path, kind):
    source = cast(tmp_path / "model.onnx", kind)
    images = np.arange(384).reshape(2, 8, 8, 3) % 256  # all numbers: each may be rounded wrongly
    scale = 1 if kind == TensorProto.UINT8 else 255

    made = Version.create(tmp_path / "mine", OnnxFile(source, Preprocess(8, 8), {"kind": "l2"}, output="made"))

    given = Encoder(made).vectors((images / 255).astype(np.float32).transpose(0, 3, 1, 2))
    expected = (images / scale).reshape(2, -1) @ weights(192, 5)
    np.testing.assert_allclose(given, expected, atol=1e-5 * np.abs(expected).max())


def test_pixels_that_a_model_takes_as_whole_numbers_are_not_normalised(tmp_path):
    source = cast(tmp_path / "model.onnx", TensorProto.UINT8)

    with pytest.raises(InvalidArgument, match=r"uint8, pixels from 0 to 255.*leave out mean and std"):
        Version.create(tmp_path / "mine", OnnxFile(source, SPEC, output="made"))


@pytest.mark.parametrize(
    ("shape", "last"),
    [
        ((7, 7, 1280), True),
        ((1280, 7, 7), False),
        ((16, 8, 24), True),
        ((24, 16, 8), False),
        ((13, 7, 24), True),  # rounded up by the model
        ((1, 1, 24), True),
        ((24, 1, 1), False),
        ((8, 4, 2), False),  # either
        ((2048, 6, 1), False),  # stripes
        ((7, 7), False),
    ],
)
def test_channels_are_last_where_only_the_first_two_sides_are_an_images(shape, last):
    square = shape[:2] == (7, 7) or shape[1:] == (7, 7)
    spec = Preprocess(224, 224) if square else Preprocess(256, 128)

    assert onnx_graph.has_channels_last(shape, spec) is last


@pytest.mark.parametrize("model", ["fixed inside", "half", "class token"])
def test_the_encoder_of_a_version_may_become_another_version(tmp_path, model):
    build, pool, _ = MODELS[model]
    first = Version.create(tmp_path / "first", OnnxFile(build(tmp_path / "model.onnx"), SPEC, pool=pool, output="made"))

    again = Version.create(tmp_path / "again", OnnxFile(first.folder / "encoder.onnx", SPEC))

    pixels = np.random.default_rng(0).normal(size=(5, 3, 8, 8)).astype(np.float32)
    np.testing.assert_allclose(Encoder(again).vectors(pixels), Encoder(first).vectors(pixels), atol=1e-6)


@pytest.mark.parametrize("space", [{"kind": "cosine"}, {"kind": "l2"}, {"kind": "lorentz", "curvature": 0.5}])
def test_vectors_made_elsewhere_need_a_dimension_and_a_space(tmp_path, space):
    made = Version.create(tmp_path / "api", Supplied(768, space))

    assert (made.name, made.card.dim, dict(made.card.space), made.card.method) == ("api", 768, space, "supplied")
    assert verify_version(made.folder, {}).card == made.card == Version.load(made.folder).card


WRONG = {
    "dim": (lambda path: Supplied(0), "dim must be 1 to 65536"),
    "space": (lambda path: Supplied(3, {"kind": "dot"}), "space.kind must be one of cosine, l2, lorentz"),
    "file": (lambda path: OnnxFile(path / "none.onnx", SPEC), "none.onnx cannot be read"),
    "garbage": (lambda path: OnnxFile(Path(__file__), SPEC), "cannot be read as an ONNX model"),
    "size": (
        lambda path: OnnxFile(linear(path / "m"), Preprocess(9, 8), output="made"),
        r"input is \[None, 3, 8, 8\], but its preprocess gives \(N, 3, 9, 8\)",
    ),
    "output": (lambda path: OnnxFile(linear(path / "m"), SPEC), "must name one of the model's outputs: made, other"),
    "batch": (lambda path: OnnxFile(linear(path / "m", 4), SPEC, output="made"), "batch size is 4; legal: 1"),
    "shape": (
        lambda path: OnnxFile(mean(path / "m", [0]), SPEC, output="made"),
        r"returns shape \(3, 8, 8\) for one image",
    ),
    "number": (lambda path: OnnxFile(mean(path / "m"), SPEC, output="made"), r"returns shape \(\) for one image"),
    "old": (
        lambda path: OnnxFile(
            save(path / "m", [helper.make_node("Own", ["images"], ["made"])], (1,), (1,), opset=9), SPEC
        ),
        "has opset 9 and cannot be converted to 11",
    ),
    "zeros": (
        lambda path: OnnxFile(linear(path / "m", scale=0), SPEC, output="made"),
        "returns only zeros for 100 of 100 images: these have no direction",
    ),
    "the same": (
        lambda path: OnnxFile(linear(path / "m", scale=0), SPEC, {"kind": "l2"}, output="made"),
        "m returns the same embedding for all 100 inputs",
    ),
    "pool": (
        lambda path: OnnxFile(conv(path / "m", (1, 6, 2, 2)), SPEC, output="made"),
        r"pool none cannot be used: the model returns \(N, 6, 2, 2\); legal: mean",
    ),
}


@pytest.mark.parametrize("field", WRONG)
def test_what_is_wrong_is_named_and_nothing_is_left(tmp_path, field):
    build, message = WRONG[field]
    source = build(tmp_path)
    (tmp_path / "versions").mkdir()

    with pytest.raises(RegraftError, match=message):
        Version.create(tmp_path / "versions" / "mine", source)

    assert list((tmp_path / "versions").iterdir()) == []


def test_a_folder_that_is_there_is_replaced_only_when_asked_to_and_only_by_a_whole_one(tmp_path):
    there = Version.create(tmp_path / "v", Supplied(3)).folder

    with pytest.raises(InvalidArgument, match="already exists; --overwrite"):
        Version.create(there, Supplied(4))
    with pytest.raises(InvalidVersionFolder):
        Version.create(there, Supplied(-1), overwrite=True)
    assert Version.load(there).card.dim == 3
    assert Version.create(there, Supplied(5), overwrite=True).card.dim == 5
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


@dataclass
class Lying:
    """A source whose encoder is not what its card says."""

    def write(self, folder: Path, name: str) -> Card:
        linear(folder / "encoder.onnx")
        return Card(name, 5, {"kind": "cosine"}, SPEC)


def test_what_no_registration_would_take_is_not_written(tmp_path):
    with pytest.raises(InvalidVersionFolder, match=r"probe.npz is missing"):
        Version.create(tmp_path / "v", Lying())
    assert list(tmp_path.iterdir()) == []


def test_the_probes_are_of_many_sizes_modes_and_turns_and_the_same_each_time():
    images = [decode_image(data) for data in probes.probe_files()]
    texts = probes.probe_texts()

    assert len(images) == probes.PROBES == len(set(texts))
    assert len({image.size for image in images}) >= len(probes.SIZES)
    assert {"RGB", "L", "RGBA", "LA", "CMYK", "1"} <= {image.mode for image in images}
    assert probes.probe_files.__wrapped__() == probes.probe_files()
    assert min(map(len, texts)) <= 2 < 3000 < max(map(len, texts)) <= 10_000


def test_a_difference_from_the_source_is_told_and_a_large_one_refused():
    some = np.array([[1, 0], [0, 1], [1, 1], [1, 0]], np.float32)

    parity = probes.compare(some + np.float32(5e-4), some, "timm", "encoder.onnx")

    assert (parity.inputs, parity.largest_difference) == (4, 0.0005)
    for other in (some * 1.01, some * np.nan):
        with pytest.raises(probes.ParityError, match=r"encoder\.onnx differs from timm"):
            probes.compare(other, some, "timm", "encoder.onnx")
