"""Export: what the ONNX models give, what lies in the folder, and what is left when it cannot be finished."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

from index.creation.probes import ParityError
from index.encoders.encoder import verify_version
from index.errors import InvalidArgument, InvalidVersionFolder
from index.evaluation.adapters import Affine
from index.version import EDGE_MODEL, ENCODER, PROBE, Edge, EdgeKind
from index.version_folder.folder import load_version, write_card, write_edge
from staging.inputs.builders import make_version
from staging.inputs.recipes import quick, train_weights
from training import export
from training.evaluation.edges import with_unexported_edges
from training.tracing import to_onnx
from training.trained import WEIGHTS, Trained


@pytest.fixture(scope="module")
def weights_only(independent: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """v1, and an FCT version of it, trained as where no ONNX exporter is installed."""
    place = tmp_path_factory.mktemp("weights")
    v1 = train_weights(quick("digits_v1"), place / "v1")
    recipe = quick("digits_fct", old=str(v1), independent=str(independent))
    return v1, train_weights(recipe, place / "v2")


@pytest.fixture(scope="module")
def encoder_onnx(weights_only: tuple[Path, Path]) -> bytes:
    """v1's model."""
    return to_onnx(Trained.load(weights_only[0]), {"images": torch.randn(1, 1, 8, 8)}, ["embedding"])


def test_a_version_trained_without_an_exporter_is_valid_and_takes_no_images_yet(
    weights_only: tuple[Path, Path],
) -> None:
    for folder in weights_only:
        version = verify_version(folder)
        assert not version.card.encoder
        assert version.edges == ()
        assert WEIGHTS in version.card.files


def test_exporting_it_later_gives_the_models_and_the_measured_edge(
    weights_only: tuple[Path, Path], tmp_path: Path
) -> None:
    v1, v2 = weights_only
    shutil.copytree(v2, tmp_path / "v2")
    made = verify_version(export.export(tmp_path / "v2", tmp_path / "v2"))
    (edge,) = made.edges

    assert made.card.encoder
    assert (edge.old, edge.kind.value, set(edge.scores)) == ("v1", "forward", {"cmc@1", "cmc@5", "mAP@1.0"})
    assert made.card.metrics == load_version(v2).card.metrics
    verify_version(made.folder, {"v1": load_version(v1).card})


@pytest.mark.parametrize("fitted_to", ["beta", "v1"])
def test_an_edge_that_was_fitted_later_keeps_its_model(
    fitted_to: str, weights_only: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe = quick("digits_bct", old=str(weights_only[0]), dim=8, epochs=1)
    v2 = export.export(train_weights(recipe, tmp_path / "v2"), tmp_path / "v2")
    card, place = load_version(v2).card, v2 / "edges" / fitted_to
    place.mkdir(exist_ok=True)
    model = place / EDGE_MODEL[EdgeKind.ONNX]
    model.write_bytes(to_onnx(nn.Linear(8, 16), {"embedding": torch.rand(2, 8)}, ["old_embedding"]))
    fitted = model.read_bytes()
    write_edge(v2, Edge("v2", fitted_to, EdgeKind.ONNX, support=600))
    write_card(v2, card)

    export.export(v2, v2)
    assert model.read_bytes() == fitted
    assert {edge.old: edge.support for edge in load_version(v2).edges} == {"v1": 0, fitted_to: 600}


@pytest.mark.parametrize(("fitted_to", "kinds"), [("v0", {"v0": "matrix", "v1": "forward"}), ("v1", {"v1": "matrix"})])
def test_an_edge_that_was_fitted_before_the_export_stays_beside_the_trained_one_or_in_its_place(
    fitted_to: str, kinds: dict[str, str], weights_only: tuple[Path, Path], tmp_path: Path
) -> None:
    v2 = shutil.copytree(weights_only[1], tmp_path / "v2")
    card, place = load_version(v2).card, v2 / "edges" / fitted_to
    place.mkdir(parents=True)
    Affine(np.eye(16, dtype=np.float32), np.zeros(16, np.float32)).save(place)
    write_edge(v2, Edge("v2", fitted_to, EdgeKind.MATRIX, support=600))
    write_card(v2, card)

    assert {edge.old: edge.kind.value for edge in with_unexported_edges(load_version(v2)).edges} == kinds
    made = verify_version(export.export(v2, v2))
    assert {edge.old: edge.kind.value for edge in made.edges} == kinds
    assert not (v2 / export.UNEXPORTED_EDGES).exists()


def test_the_models_equal_torch_on_any_batch_size(weights_only: tuple[Path, Path], encoder_onnx: bytes) -> None:
    trained, session = Trained.load(weights_only[0]), ort.InferenceSession(encoder_onnx)

    for count in (1, 2, 65):
        images = torch.rand(count, 1, 8, 8)
        (made,) = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(made, trained(images).numpy(), rtol=0, atol=export.PARITY)
        np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1.0, atol=1e-6)
    assert [i.name for i in session.get_inputs()] == ["images"]
    assert session.get_outputs()[0].name == "embedding"


