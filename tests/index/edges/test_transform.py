"""index.edges.transform: what each edge does to vectors, and edges that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from index.edges.transform import TRANSFORMS, load_forward, load_transform, normalise_or_zero
from index.errors import ChangedOnDisk, InvalidVector, InvalidVersionFolder
from index.space import Cosine, Euclidean
from index.version import EDGE_ARRAYS, EDGE_MODEL, Card, Edge, EdgeKind, Version
from index.version_folder.folder import load_version, write_card
from naive import units
from staging.inputs.versions import change_model, rehash

EDGE = "edges/v1/" + EDGE_MODEL[EdgeKind.ONNX]
MakeVersion = Callable[..., Version]


@pytest.fixture
def old(make_version: MakeVersion, tmp_path: Path) -> Version:
    return make_version(tmp_path / "v1", "v1", 4, side_dim=3)


def newer(make_version: MakeVersion, old: Version, kind: str, dim: int = 6, **options: Any) -> Version:
    return make_version(old.folder.parent / "v2", "v2", dim, edges=[(old, kind)], **options)


def refused(new: Version, old: Version, message: str) -> None:
    with pytest.raises(InvalidVersionFolder, match=message) as caught:
        load_transform(new.edges[0], new.card, old.card)
    assert caught.value.pointer.startswith("/edges/v1")


def test_identity_gives_the_query_back(make_version: MakeVersion, old: Version) -> None:
    new, x = newer(make_version, old, "identity", dim=4), units(5, 4)
    assert load_transform(new.edges[0], new.card, old.card)(x) is x


def test_truncate_takes_the_first_components_back_to_unit_length(make_version: MakeVersion, old: Version) -> None:
    new, x = newer(make_version, old, "truncate"), units(5, 6)
    given = load_transform(new.edges[0], new.card, old.card)(x)
    np.testing.assert_allclose(given, x[:, :4] / np.linalg.norm(x[:, :4], axis=1, keepdims=True), atol=1e-6)


def write_slerp(new: Version, weight: Any, alpha: Any) -> Version:
    np.savez(new.folder / "edges/v1" / EDGE_ARRAYS[EdgeKind.SLERP], weight=weight, alpha=alpha)
    return rehash(new.folder)


def test_slerp_stands_on_the_arc_between_both_queries(make_version: MakeVersion, old: Version) -> None:
    """A query at 0 degrees by the old encoder and, aligned, at 90: a third of the way is 30 degrees."""
    new = newer(make_version, old, "slerp", dim=4)
    new = write_slerp(new, np.eye(4, dtype=np.float32)[::-1], np.float32(1 / 3))
    slerped = load_transform(new.edges[0], new.card, old.card)
    given = slerped(np.eye(4, dtype=np.float32)[[2]], np.eye(4, dtype=np.float32)[[0]])
    np.testing.assert_allclose(given, [[np.cos(np.pi / 6), 0.5, 0, 0]], atol=1e-6)
    assert given.dtype == np.float32


def test_slerp_of_a_wider_new_space_keeps_what_the_old_items_have(make_version: MakeVersion, old: Version) -> None:
    new, x, y = newer(make_version, old, "slerp"), units(5, 6), units(5, 4, seed=1)
    with np.load(new.folder / "edges/v1/edge.npz") as stored:
        weight, alpha = stored["weight"].astype(np.float64), float(stored["alpha"])
    given = load_transform(new.edges[0], new.card, old.card)(x, y)
    for row in range(5):
        end = x[row].astype(np.float64) @ weight
        theta = np.arccos(end @ y[row])
        expected = (np.sin((1 - alpha) * theta) * y[row] + np.sin(alpha * theta) * end) / np.sin(theta)
        np.testing.assert_allclose(given[row], expected, atol=1e-6)
    assert (np.linalg.norm(given, axis=1) <= 1 + 1e-6).all()


def test_slerp_without_the_old_encoders_queries_is_refused(make_version: MakeVersion, old: Version) -> None:
    new, x = newer(make_version, old, "slerp"), units(5, 6)
    transform = load_transform(new.edges[0], new.card, old.card)
    for beside in (None, units(4, 4), units(5, 6)):
        with pytest.raises(InvalidVector, match="needs the queries by that version's encoder too"):
            transform(x, beside)


def test_slerp_needs_two_cosine_spaces_and_a_weight_between_0_and_1(
    make_version: MakeVersion, old: Version, tmp_path: Path
) -> None:
    new = newer(make_version, old, "slerp")
    for card in (replace(new.card, space={"kind": "l2"}), new.card):
        flat = replace(old.card, space={"kind": "l2"}) if card is new.card else old.card
        with pytest.raises(InvalidVersionFolder, match="needs cosine spaces on both sides"):
            load_transform(new.edges[0], card, flat)
    new = write_slerp(new, np.zeros((6, 4), np.float32), np.float32(1.5))
    refused(new, old, r"needs alpha in \[0, 1\], not 1.5")
    new = write_slerp(new, np.zeros((4, 6), np.float32), np.float32(0.5))
    refused(new, old, r"weight must be floats of shape \(6, 4\)")
    new = write_slerp(new, np.zeros((6, 4), np.float32), np.zeros(1, np.float32))
    refused(new, old, r"alpha must be floats of shape \(\)")


def test_zero_pad_scores_as_the_padded_old_item_would(make_version: MakeVersion, old: Version) -> None:
    new, x, items = newer(make_version, old, "zero_pad"), units(5, 6), units(7, 4, seed=1)
    given = load_transform(new.edges[0], new.card, old.card)(x)
    padded = np.pad(items, ((0, 0), (0, 2)))
    np.testing.assert_allclose(given @ items.T, x @ padded.T, atol=1e-6)
    assert given.flags["C_CONTIGUOUS"]


def test_truncate_and_zero_pad_rank_an_all_old_gallery_alike(make_version: MakeVersion, old: Version) -> None:
    new, x, items = newer(make_version, old, "truncate"), units(9, 6), units(30, 4, seed=1)
    truncated = load_transform(new.edges[0], new.card, old.card)(x)
    padded = load_transform(replace(new.edges[0], kind=EdgeKind.ZERO_PAD), new.card, old.card)(x)
    np.testing.assert_array_equal(np.argsort(-truncated @ items.T), np.argsort(-padded @ items.T))


@pytest.mark.parametrize("kind", ["matrix", "onnx"])
def test_a_fitted_map_leads_to_the_old_space(make_version: MakeVersion, old: Version, kind: str) -> None:
    """Both encoders share their projection, so the first components are nearly what the fit must find."""
    new, x = newer(make_version, old, kind), units(50, 6)
    given = load_transform(new.edges[0], new.card, old.card)(x)
    np.testing.assert_allclose(np.linalg.norm(given, axis=1), 1, atol=1e-6)
    assert (given * normalise_or_zero(Cosine(), x[:, :4])).sum(axis=1).min() > 0.95


def test_a_matrix_may_have_a_bias(make_version: MakeVersion, old: Version, tmp_path: Path) -> None:
    new = newer(make_version, old, "matrix", space={"kind": "l2"})
    weight, bias = np.random.default_rng(0).normal(size=(6, 4)), np.arange(4.0)
    np.savez(new.folder / "edges/v1/edge.npz", weight=weight, bias=bias)
    write_card(new.folder, new.card)
    l2 = Card("v1", 4, {"kind": "l2"})
    x = units(5, 6)
    given = load_transform(load_version(new.folder).edges[0], new.card, l2)(x)
    np.testing.assert_allclose(given, x @ weight + bias, atol=1e-5)


def test_forward_takes_items_and_their_side_information_to_the_new_space(
    make_version: MakeVersion, old: Version
) -> None:
    new = newer(make_version, old, "forward")
    forward = load_transform(new.edges[0], new.card, old.card)
    x, side = units(8, 4), np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    given = forward(x, side)
    assert given.shape == (8, 6)
    np.testing.assert_allclose(np.linalg.norm(given, axis=1), 1, atol=1e-6)
    assert np.abs(given - forward(x, -side)).max() > 1e-3
    for missing in (None, side[:, :2], side[:5]):
        with pytest.raises(InvalidVector, match="'v1' needs 3 numbers of side-information"):
            forward(x, missing)


def test_forward_works_without_side_information(make_version: MakeVersion, tmp_path: Path) -> None:
    plain = make_version(tmp_path / "v1", "v1", 6)
    new = newer(make_version, plain, "forward", dim=6)
    x = units(8, 6)
    given = load_transform(new.edges[0], new.card, plain.card)(x)
    np.testing.assert_allclose(given, x, atol=0.05)  # one projection on both sides: h is the identity


def test_forward_carries_the_next_side_information_to_a_version_that_stores_it(
    make_version: MakeVersion, old: Version
) -> None:
    new = newer(make_version, old, "forward", side_dim=2)
    forward = load_forward(new.edges[0], new.card, old.card)
    x, side = units(8, 4), np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    carried = forward.transform_items(x, side)

    assert np.array_equal(carried.vectors_ND, forward(x, side))
    assert carried.side_NS is not None
    # Both versions store a prefix of one projection: what is asked for lies in what is given.
    np.testing.assert_allclose(carried.side_NS, side[:, :2], atol=1e-4)
    assert carried.variance_N is None


def extra_output(name: str, width: int, node: str = "Abs") -> Callable[[Any], None]:
    """One more output, made of as many of the first input's numbers."""

    def change(model: Any) -> None:
        ends = (numpy_helper.from_array(np.array([[0], [width], [1]][n], np.int64), f"to{n}") for n in range(3))
        model.graph.initializer.extend(ends)
        model.graph.node.append(helper.make_node("Slice", ["embedding", "to0", "to1", "to2"], ["cut"]))
        model.graph.node.append(helper.make_node(node, ["cut"], [name]))
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ("N", width)))

    return change


