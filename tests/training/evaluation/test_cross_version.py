"""Routes of an evaluation: chains, forward transforms, dual, and what stays out of reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from index.edges.transform import TransformedItems, load_forward, load_transform
from index.errors import InvalidArgument, NoEncoder
from index.evaluation.adapters import SlerpAdapter
from index.space import Cosine, Vectors
from index.version import Edge, EdgeKind, Version
from index.version_folder.folder import load_version, write_card, write_edge
from training.data.images import Data
from training.evaluation import embeddings
from training.evaluation.cross_version import CrossVersions, oldest_first
from training.evaluation.edges import with_unexported_edges
from training.evaluation.embeddings import VersionEmbeddings, embed_version
from training.method import ItemEdge


@pytest.fixture(scope="module")
def data(image_set: Callable) -> Data:
    """150 items and 70 queries: more than one batch, different sizes."""
    gallery = image_set(150, 5, 1000)
    return Data(gallery, image_set(70, 6, 2000), gallery)


def embedded(data: Data, *versions: Version) -> dict[str, VersionEmbeddings]:
    return {version.name: embed_version(version, data) for version in versions}


@pytest.fixture
def chain(make_version: Callable, tmp_path: Path) -> tuple[Version, Version, Version]:
    v1 = make_version(tmp_path / "v1", "v1", 3)
    v2 = make_version(tmp_path / "v2", "v2", 5, drift=0.3, edges=[(v1, "truncate", 0.7)])
    v3 = make_version(tmp_path / "v3", "v3", 5, drift=0.2, edges=[(v2, "identity", 0.8)])
    return v1, v2, v3


def test_both_sides_are_embedded_as_serving_does(data: Data, chain: tuple[Version, ...]) -> None:
    from index.encoders.encoder import Encoder

    made = embed_version(chain[0], data)
    expected = Encoder(chain[0]).encode([data.query.images[row] for row in range(70)]).vectors
    np.testing.assert_allclose(made.queries_QD, expected, atol=1e-6)
    assert made.items_ND.shape == (150, 3)
    same = embed_version(chain[0], Data(data.train, data.gallery, data.gallery, same=True))
    assert same.queries_QD is same.items_ND


def test_a_chain_of_query_edges_is_followed_edge_by_edge(data: Data, chain: tuple[Version, ...]) -> None:
    cross_versions = CrossVersions(embedded(data, *chain))
    cross_version = cross_versions.declared("v3", "v1")
    assert cross_version.kinds == ("identity", "truncate")
    whole = cross_versions.embeddings["v3"].queries_QD
    np.testing.assert_allclose(cross_version.compared.queries, Cosine().normalise(whole[:, :3]), atol=1e-6)
    np.testing.assert_array_equal(cross_version.compared.items, cross_versions.embeddings["v1"].items_ND)


def test_where_no_edge_leads_nothing_is_compared_but_dual_still_serves(
    data: Data, chain: tuple[Version, ...], make_version: Callable, tmp_path: Path
) -> None:
    lone = make_version(tmp_path / "lone", "lone", 3, seed=4)
    cross_versions = CrossVersions(embedded(data, *chain, lone))
    assert cross_versions.declared("lone", "v1") is None
    assert cross_versions.declared("v1", "v2") is None  # edges lead from newer to older only
    dual = cross_versions.unmoved("lone", "v1")
    assert dual.kinds == ("dual",)
    np.testing.assert_array_equal(dual.compared.queries, cross_versions.embeddings["v1"].queries_QD)
    assert cross_versions.unmoved("v3", "v1").kinds == ("identity", "truncate")


def test_items_move_along_forward_edges_step_by_step(data: Data, make_version: Callable, tmp_path: Path) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4, side_dim=3)
    v2 = make_version(tmp_path / "v2", "v2", 5, drift=0.2, edges=[(v1, "forward")])
    v3 = make_version(tmp_path / "v3", "v3", 6, drift=0.2, edges=[(v2, "forward")])
    cross_versions = CrossVersions(embedded(data, v1, v2, v3))
    cross_version = cross_versions.transformed("v3", "v1")
    assert cross_version.kinds == ("forward", "forward")
    h12, h23 = load_transform(v2.edges[0], v2.card, v1.card), load_transform(v3.edges[0], v3.card, v2.card)
    old = cross_versions.embeddings["v1"]
    np.testing.assert_allclose(cross_version.compared.items, h23(h12(old.items_ND, old.side_NS)), atol=1e-6)
    np.testing.assert_array_equal(cross_version.compared.queries, cross_versions.embeddings["v3"].queries_QD)
    declared = cross_versions.declared("v3", "v1")
    assert declared.kinds == ("forward", "forward")
    assert cross_versions.transformed("v1", "v1") is None
    assert cross_versions.unmoved("v3", "v1").kinds == ("dual",)


@dataclass
class Telling:
    """A forward edge that tells a variance, and no side-information."""

    edge: Any

    def transform_items(self, x: Vectors, side: Vectors | None = None) -> TransformedItems:
        moved = self.edge.transform_items(x, side).vectors_ND
        return TransformedItems(moved, None, np.arange(len(x), dtype=np.float32))


def test_side_information_travels_with_the_items_where_the_edge_gives_it(
    data: Data, make_version: Callable, tmp_path: Path
) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 5, side_dim=2, edges=[(v1, "forward")])
    v3 = make_version(tmp_path / "v3", "v3", 6, edges=[(v2, "forward")])
    cross_versions = CrossVersions(embedded(data, v1, v2, v3))
    h12, h23 = load_forward(v2.edges[0], v2.card, v1.card), load_forward(v3.edges[0], v3.card, v2.card)
    middle = h12.transform_items(cross_versions.embeddings["v1"].items_ND)
    assert middle.side_NS is not None
    cross_version = cross_versions.transformed("v3", "v1")
    np.testing.assert_allclose(cross_version.compared.items, h23(middle.vectors_ND, middle.side_NS), atol=1e-6)

    cross_versions.forwards["v2", "v1"] = Telling(cross_versions.forwards["v2", "v1"])
    assert cross_versions.transformed("v3", "v1") is None  # nothing knows the side-information of v1's items in v2
    assert cross_versions.transformed("v3", "v2") is not None  # v2's own items have theirs


def test_a_forward_edge_may_say_how_unsure_it_is(data: Data, make_version: Callable, tmp_path: Path) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 4, edges=[(v1, "forward")])
    cross_versions = CrossVersions(embedded(data, v1, v2))
    assert cross_versions.uncertainty("v2", "v1") is None
    cross_versions.forwards["v2", "v1"] = Telling(cross_versions.forwards["v2", "v1"])
    np.testing.assert_array_equal(cross_versions.uncertainty("v2", "v1"), np.arange(150))


def test_an_edge_that_waits_for_its_exporter_is_seen_and_needs_the_weights(
    data: Data, make_version: Callable, tmp_path: Path
) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 4, edges=[(v1, "forward")])
    (v2.folder / "edges").rename(v2.folder / "unfinished")
    write_card(v2.folder, v2.card)
    waiting = with_unexported_edges(load_version(v2.folder))
    assert [(edge.old, edge.kind, edge.folder) for edge in waiting.edges] == [("v1", EdgeKind.FORWARD, None)]
    assert with_unexported_edges(v1) == v1
    with pytest.raises(NoEncoder, match="the edge from 'v2' to 'v1' is an ONNX model"):
        CrossVersions(embedded(data, v1, waiting))


def test_moved_items_are_then_met_along_query_edges(data: Data, make_version: Callable, tmp_path: Path) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 4, drift=0.2, edges=[(v1, "forward")])
    v3 = make_version(tmp_path / "v3", "v3", 6, drift=0.2, edges=[(v2, "truncate")])
    cross_version = CrossVersions(embedded(data, v1, v2, v3)).declared("v3", "v1")
    assert cross_version.kinds == ("forward", "truncate")
    assert cross_version.compared.queries.shape == (70, 4)


def test_slerp_asks_both_encoders(data: Data, make_version: Callable, tmp_path: Path) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 4, drift=0.4)
    write_edge(v2.folder, Edge("v2", "v1", EdgeKind.SLERP))
    adapter = SlerpAdapter(np.eye(4, dtype=np.float32)[::-1].copy(), 0.4)
    adapter.save(v2.folder / "edges/v1")
    write_card(v2.folder, v2.card)
    cross_versions = CrossVersions(embedded(data, v1, load_version(v2.folder)))
    cross_version = cross_versions.declared("v2", "v1")
    expected = adapter(cross_versions.embeddings["v2"].queries_QD, cross_versions.embeddings["v1"].queries_QD)
    np.testing.assert_allclose(cross_version.compared.queries, expected, atol=1e-6)


def test_only_hyperbolic_embeddings_say_how_unsure_they_are(data: Data, make_version: Callable, tmp_path: Path) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 3, space={"kind": "lorentz", "curvature": 0.5})
    v2 = make_version(tmp_path / "v2", "v2", 3)
    cross_versions = CrossVersions(embedded(data, v1, v2))
    unsure = cross_versions.uncertainty("v2", "v1")
    assert unsure is not None
    length = np.linalg.norm(cross_versions.embeddings["v1"].items_ND, axis=1)
    assert np.argmax(unsure) == np.argmin(length)
    np.testing.assert_allclose(unsure, 1 - np.tanh(np.arcsinh(np.sqrt(0.5) * length)), rtol=1e-4)
    assert cross_versions.uncertainty("v1", "v2") is None


def test_versions_are_ordered_by_their_edges_and_a_circle_is_refused(chain: tuple[Version, ...]) -> None:
    v1, v2, v3 = chain
    assert oldest_first({"v3": v3, "v1": v1, "v2": v2}) == ["v1", "v2", "v3"]
    assert oldest_first({"v3": v3, "v1": v1}) == ["v3", "v1"]  # nothing says who is older
    circular = Version(v1.card, v1.folder, (Edge("v1", "v3", EdgeKind.IDENTITY),))
    with pytest.raises(InvalidArgument, match="form a cycle"):
        oldest_first({"v3": v3, "v1": circular, "v2": v2})


def test_a_version_that_cannot_embed_images_says_why(
    data: Data, make_version: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoEncoder, match=r"'bare' cannot embed images: it has no encoder\.onnx"):
        embed_version(make_version(tmp_path / "bare", "bare", 3, encoder=False), data)
    v1 = make_version(tmp_path / "v1", "v1", 3)
    monkeypatch.setattr(embeddings, "has_onnxruntime", lambda: False)
    with pytest.raises(NoEncoder, match=r"onnxruntime is not installed, and it has no weights\.safetensors"):
        embed_version(v1, data)


def test_an_edge_with_a_model_needs_onnxruntime_or_weights(
    data: Data, make_version: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 4, edges=[(v1, "onnx")])
    made = embedded(data, v1, v2)
    monkeypatch.setattr("training.evaluation.edges.has_onnxruntime", lambda: False)
    with pytest.raises(NoEncoder, match="the edge from 'v2' to 'v1' is an ONNX model"):
        CrossVersions(made)


def test_trained_weights_stand_in_for_a_forward_edge_with_all_that_it_tells(
    data: Data, make_version: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubling(ItemEdge):
        def transform_items(self, embedding: torch.Tensor, side: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            assert side is not None
            return {"moved": 2 * embedding, "next_side": side[:, :1], "variance": side[:, 1:2] ** 2}

        def is_stable(self, embedding: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
            raise NotImplementedError

    v1 = make_version(tmp_path / "v1", "v1", 4, side_dim=2)
    v2 = make_version(tmp_path / "v2", "v2", 4, edges=[(v1, "forward")])
    made = embedded(data, v1, v2)
    stub = SimpleNamespace(edge=Doubling(), edge_kind=EdgeKind.FORWARD)
    monkeypatch.setattr("training.evaluation.edges.has_onnxruntime", lambda: False)
    monkeypatch.setattr("training.evaluation.edges.WEIGHTS", "encoder.onnx")  # a file that this version has
    monkeypatch.setattr("training.evaluation.edges.Trained.load", lambda folder: stub)
    cross_versions = CrossVersions(made)
    cross_version = cross_versions.transformed("v2", "v1")
    np.testing.assert_allclose(cross_version.compared.items, made["v1"].items_ND, atol=1e-6)  # doubled, then normalised
    np.testing.assert_allclose(cross_versions.uncertainty("v2", "v1"), made["v1"].side_NS.T[1] ** 2, rtol=1e-5)
    stub.edge_kind = EdgeKind.ONNX
    with pytest.raises(NoEncoder, match="which requires onnxruntime"):
        CrossVersions(made)