def test_a_model_holds_no_path_of_this_machine_and_no_external_data(encoder_onnx: bytes) -> None:
    model = onnx.load_model_from_string(encoder_onnx)
    onnx.checker.check_model(model)

    assert str(Path.cwd()).encode() not in encoder_onnx
    assert str(Path(torch.__file__).parent).encode() not in encoder_onnx
    assert b".py" not in encoder_onnx
    assert all(not tensor.external_data for tensor in model.graph.initializer)


def test_the_same_weights_export_to_the_same_bytes(weights_only: tuple[Path, Path], encoder_onnx: bytes) -> None:
    again = to_onnx(Trained.load(weights_only[0]), {"images": torch.randn(2, 1, 8, 8)}, ["embedding"])

    assert again == encoder_onnx


def linear_model(folder: Path, scale: float = 1.0) -> tuple[Path, Tensor, Tensor]:
    """A linear encoder of weights so many times as large as usual, some images, and what torch makes of them."""
    images, linear, model = torch.rand(3, 1, 4, 4), nn.Linear(16, 2), folder / ENCODER
    module = nn.Sequential(nn.Flatten(), linear)
    with torch.inference_mode():
        linear.weight.mul_(scale)
        expected = module(images)
    model.write_bytes(to_onnx(module, {"images": images}, ["embedding"]))
    return model, images, expected


def test_a_model_that_differs_from_torch_is_refused(tmp_path: Path) -> None:
    model, images, expected = linear_model(tmp_path)
    export.check_parity(model, {"images": images}, expected)

    with pytest.raises(ParityError, match=r"encoder.onnx differs from torch by 0\.0001"):
        export.check_parity(model, {"images": images}, expected + 1e-4)
    with pytest.raises(ParityError):
        export.check_parity(model, {"images": images}, expected * torch.nan)


def test_large_embeddings_may_differ_by_a_share_of_the_largest_number(tmp_path: Path) -> None:
    model, images, expected = linear_model(tmp_path, 1000)
    largest = expected.abs().max()
    assert largest > 100
    export.check_parity(model, {"images": images}, expected + 0.5 * export.PARITY * largest)

    with pytest.raises(ParityError):
        export.check_parity(model, {"images": images}, expected + 3 * export.PARITY * largest)


def test_without_onnxruntime_the_comparison_is_left_out_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    export.check_parity(tmp_path / ENCODER, {}, torch.zeros(1))

    assert capsys.readouterr().out == "onnxruntime is not installed: encoder.onnx was not compared with torch\n"


def test_exporting_without_the_exporter_says_what_is_needed(
    weights_only: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "can_export", lambda: False)

    with pytest.raises(InvalidArgument, match="onnx and onnxscript"):
        export.export(weights_only[0], tmp_path / "v1")


def test_the_probe_is_a_real_image_and_what_the_version_makes_of_it(weights_only: tuple[Path, Path]) -> None:
    trained = Trained.load(weights_only[0])
    with np.load(weights_only[0] / PROBE) as probe:
        image, embedding = torch.from_numpy(probe["image"]), probe["embedding"]

    assert image.std() > 0.5
    np.testing.assert_allclose(trained(image).numpy(), embedding, atol=1e-6)


def test_what_was_not_trained_here_cannot_be_exported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make_version(tmp_path / "bought", "bought", 3)

    with pytest.raises(InvalidVersionFolder, match=r"bought has no weights\.safetensors, so it was not trained here"):
        export.export(tmp_path / "bought", tmp_path / "out")
    with pytest.raises(InvalidVersionFolder, match=r"/empty: card\.json is missing"):
        export.export(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()
