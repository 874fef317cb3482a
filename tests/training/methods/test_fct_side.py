"""FCT with side-information end to end: a chain of three versions whose items move on without their images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from index.edges.transform import load_forward
from index.encoders.encoder import Encoder, verify_version
from index.version import SIDE, Version
from index.version_folder.folder import load_version
from staging.inputs.recipes import quick, train_weights
from training import train as path
from training.data.images import ImageDataset
from training.evaluation.cross_version import CrossVersions
from training.evaluation.embeddings import embed_version
from training.method import ItemEdge
from training.networks.side_information import KINDS
from training.recipes import find_recipe
from training.sources import load_data
from training.trained import Trained

pytestmark = pytest.mark.slow

SMALL = {"branch": 8, "trunk": 8}


@dataclass(frozen=True)
class Chain:
    """v1 with side-information, v2 with signs, v3 without; v2's and v3's edges are FCT's."""

    v1: Version
    v2: Version
    v3: Version


@pytest.fixture(scope="module")
def chain(independent: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    root, fct = tmp_path_factory.mktemp("chain"), {"independent": str(independent), "options": SMALL}
    path.train(quick("digits_v1_side", side_dim=6), root / "v1", progress=False)
    v2 = quick("digits_fct_side", old=str(root / "v1"), side_bits=True, side_dim=5, **fct)
    path.train(replace(v2, options={**SMALL, "uncertainty": True}), root / "v2", progress=False)
    path.train(quick("digits_fct", old=str(root / "v2"), **fct), root / "v3", progress=False)
    return Chain(*(load_version(root / name) for name in ("v1", "v2", "v3")))


def pixels(count: int = 20) -> torch.Tensor:
    return ImageDataset(load_data("digits_new", "").query, find_recipe("digits_v1").preprocess).__getitems__(
        list(range(count))
    )[0]


def test_every_version_passes_the_checks_of_a_registration(chain: Chain) -> None:
    known = {version.name: version.card for version in (chain.v1, chain.v2)}
    for version in (chain.v1, chain.v2, chain.v3):
        verify_version(version.folder, known)

    assert [v.card.side_dim for v in (chain.v1, chain.v2, chain.v3)] == [6, 5, 0]
    assert [SIDE in v.card.files for v in (chain.v1, chain.v2, chain.v3)] == [True, True, False]


def test_served_side_information_is_what_was_trained(chain: Chain) -> None:
    for version, legal in ((chain.v1, None), (chain.v2, {-1.0, 1.0})):
        psi = Trained.load(version.folder).psi
        assert psi is not None
        with torch.inference_mode():
            expected, steady = psi(pixels()), psi.is_stable(pixels())
        served = Encoder(version).encode_arrays(pixels().numpy()).side
        assert served is not None
        np.testing.assert_allclose(served[steady], expected[steady], atol=1e-5)
        if legal is None:
            np.testing.assert_allclose(np.linalg.norm(served, axis=1), 1, atol=1e-5)
        else:
            assert set(served.ravel()) <= legal


def test_the_forward_edge_moves_items_as_it_was_trained_to(chain: Chain) -> None:
    stored = Encoder(chain.v1).encode_arrays(pixels().numpy())
    assert stored.side is not None
    carried = load_forward(chain.v2.edges[0], chain.v2.card, chain.v1.card).transform_items(stored.vectors, stored.side)

    edge = Trained.load(chain.v2.folder).edge
    assert isinstance(edge, ItemEdge)
    with torch.inference_mode():
        told = edge.transform_items(torch.from_numpy(stored.vectors), torch.from_numpy(stored.side))
    assert list(told) == ["moved", "next_side", "variance"]
    assert carried.side_NS is not None
    assert carried.variance_N is not None
    np.testing.assert_allclose(carried.vectors_ND, told["moved"], atol=1e-5)
    np.testing.assert_array_equal(carried.side_NS, told["next_side"])
    np.testing.assert_allclose(carried.variance_N, told["variance"][:, 0], rtol=1e-4)


def test_items_of_the_first_version_reach_the_third_without_their_images(chain: Chain) -> None:
    stored = Encoder(chain.v1).encode_arrays(pixels().numpy())
    second = load_forward(chain.v2.edges[0], chain.v2.card, chain.v1.card).transform_items(stored.vectors, stored.side)
    assert second.side_NS is not None
    third = load_forward(chain.v3.edges[0], chain.v3.card, chain.v2.card).transform_items(
        second.vectors_ND, second.side_NS
    )

    assert third.vectors_ND.shape == (20, 16)
    assert third.side_NS is None
    np.testing.assert_allclose(np.linalg.norm(third.vectors_ND, axis=1), 1, atol=1e-5)
    flipped = load_forward(chain.v3.edges[0], chain.v3.card, chain.v2.card)(second.vectors_ND, -second.side_NS)
    assert np.abs(flipped - third.vectors_ND).max() > 1e-3


def test_the_evaluation_follows_the_chain_by_h_and_g(chain: Chain) -> None:
    data = load_data("digits_new", "")
    cross_versions = CrossVersions({v.name: embed_version(v, data) for v in (chain.v1, chain.v2, chain.v3)})
    declared = cross_versions.declared("v3", "v1")

    assert declared.kinds == ("forward", "forward")


def test_the_report_of_a_training_reads_the_old_versions_side_information(chain: Chain) -> None:
    data, measured = load_data("digits_new", ""), chain.v2.card.metrics["new/old"]["cmc@1"]["value"]
    cross_versions = CrossVersions({v.name: embed_version(v, data) for v in (chain.v1, chain.v2)})
    cross_version = cross_versions.declared("v2", "v1")
    nearest = (cross_version.compared.queries @ cross_version.compared.items.T).argmax(1)

    assert np.mean(data.gallery.labels[nearest] == data.query.labels) == pytest.approx(measured, abs=0.005)


def test_side_information_leaves_the_encoder_as_it_would_be_without(tmp_path: Path) -> None:
    plain = train_weights(quick("digits_v1"), tmp_path / "plain")
    sided = train_weights(quick("digits_v1_side"), tmp_path / "sided")
    after = Trained.load(sided).raw.state_dict()

    assert all(torch.equal(x, after[name]) for name, x in Trained.load(plain).raw.state_dict().items())
    assert {p.name for p in tmp_path.iterdir()} == {"plain", "sided"}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_ships_and_moves_items(kind: str, bits: bool, independent: Path, tmp_path: Path) -> None:
    v1 = path.train(quick("digits_v1_side", side=kind, side_bits=bits), tmp_path / "v1", progress=False)
    recipe = quick("digits_fct", old=str(v1), independent=str(independent), options=SMALL)
    v2 = path.train(recipe, tmp_path / "v2", progress=False)
    old, new = load_version(v1), verify_version(v2, {"v1": load_version(v1).card})
    stored = Encoder(old).encode_arrays(pixels().numpy())
    assert stored.side is not None
    assert stored.side.std(axis=0).min() > 0 or bits

    forward = load_forward(new.edges[0], new.card, old.card)
    moved, turned = (forward(stored.vectors, side) for side in (stored.side, -stored.side))
    assert np.abs(moved - turned).max() > 1e-3