def test_forward_tells_how_unsure_it_is(make_version: MakeVersion, old: Version) -> None:
    new = change_model(newer(make_version, old, "forward").folder, EDGE, extra_output("variance", 1))
    x, side = units(8, 4), np.zeros((8, 3), np.float32)
    carried = load_forward(new.edges[0], new.card, old.card).transform_items(x, side)

    np.testing.assert_array_equal(carried.variance_N, np.abs(x[:, 0]))
    assert carried.side_NS is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (extra_output("next_side", 3), r"gives next_side of shape \(1, 3\) for 1 vectors, not \(N, 2\)"),
        (extra_output("variance", 2), r"gives variance of shape \(1, 2\) for 1 vectors, not \(N, 1\)"),
        (extra_output("variance", 1, "Neg"), "gives a variance below 0"),
        (extra_output("confidence", 1), r"has no use for edge.onnx outputs \['confidence'\]"),
    ],
)
def test_an_extra_output_that_serving_could_not_store_is_refused(
    make_version: MakeVersion, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    old = make_version(tmp_path / "v1", "v1", 4)
    new = newer(make_version, old, "forward")
    card = replace(new.card, side_dim=2)
    changed = change_model(new.folder, EDGE, change)
    with pytest.raises(InvalidVersionFolder, match=message):
        load_transform(changed.edges[0], card, old.card)


@pytest.mark.parametrize("kind", ["identity", "truncate", "zero_pad", "matrix", "onnx"])
def test_no_queries_stay_no_queries(make_version: MakeVersion, old: Version, kind: str) -> None:
    new = newer(make_version, old, kind, dim=4)
    assert load_transform(new.edges[0], new.card, old.card)(np.empty((0, 4), np.float32)).shape == (0, 4)


def test_a_vector_that_lost_its_direction_stays_zero() -> None:
    x = np.array([[0, 0], [0, 3]], np.float32)
    np.testing.assert_array_equal(normalise_or_zero(Cosine(), x), [[0, 0], [0, 1]])
    np.testing.assert_array_equal(normalise_or_zero(Euclidean(), x), x)


@pytest.mark.parametrize(
    ("kind", "dim", "message"),
    [
        ("identity", 6, "kind identity needs equal dimensions, not 6 and 4"),
        ("truncate", 3, "kind truncate needs dim >= 4, not 3"),
        ("zero_pad", 3, "kind zero_pad needs dim >= 4, not 3"),
    ],
)
def test_dimensions_must_fit(make_version: MakeVersion, old: Version, kind: str, dim: int, message: str) -> None:
    refused(newer(make_version, old, kind, dim), old, message)


@pytest.mark.parametrize("kind", ["identity", "truncate", "zero_pad"])
def test_direct_comparison_needs_one_space(make_version: MakeVersion, old: Version, kind: str) -> None:
    refused(newer(make_version, old, kind, 4, space={"kind": "l2"}), old, "needs the same space on both sides")


def test_lorentz_spaces_of_two_curvatures_are_two_spaces(make_version: MakeVersion, tmp_path: Path) -> None:
    old = make_version(tmp_path / "v1", "v1", 4, space={"kind": "lorentz", "curvature": 1.0})
    new = newer(make_version, old, "identity", 4, space={"kind": "lorentz", "curvature": 1.2})
    refused(new, old, "needs the same space")


@pytest.mark.parametrize("kind", ["matrix", "onnx", "forward"])
def test_a_fitted_map_of_another_shape_is_refused(make_version: MakeVersion, old: Version, kind: str) -> None:
    new = newer(make_version, old, kind)
    for card in (replace(old.card, dim=5), replace(old.card, dim=3)):
        with pytest.raises(InvalidVersionFolder, match="edges/v1/edge"):
            load_transform(new.edges[0], new.card, card)


def test_side_information_must_be_what_the_old_version_stores(make_version: MakeVersion, old: Version) -> None:
    new = newer(make_version, old, "forward")
    with pytest.raises(InvalidVersionFolder, match=r"needs edge.onnx inputs \['embedding'\], not"):
        load_transform(new.edges[0], new.card, replace(old.card, side_dim=0))


def test_an_edge_made_for_another_encoder_is_refused(make_version: MakeVersion, old: Version, tmp_path: Path) -> None:
    new = newer(make_version, old, "truncate")
    other = make_version(tmp_path / "again", "v1", 4, seed=9)
    refused(new, other, "made for a different encoder than the registered 'v1'")


def test_a_kind_this_release_does_not_serve_is_refused_with_the_legal_ones(old: Version) -> None:
    for kind in set(EdgeKind) - set(TRANSFORMS):
        with pytest.raises(InvalidVersionFolder, match="legal: identity, truncate, zero_pad, matrix, onnx, slerp, "):
            load_transform(Edge("v2", "v1", kind), replace(old.card, name="v2"), old.card)


def rename_input(model: Any) -> None:
    model.graph.input[0].name = model.graph.node[0].input[0] = "z0"


def freeze_batch(model: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def divide_by_zero(model: Any) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0), "zero"))
    model.graph.node[2].output[0] = "unit"
    model.graph.node.append(helper.make_node("Div", ["unit", "zero"], ["out"]))


