"""Every compatible method end to end on a few batches of digits: it trains, leaves the old version alone, and ships."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import naive
from index.edges.calibration import calibration_from_json
from index.edges.transform import load_transform
from index.encoders.encoder import Encoder, verify_version
from index.query.edge_maps import EDGE, MODE, OWN
from index.query.merge import Mode
from index.space import space_from_json
from index.version import EdgeKind, Version
from index.version_folder.folder import load_version
from staging.inputs.recipes import quick
from training import train as path
from training.data.images import Data, ImageDataset
from training.evaluation.embeddings import embed_version
from training.losses import lorentz
from training.losses.losses import UNKNOWN
from training.measurement import run_over
from training.recipes import RECIPES, find_recipe
from training.sources import load_data
from training.trained import Trained

METHODS = {
    "l2": EdgeKind.IDENTITY,
    "lwf": EdgeKind.IDENTITY,
    "bct": EdgeKind.IDENTITY,
    "oca": EdgeKind.TRUNCATE,
    "fct": EdgeKind.FORWARD,
    "contrast": EdgeKind.IDENTITY,
    "hot_refresh": EdgeKind.IDENTITY,
    "advbct": EdgeKind.IDENTITY,
    "hoc": EdgeKind.IDENTITY,
    "bt2": EdgeKind.TRUNCATE,
    "hbct": EdgeKind.IDENTITY,
}
SLOW = {"l2", "lwf", "contrast", "hot_refresh", "hoc", "advbct"}
"""They ship what bct ships, by the same path."""


@dataclass(frozen=True)
class Made:
    version: Version
    old: Version
    seen: list[Trained]
    before: list[dict[str, Tensor]]
    old_files: dict[str, bytes]


@pytest.fixture(scope="module")
def references(v1: Path, hyperbolic: Path, independent: Path) -> dict[str, Path]:
    return {"v1": v1, "hyperbolic": hyperbolic, "independent": independent}


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture(scope="module", params=[pytest.param(m, marks=pytest.mark.slow if m in SLOW else ()) for m in METHODS])
def made(request: pytest.FixtureRequest, references: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    old = references["hyperbolic" if request.param == "hbct" else "v1"]
    recipe = quick(f"digits_{request.param}", old=str(old))
    if recipe.independent:
        recipe = replace(recipe, independent=str(references["independent"]))
    seen, before, old_files, load = [], [], files(old), path.load_reference

    def watched(*arguments: object) -> Trained | None:
        trained = load(*arguments)
        if trained is not None:
            seen.append(trained)
            before.append({name: x.clone() for name, x in trained.state_dict().items()})
        return trained

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, "load_reference", watched)
        out = path.train(recipe, tmp_path_factory.mktemp(request.param) / "v2", progress=False)
    return Made(load_version(out), load_version(old), seen, before, old_files)


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data("digits_new", "")


def images() -> Tensor:
    tensors = ImageDataset(load_data("digits_new", "").query, RECIPES["digits_v1"]().preprocess)
    return torch.stack([tensors[row][0] for row in range(20)])


def test_the_old_and_the_independent_model_are_bit_identical_after_training(made: Made) -> None:
    assert len(made.seen) == (2 if made.version.card.method in {"bt2", "fct"} else 1)
    for trained, before in zip(made.seen, made.before, strict=True):
        after = trained.state_dict()
        assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert files(made.old.folder) == made.old_files


def test_the_exported_folder_passes_every_check_of_a_registration(made: Made) -> None:
    (edge,) = verify_version(made.version.folder, {made.old.name: made.old.card}).edges
    card, lorentz = made.version.card, made.version.card.method == "hbct"

    assert card.space["kind"] == ("lorentz" if lorentz else "cosine")
    assert (edge.kind, edge.old, edge.old_encoder) == (METHODS[card.method], made.old.name, made.old.card.encoder)
    assert set(edge.scores) == {"cmc@1", "cmc@5", "mAP@1.0"}
    calibration = edge.calibration or {}
    assert calibration.get(MODE) in {None, *Mode}
    for name in (EDGE, OWN):
        # Scores of hyperbolic space are distances: the higher, the less likely a match.
        assert (calibration_from_json(calibration[name]).slope > 0) == (not lorentz)


def test_the_card_says_how_the_version_was_made_and_on_what(made: Made) -> None:
    card = made.version.card

    assert (card.recipe["name"], card.recipe["epochs"]) == (find_recipe(f"digits_{card.method}").name, 2)
    assert (card.data["images"], card.data["classes"]) == (900, list(range(10)))
    assert (card.data["queries"], card.data["items"]) == (320, 577)
    assert set(card.metrics) == {"old/old", "new/old", "new/new"}
    for scores in card.metrics.values():
        assert all(0 <= s["low"] <= s["value"] <= s["high"] <= 1 for s in scores.values())


def test_the_edge_carries_what_serving_measures_with_the_exported_files(made: Made, data: Data) -> None:
    new, old, (edge,) = made.version, made.old, made.version.edges
    queries, items = embed_version(new, data).queries_QD, embed_version(old, data).items_ND
    transform, forward = load_transform(edge, new.card, old.card), edge.kind is EdgeKind.FORWARD
    queries, items = (queries, transform(items)) if forward else (transform(queries), items)
    space = space_from_json((new if forward else old).card.space)
    nearest = data.gallery.labels[naive.costs(queries, items, space).argmin(axis=1)]

    # One query of 320 may fall the other way where float rounding differs between torch and onnxruntime.
    assert np.mean(nearest == data.query.labels) == pytest.approx(edge.scores["cmc@1"].value, abs=1.01 / 320)
    lengths = np.linalg.norm(items if forward else queries, axis=1)
    if new.card.space["kind"] == "cosine":
        np.testing.assert_allclose(lengths, 1.0, atol=1e-5)
    else:
        assert lengths.max() <= np.sinh(1.2) + 1e-5


def test_a_version_read_back_from_its_folder_embeds_as_its_encoder_does(made: Made) -> None:
    with torch.inference_mode():
        again = Trained.load(made.version.folder)(images())
    served = Encoder(made.version).encode_arrays(images().numpy()).vectors

    np.testing.assert_allclose(again.numpy(), served, atol=1e-5)


def test_a_version_keeps_a_head_for_the_next_one_where_its_method_has_a_linear_one(made: Made) -> None:
    head = Trained.load(made.version.folder).head

    assert (head is None) == (made.version.card.method == "hbct")
    if head is not None:
        assert head[0].shape == (10, made.version.card.dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "third"),
    [
        ("digits_l2", {"dim": 20}),
        ("digits_bt2", {"dim": 36}),  # n is now 20, m still 16: d = 4 is the least that can work
        ("digits_hbct", {"options": {"zeta": 1.4}}),
    ],
)
def test_a_third_version_is_trained_against_the_second(
    name: str, third: dict[str, object], references: dict[str, Path], tmp_path: Path
) -> None:
    old = references["hyperbolic" if name == "digits_hbct" else "v1"]
    independent = str(references["independent"]) if name == "digits_bt2" else ""
    v2 = path.train(quick(name, old=str(old), independent=independent), tmp_path / "v2", progress=False)
    v3 = path.train(quick(name, old=str(v2), independent=independent, **third), tmp_path / "v3", progress=False)
    (edge,) = load_version(v3).edges

    verify_version(v3)
    assert edge.old == "v2"
    load_transform(edge, load_version(v3).card, load_version(v2).card)


def test_a_smaller_version_reaches_the_old_space_by_zeros_for_what_it_lacks(
    references: dict[str, Path], tmp_path: Path
) -> None:
    recipe = quick("digits_l2", old=str(references["v1"]), dim=6)
    made, old = load_version(path.train(recipe, tmp_path / "v2", progress=False)), load_version(references["v1"])
    queries = Encoder(made).encode_arrays(images().numpy()).vectors
    arrived = load_transform(made.edges[0], made.card, old.card)(queries)

    assert made.edges[0].kind is EdgeKind.ONNX
    np.testing.assert_allclose(arrived, np.pad(queries, ((0, 0), (0, 10))), atol=1e-6)
    assert made.edges[0].scores["cmc@1"].value == pytest.approx(made.card.metrics["new/old"]["cmc@1"]["value"])


def test_describe_gives_methods_the_old_versions_means_centres_and_radii(references: dict[str, Path]) -> None:
    old, data = Trained.load(references["v1"]), load_data("digits_new", "")
    described = path.summarise_old(old, data)
    rows = np.flatnonzero(data.train.labels == data.classes[7])
    tensors = ImageDataset(data.train, old.recipe.preprocess)
    raw = torch.cat([old.raw(tensors[int(row)][0][None]) for row in rows])
    unit = raw / raw.norm(dim=1, keepdim=True)

    torch.testing.assert_close(described.mean_CN[7], raw.mean(0))
    torch.testing.assert_close(described.class_means(raw=False)[7], unit.mean(0))
    away = sorted((unit - unit.mean(0)).norm(dim=1).tolist())
    low, high = away[len(away) // 4], away[3 * len(away) // 4]
    usual = [x for x in away if x <= high + 1.5 * (high - low)]
    assert described.radius_C.tolist()[7] == pytest.approx(usual[-1])
    assert int((described.label_C == UNKNOWN).sum()) == 5
    assert described.reach == 0


def test_the_reach_of_a_hyperbolic_old_version_is_its_largest_distance_from_the_origin(
    references: dict[str, Path],
) -> None:
    old, data = Trained.load(references["hyperbolic"]), load_data("digits_new", "")
    points = run_over(data.train, old, old.recipe.preprocess)

    reach = path.summarise_old(old, data).reach

    assert reach == pytest.approx(float(lorentz.distance(points, torch.zeros_like(points)).max()), abs=1e-4)
