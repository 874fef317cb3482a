"""index.encoders.encoder: the card is a promise that loading and running hold the models to."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from index.encoders.encoder import BATCH, Encoder, _shades, verify_version
from index.encoders.image import preprocess_batch
from index.encoders.model import check_probe
from index.encoders.text import TextEncoder
from index.errors import DeviceUnavailable, InvalidArgument, InvalidVersionFolder, NoEncoder
from index.execution import Device, Execution
from index.version import ENCODER, PROBE, SIDE, Preprocess, Version
from index.version_folder.folder import write_card, write_edge
from staging.inputs.builders import SPEC
from staging.inputs.versions import change_model, rehash

MakeVersion = Callable[..., Version]
MakeImage = Callable[..., Image.Image]


def save_probe(folder: Path, **changed: np.ndarray | None) -> Version:
    with np.load(folder / PROBE) as stored:
        probe = {**stored, **changed}
    np.savez(folder / PROBE, **{name: array for name, array in probe.items() if array is not None})
    return rehash(folder)


@pytest.fixture
def images(make_image: MakeImage) -> list[Image.Image]:
    return [make_image(seed % 10, seed) for seed in range(2 * BATCH + 3)]


def weight(version: Version) -> np.ndarray:
    return numpy_helper.to_array(onnx.load(version.folder / ENCODER).graph.initializer[0])


@pytest.mark.parametrize("space", [{"kind": "cosine"}, {"kind": "l2"}, {"kind": "lorentz", "curvature": 0.5}])
def test_encoding_is_preprocessing_and_the_model(
    make_version: MakeVersion, images: list[Image.Image], tmp_path: Path, space: dict[str, Any]
) -> None:
    version = make_version(tmp_path / "v", "v", 5, space=space, side_dim=3)
    encoder = Encoder(version)
    given = encoder.encode(images)
    expected = preprocess_batch(images, encoder.spec).reshape(len(images), 64) @ weight(version)
    if space["kind"] == "cosine":
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(given.vectors, expected, atol=1e-5)
    assert given.vectors.dtype == np.float32
    assert given.side.shape == (len(images), 3)


def test_batches_do_not_change_the_answer(make_version: MakeVersion, images: list[Image.Image], tmp_path: Path) -> None:
    encoder = Encoder(make_version(tmp_path / "v", "v", 5), Execution(threads=2))
    together = encoder.encode(images).vectors
    alone = np.concatenate([encoder.encode([image]).vectors for image in images])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert encoder.encode(images).side is None


def test_no_images_give_no_vectors(make_version: MakeVersion, tmp_path: Path) -> None:
    given = Encoder(make_version(tmp_path / "v", "v", 5, side_dim=2)).encode([])
    assert given.vectors.shape == (0, 5)
    assert given.side.shape == (0, 2)


def test_one_encoder_serves_many_threads(make_version: MakeVersion, images: list[Image.Image], tmp_path: Path) -> None:
    encoder = Encoder(make_version(tmp_path / "v", "v", 5))
    expected = encoder.encode(images).vectors
    with ThreadPoolExecutor(4) as pool:
        for given in pool.map(encoder.encode, [images] * 8):
            np.testing.assert_array_equal(given.vectors, expected)


def test_pixels_of_another_shape_are_refused(make_version: MakeVersion, tmp_path: Path) -> None:
    encoder = Encoder(make_version(tmp_path / "v", "v", 5))
    for shape in [(2, 1, 8, 9), (1, 8, 8), (2, 3, 8, 8)]:
        with pytest.raises(InvalidArgument, match=r"shape \(N, 1, 8, 8\)"):
            encoder.encode_arrays(np.zeros(shape, np.float32))


def test_a_version_without_encoder_says_so(make_version: MakeVersion, tmp_path: Path) -> None:
    with pytest.raises(NoEncoder, match="'v' has no encoder"):
        Encoder(make_version(tmp_path / "v", "v", 5, encoder=False))
    assert verify_version(tmp_path / "v").name == "v"


def set_dim(place: str, axis: int, size: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        getattr(model.graph, place)[0].type.tensor_type.shape.dim[axis].dim_value = size

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_dim("input", 0, 1), r"input has shape \[1, 1, 8, 8\]; the card says \(N, 1, 8, 8\) with N free"),
        (lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", TensorProto.DOUBLE), "cannot be loaded"),
        (
            lambda m: m.graph.input.append(helper.make_tensor_value_info("extra", TensorProto.FLOAT, (1,))),
            "exactly one input of type tensor",
        ),
        (
            lambda m: m.graph.output.append(helper.make_tensor_value_info("flat", TensorProto.FLOAT, ("N", 64))),
            "exactly one output of type tensor",
        ),
    ],
)
def test_a_model_of_another_shape_than_the_card_is_refused(
    make_version: MakeVersion, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    make_version(tmp_path / "v", "v", 5)
    version = change_model(tmp_path / "v", ENCODER, change)
    with pytest.raises(InvalidVersionFolder, match=message) as caught:
        Encoder(version)
    assert caught.value.pointer == f"/{ENCODER}"


@pytest.mark.parametrize("name", [ENCODER, SIDE])
def test_an_output_of_another_width_than_the_card_is_refused(
    make_version: MakeVersion, tmp_path: Path, name: str
) -> None:
    make_version(tmp_path / "v", "v", 5, side_dim=5)
    make_version(tmp_path / "w", "w", 6, side_dim=6)
    (tmp_path / "v" / name).write_bytes((tmp_path / "w" / name).read_bytes())
    with pytest.raises(InvalidVersionFolder, match=rf"{name} output has shape"):
        verify(tmp_path / "v")


def test_an_undeclared_output_width_is_found_by_running(make_version: MakeVersion, tmp_path: Path) -> None:
    make_version(tmp_path / "v", "v", 5)

    def drop_a_column(model: Any) -> None:
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "D"
        model.graph.node[2].output[0] = "five"
        model.graph.initializer.append(numpy_helper.from_array(np.arange(5) > 0, "kept"))
        model.graph.node.append(helper.make_node("Compress", ["five", "kept"], ["out"], axis=1))

    version = change_model(tmp_path / "v", ENCODER, drop_a_column)
    with pytest.raises(InvalidVersionFolder, match=r"encoder\.onnx gives shape \(3, 4\) for 3 images, not \(N, 5\)"):
        Encoder(version)


@pytest.mark.parametrize(("field", "value"), [("height", 9), ("width", 4), ("mode", "RGB")])
def test_preprocessing_to_another_shape_than_the_input_is_refused(
    make_version: MakeVersion, tmp_path: Path, field: str, value: Any
) -> None:
    folder = make_version(tmp_path / "v", "v", 5).folder
    card = json.loads((folder / "card.json").read_text())
    card["preprocess"] |= {field: value} | ({"mean": [0, 0, 0], "std": [1, 1, 1]} if field == "mode" else {})
    (folder / "card.json").write_text(json.dumps(card))
    with pytest.raises(InvalidVersionFolder, match=r"encoder.onnx input has shape \['N', 1, 8, 8\]; the card says"):
        verify_version(folder)


def verify(folder: Path, **arguments: Any) -> Version:
    rehash(folder)
    return verify_version(folder, **arguments)


def scale(factor: float) -> Callable[[Any], None]:
    """Multiply what the encoder gives."""

    def change(model: Any) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.float32(factor), "factor"))
        model.graph.node[2].output[0] = "unit"
        model.graph.node.append(helper.make_node("Mul", ["unit", "factor"], ["out"]))

    return change


def test_vectors_that_are_not_unit_are_refused_in_a_cosine_space(make_version: MakeVersion, tmp_path: Path) -> None:
    make_version(tmp_path / "v", "v", 5)
    version = change_model(tmp_path / "v", ENCODER, scale(1.01))
    with pytest.raises(InvalidVersionFolder, match=r"encoder.onnx gives a vector of length 1.01 for image 0"):
        Encoder(version)


def test_half_precision_rounding_is_taken_back_to_unit_length(
    make_version: MakeVersion, images: list[Image.Image], tmp_path: Path
) -> None:
    make_version(tmp_path / "v", "v", 5)
    given = Encoder(change_model(tmp_path / "v", ENCODER, scale(1.0004))).encode(images)
    np.testing.assert_allclose(np.linalg.norm(given.vectors, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(make_version: MakeVersion, tmp_path: Path, value: float) -> None:
    make_version(tmp_path / "v", "v", 5)
    version = change_model(tmp_path / "v", ENCODER, scale(value))
    with pytest.raises(InvalidVersionFolder, match=r"encoder\.onnx gives numbers that are not finite for image 0"):
        Encoder(version)


def test_an_image_the_encoder_cannot_embed_is_named_by_its_row(
    make_version: MakeVersion, make_image: MakeImage, tmp_path: Path
) -> None:
    """A grey image is all zeros after normalising, and so is its embedding."""
    version = make_version(tmp_path / "v", "v", 5)
    with pytest.raises(InvalidVersionFolder, match="for image 1"):
        Encoder(version).encode_arrays(np.stack([np.ones((1, 8, 8)), np.zeros((1, 8, 8))]).astype(np.float32))


def test_another_encoder_than_the_probed_one_is_refused(make_version: MakeVersion, tmp_path: Path) -> None:
    make_version(tmp_path / "v", "v", 5)
    make_version(tmp_path / "w", "w", 5, seed=1)
    (tmp_path / "v" / ENCODER).write_bytes((tmp_path / "w" / ENCODER).read_bytes())
    with pytest.raises(InvalidVersionFolder, match=r"probe.npz expects another embedding: it differs by"):
        verify(tmp_path / "v")


def test_a_probe_of_large_numbers_may_differ_by_a_share_of_the_largest() -> None:
    expected = np.array([[3000.0, -1.0]], np.float32)
    check_probe(PROBE, "embedding", expected + 2, expected)
    with pytest.raises(InvalidVersionFolder, match="differs by 4, at most 3 is legal"):
        check_probe(PROBE, "embedding", expected + 4, expected)


def test_another_side_model_than_the_probed_one_is_refused(make_version: MakeVersion, tmp_path: Path) -> None:
    make_version(tmp_path / "v", "v", 5, space={"kind": "l2"}, side_dim=5)
    (tmp_path / "v" / SIDE).write_bytes((tmp_path / "v" / ENCODER).read_bytes())
    with pytest.raises(InvalidVersionFolder, match=r"probe.npz expects another side: it differs by"):
        verify(tmp_path / "v")


@pytest.mark.parametrize(("off", "legal"), [(9e-4, True), (2e-3, False)])
def test_the_probe_allows_rounding_and_no_more(
    make_version: MakeVersion, tmp_path: Path, off: float, legal: bool
) -> None:
    version = make_version(tmp_path / "v", "v", 5, space={"kind": "l2"})
    with np.load(version.folder / PROBE) as stored:
        moved = stored["embedding"] + np.eye(1, 5, 2, dtype=np.float32) * np.float32(off)
    version = save_probe(version.folder, embedding=moved)
    if legal:
        Encoder(version)
    else:
        with pytest.raises(InvalidVersionFolder, match=r"probe\.npz"):
            Encoder(version)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"image": None}, "has no array 'image'"),
        ({"embedding": None}, "has no array 'embedding'"),
        ({"embedding": np.zeros((1, 4))}, r"embedding must be floats of shape \(1, 5\)"),
        ({"image": np.zeros((2, 1, 8, 8))}, "image must be floats"),
        ({"embedding": np.full((1, 5), np.nan)}, "finite"),
    ],
)
def test_a_probe_that_does_not_fit_the_card_is_refused(
    make_version: MakeVersion, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    version = make_version(tmp_path / "v", "v", 5)
    version = save_probe(version.folder, **changed)
    with pytest.raises(InvalidVersionFolder, match=message) as caught:
        Encoder(version)
    assert caught.value.pointer == f"/{PROBE}"


def test_a_model_that_mixes_its_batch_is_refused(make_version: MakeVersion, tmp_path: Path) -> None:
    """Batch statistics left in an export: right for one image, different for many."""
    make_version(tmp_path / "v", "v", 5, space={"kind": "l2"})

    def change(model: Any) -> None:
        model.graph.node[2].output[0] = "single"
        model.graph.node.append(helper.make_node("CumSum", ["single", "axis"], ["out"]))
        model.graph.initializer.append(numpy_helper.from_array(np.int64(0), "axis"))

    version = change_model(tmp_path / "v", ENCODER, change)
    with pytest.raises(InvalidVersionFolder, match=r"probe\.npz expects another embedding"):
        Encoder(version)


@pytest.mark.parametrize("name", [ENCODER, SIDE])
def test_a_model_whose_output_depends_on_other_images_is_refused(
    make_version: MakeVersion, tmp_path: Path, name: str
) -> None:
    """Such as attention along the batch, which copies of one image cannot show."""
    make_version(tmp_path / "v", "v", 5, space={"kind": "l2"}, side_dim=3)

    def change(model: Any) -> None:
        model.graph.node[2].output[0] = "single"
        model.graph.node.append(helper.make_node("ReduceMean", ["single"], ["mean"], axes=[0]))
        model.graph.node.append(helper.make_node("Mean", ["single", "mean"], ["out"]))

    version = change_model(tmp_path / "v", name, change)
    assert len(Encoder(version).encode([]).vectors) == 0  # one that is registered goes on
    with pytest.raises(InvalidVersionFolder, match=rf"{name} embeds the probe's image differently beside other images"):
        verify_version(version.folder, {}, batches=True)


def test_a_model_that_is_another_one_for_a_single_image_is_refused(make_version: MakeVersion, tmp_path: Path) -> None:
    make_version(tmp_path / "v", "v", 5, space={"kind": "l2"})

    def change(model: Any) -> None:
        model.graph.node[2].output[0] = "all"
        model.graph.node.append(helper.make_node("Shape", ["all"], ["count"], end=1))
        model.graph.node.append(helper.make_node("Equal", ["count", "one"], ["is_one"]))
        model.graph.node.append(helper.make_node("Neg", ["all"], ["other"]))
        model.graph.node.append(helper.make_node("Where", ["is_one", "other", "all"], ["out"]))
        model.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))

    version = change_model(tmp_path / "v", ENCODER, change)
    with pytest.raises(InvalidVersionFolder, match=r"probe\.npz expects another embedding"):
        verify_version(version.folder, {}, batches=True)


@pytest.mark.parametrize("spec", [SPEC, Preprocess(1, 1, "RGB"), Preprocess(3, 1, "RGB", mean=(0.5,) * 3)])
def test_the_images_beside_the_probe_are_between_black_and_white_and_none_is_plain(spec: Preprocess) -> None:
    shades_2CHW = _shades(spec)
    assert shades_2CHW.shape == (2, spec.channels, spec.height, spec.width)
    mean, std = (np.array(numbers).reshape(-1, 1, 1) for numbers in (spec.mean, spec.std))
    pixels = shades_2CHW * std + mean
    assert (pixels.min() > 0, pixels.max() < 1) == (True, True)
    assert not np.allclose(*shades_2CHW)


def test_an_encoder_with_external_data_is_refused(make_version: MakeVersion, tmp_path: Path) -> None:
    make_version(tmp_path / "v", "v", 5)
    model = onnx.load(tmp_path / "v" / ENCODER)
    onnx.save_model(model, tmp_path / "v" / ENCODER, save_as_external_data=True, location="w.bin", size_threshold=0)
    with pytest.raises(InvalidVersionFolder, match=r"encoder\.onnx keeps weights in external data"):
        verify(tmp_path / "v")


def test_a_card_with_an_unknown_space_is_refused(make_version: MakeVersion, tmp_path: Path) -> None:
    make_version(tmp_path / "v", "v", 5)
    card = (tmp_path / "v" / "card.json").read_text()
    (tmp_path / "v" / "card.json").write_text(card.replace('"cosine"', '"hamming"'))
    with pytest.raises(InvalidVersionFolder, match=r"card\.json: space.kind must be one of cosine, l2, lorentz"):
        verify_version(tmp_path / "v")


def test_verifying_checks_each_edge_against_the_registered_versions(make_version: MakeVersion, tmp_path: Path) -> None:
    old = make_version(tmp_path / "v1", "v1", 4)
    make_version(tmp_path / "v2", "v2", 6, edges=[(old, "truncate")])
    assert verify_version(tmp_path / "v2", {"v1": old.card}).edges[0].old == "v1"
    assert verify_version(tmp_path / "v2").name == "v2"
    with pytest.raises(InvalidVersionFolder, match="'v1', which is not registered"):
        verify_version(tmp_path / "v2", {})
    again = make_version(tmp_path / "again" / "v1", "v1", 4, seed=1)
    with pytest.raises(InvalidVersionFolder, match="made for a different encoder than the registered 'v1'"):
        verify_version(tmp_path / "v2", {"v1": again.card})


def test_verifying_reads_the_calibration_of_each_edge(make_version: MakeVersion, tmp_path: Path) -> None:
    old = make_version(tmp_path / "v1", "v1", 4)
    new = make_version(tmp_path / "v2", "v2", 6, edges=[(old, "truncate")])
    one = {"kind": "isotonic", "scores": [0.5], "probabilities": [0.5]}
    for slope in (2.0, -2.0):
        maps = {"edge": {**one, "slope": 2.0}, "own": {**one, "slope": slope}}
        write_edge(new.folder, replace(new.edges[0], calibration=maps))
        write_card(new.folder, new.card)
        if slope > 0:
            assert verify_version(new.folder, {"v1": old.card}).edges[0].calibration == maps
    with pytest.raises(InvalidVersionFolder, match="edges/v1/calibration/own contradicts its space") as caught:
        verify_version(new.folder, {"v1": old.card})
    assert caught.value.pointer == "/edges/v1/calibration/own/slope"


def test_models_run_with_the_threads_they_are_given(
    make_version: MakeVersion, add_text: Callable[..., Version], tmp_path: Path
) -> None:
    version = make_version(tmp_path / "v", "v", 4, side_dim=2)
    version = add_text(version, {"east": np.eye(4)[0]})
    for threads in (1, 3):
        images, texts = Encoder(version, Execution(threads)), TextEncoder(version, Execution(threads))
        assert images._side is not None
        used = [model.session.get_session_options().intra_op_num_threads for model in (images._encoder, images._side)]
        assert [*used, texts._model.session.get_session_options().intra_op_num_threads] == [threads] * 3


def test_a_device_that_cannot_be_had_is_refused_and_never_replaced_by_the_cpu(
    make_version: MakeVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, cuda = make_version(tmp_path / "v", "v", 4), Execution(device=Device.CUDA)
    with pytest.raises(DeviceUnavailable, match="regraft\\[gpu\\]"):
        cuda.check()
    # As onnxruntime-gpu does without a driver: it lists the provider, and gives a session on the CPU.
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    session = ort.InferenceSession
    monkeypatch.setattr(ort, "InferenceSession", lambda content, options, **_: session(content, options))
    with pytest.raises(DeviceUnavailable, match="driver"):
        Encoder(version, cuda)