def use_external_data(model: Any) -> None:
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_input, r"inputs \['embedding'\], not \['z0'\]"),
        (freeze_batch, "fails on a batch of 3"),
        (divide_by_zero, "not finite"),
        (use_external_data, "external data"),
    ],
)
def test_a_broken_edge_model_is_refused_when_it_is_loaded(
    make_version: MakeVersion, old: Version, change: Callable[[Any], None], message: str
) -> None:
    refused(change_model(newer(make_version, old, "onnx").folder, EDGE, change), old, message)


def test_a_broken_edge_array_is_refused(make_version: MakeVersion, old: Version) -> None:
    new = newer(make_version, old, "matrix")
    (new.folder / "edges/v1/edge.npz").write_bytes(b"PK broken")
    refused(rehash(new.folder), old, r"edges/v1/edge\.npz is not a readable \.npz")


@pytest.mark.parametrize("kind", ["matrix", "slerp", "onnx", "forward"])
def test_files_that_changed_since_the_folder_was_loaded_are_not_opened(
    make_version: MakeVersion, old: Version, kind: str
) -> None:
    new, other = newer(make_version, old, kind), make_version(old.folder.parent / "other", "v2", 6, edges=[(old, kind)])
    (edge,) = new.edges
    (file,) = (p for p in (other.folder / "edges/v1").iterdir() if p.name != "edge.json")
    changed = new.folder / "edges/v1" / file.name
    changed.write_bytes(file.read_bytes() + b" ")
    for _ in range(2):  # changed, then gone
        with pytest.raises(ChangedOnDisk, match=rf"edges/v1/{file.name}") as caught:
            load_transform(edge, new.card, old.card)
        assert caught.value.status == 500
        changed.unlink(missing_ok=True)
