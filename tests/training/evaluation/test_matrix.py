"""The compatibility matrix of a chain against naive twins, and its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import naive as naive_twin
from index.errors import InvalidArgument
from index.evaluation.curves import CALIBRATED, RAW
from index.evaluation.metrics import Compared, mean_interval, p_com, p_up, update_gain
from index.evaluation.relevance import LabelRelevance
from index.evaluation.scores import METRICS
from index.space import space_from_json
from index.version import Score, Version
from index.version_folder.folder import load_version
from training.data.images import Data
from training.evaluation.criterion import Strict, strict_criterion
from training.evaluation.embeddings import embed_version
from training.evaluation.matrix import (
    REENCODE,
    REFINE,
    TRANSFORM,
    Evaluation,
    Upgrade,
    evaluate,
    ratio_interval,
    relevance_of,
)
from training.evaluation.tables import as_json, lines

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def data(image_set: Callable) -> Data:
    """60 items of 8 classes, 45 queries of 9: one class cannot be found."""
    gallery = image_set(60, 8, 1000)
    return Data(gallery, image_set(45, 9, 3000), gallery)


@pytest.fixture(scope="module")
def chain(make_version: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[Version]:
    place = tmp_path_factory.mktemp("chain")
    v1 = make_version(place / "v1", "v1", 2)
    v2 = make_version(place / "v2", "v2", 4, drift=0.5, edges=[(v1, "truncate", 0.7)])
    v3 = make_version(place / "v3", "v3", 4, drift=0.4, edges=[(v2, "identity", 0.8)])
    alone = make_version(place / "alone", "alone", 6, seed=3)
    return [v1, v2, v3, alone]


@pytest.fixture(scope="module")
def measured(data: Data, chain: list[Version]) -> Evaluation:
    v1, v2, v3, alone = chain
    return evaluate([v3, v1, v2], data, independents={"v3": alone}, points=6, verification=True)


def naive(queries: np.ndarray, items: np.ndarray, data: Data) -> dict[str, list[float]]:
    """Each metric of each query that has a relevant item, by sorting cosines."""
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for query, label in zip(queries, data.query.labels, strict=True):
        ranking = data.gallery.labels[np.argsort(-(items @ query), kind="stable")] == label
        if not ranking.any():
            continue
        found["cmc@1"].append(float(ranking[0]))
        found["cmc@5"].append(float(ranking[:5].any()))
        hits = [ranking[: r + 1].mean() for r in np.flatnonzero(ranking)]
        found["mAP@1.0"].append(float(np.mean(hits)))
    return found


@pytest.fixture(scope="module")
def twin(data: Data, chain: list[Version]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """The chain's cells from the definition: v3 meets v2 as it is, and v1 through v2's truncation."""
    embeddings = {version.name: embed_version(version, data) for version in chain}

    def cut(x: np.ndarray) -> np.ndarray:
        return x[:, :2] / np.linalg.norm(x[:, :2], axis=1, keepdims=True)

    whole = {name: one.queries_QD for name, one in embeddings.items()}
    queries = {("v2", "v1"): cut(whole["v2"]), ("v3", "v1"): cut(whole["v3"]), ("v3", "v2"): whole["v3"]}
    queries |= {(name, name): whole[name] for name in embeddings}
    return {pair: naive(asked, embeddings[pair[1]].items_ND, data) for pair, asked in queries.items()}


def test_every_cell_equals_its_naive_twin(measured: Evaluation, twin: dict) -> None:
    assert measured.names == ["v1", "v2", "v3"]
    assert set(measured.cells) == set(twin) - {("alone", "alone")}
    for pair, cell in measured.cells.items():
        for metric in METRICS:
            assert cell.retrieval.mean(metric) == pytest.approx(np.mean(twin[pair][metric]), abs=1e-6)
            assert cell.retrieval.interval(metric) == mean_interval(twin[pair][metric])
    assert measured.cells["v3", "v1"].kinds == ("identity", "truncate")
    assert (measured.queries, measured.items) == (45, 60)
    assert measured.skipped == 45 - len(twin["v1", "v1"]["cmc@1"]) > 0


def test_upgrades_equal_their_definitions_query_by_query(measured: Evaluation, twin: dict) -> None:
    assert set(measured.upgrades) == {("v2", "v1"), ("v3", "v1"), ("v3", "v2")}
    for (new, old), upgrade in measured.upgrades.items():
        before, after = twin[old, old], twin[new, old]
        for metric in METRICS:
            assert upgrade.difference[metric].value == pytest.approx(np.mean(after[metric]) - np.mean(before[metric]))
            assert upgrade.difference[metric].low <= upgrade.difference[metric].value <= upgrade.difference[metric].high
        flips = sum(was > now for was, now in zip(before["cmc@1"], after["cmc@1"], strict=True))
        assert upgrade.flips == flips
        assert upgrade.flip_share.value == pytest.approx(flips / len(before["cmc@1"]))


def test_the_strict_criterion_counts_the_pairs_whose_constraint_holds() -> None:
    queries, items, labels = (naive_twin.units(7, 3, seed=s) for s in (1, 2)), naive_twin.units(9, 3), np.arange(16) % 3
    space = space_from_json({"kind": "cosine"})
    before, after = (Compared(q, items, space) for q in queries)
    itself = np.array([-1, -1, 0, 1, 2, 3, 4])
    held: dict[bool, list[bool]] = {True: [], False: []}
    for q in range(7):
        for n in range(9):
            old, new = (-float(side.queries[q] @ items[n]) for side in (before, after))
            if labels[q] == labels[7 + n] and itself[q] != n:
                held[True].append(new <= old)
            elif labels[q] != labels[7 + n]:
                held[False].append(new >= old)

    relevance = LabelRelevance(labels[:7], labels[7:], itself)
    strict = strict_criterion(before, after, relevance)
    assert strict == Strict(*(pytest.approx(np.mean(held[kind])) for kind in (True, False)))
    assert strict_criterion(before, before, relevance) == Strict(1.0, 1.0)
    assert strict_criterion(before, replace(after, items=items.copy()), relevance) is None


def test_gains_are_measured_against_the_independent_version_where_there_is_one(
    measured: Evaluation, twin: dict
) -> None:
    assert measured.upgrades["v2", "v1"].p_com == {}
    for old in ("v1", "v2"):
        upgrade = measured.upgrades["v3", old]
        for metric in METRICS:
            old_old, new_old, best = (np.mean(twin[p][metric]) for p in ((old, old), ("v3", old), ("alone", "alone")))
            assert (metric in upgrade.p_com) == (best > old_old)  # nothing to gain, no share of it
            if metric in upgrade.p_com:
                assert upgrade.p_com[metric].value == pytest.approx(p_com(old_old, new_old, best))
                assert (metric in upgrade.update_gain) == (update_gain(old_old, new_old, best) is not None)
    for metric in METRICS:
        new_new, best = (np.mean(twin[p][metric]) for p in (("v3", "v3"), ("alone", "alone")))
        assert measured.p_up["v3"][metric].value == pytest.approx(p_up(new_new, best))


def test_only_a_compatible_version_has_an_update_gain() -> None:
    gained, lost = Score(0.1, 0.05, 0.15), Score(-0.5, -0.6, -0.4)
    scores = {"cmc@1": lost, "mAP@1.0": gained}
    upgrade = Upgrade(scores, scores, 0, gained, 1.0)

    assert upgrade.update_gain == {"mAP@1.0": gained}


def test_curves_start_at_new_old_and_end_at_new_new(measured: Evaluation) -> None:
    assert {key[:3] for key in measured.curves} == {(new, old, REENCODE) for new, old in measured.upgrades}
    for (new, old, _, order, _), curve in measured.curves.items():
        assert order == "random"  # nothing says how unsure these items are
        assert curve.curve.values[0] == pytest.approx(measured.cells[new, old].retrieval.cmc(1))
        assert curve.curve.values[-1] == pytest.approx(measured.cells[new, new].retrieval.cmc(1))
        assert len(curve.curve.shares) == 6


def test_a_forward_edge_gives_a_transform_curve_from_old_old(
    data: Data, make_version: Callable, tmp_path: Path
) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 3, side_dim=3)
    v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "forward")])
    measured = evaluate([v1, v2], data, points=3)
    moved = measured.curves["v2", "v1", TRANSFORM, "random", RAW].curve
    assert moved.values[0] == pytest.approx(measured.cells["v1", "v1"].retrieval.cmc(1))
    assert moved.values[-1] == pytest.approx(measured.cells["v2", "v1"].retrieval.cmc(1))
    again = measured.curves["v2", "v1", REENCODE, "random", CALIBRATED].curve
    assert again.values[-1] == pytest.approx(measured.cells["v2", "v2"].retrieval.cmc(1))
    refined = measured.curves["v2", "v1", REFINE, "random", RAW].curve
    assert (refined.values[0], refined.values[-1]) == pytest.approx((moved.values[-1], again.values[-1]))


def test_uncertain_items_move_first_where_the_old_space_says_who_they_are(
    data: Data, make_version: Callable, tmp_path: Path
) -> None:
    lorentz = {"kind": "lorentz", "curvature": 1.0}
    v1 = make_version(tmp_path / "v1", "v1", 3, space=lorentz)
    v2 = make_version(tmp_path / "v2", "v2", 3, space=lorentz, drift=0.3, edges=[(v1, "identity")])
    measured = evaluate([v1, v2], data, points=3, metric="mAP@1.0")
    assert {key[3] for key in measured.curves} == {"random", "uncertainty"}
    ends = {key: curve.curve.values[[0, -1]].tolist() for key, curve in measured.curves.items()}
    assert len({tuple(np.round(end, 9)) for end in ends.values()}) == 1


def test_images_on_both_sides_leave_themselves_out(data: Data, chain: list[Version], make_image: Callable) -> None:
    both = Data(data.gallery, data.gallery, data.gallery, same=True)
    measured = evaluate(chain[:2], both, points=2)
    items = embed_version(chain[0], both).items_ND
    scores = items @ items.T
    np.fill_diagonal(scores, -2)
    labels = data.gallery.labels
    expected = (labels[scores.argmax(axis=1)] == labels)[[(labels == label).sum() > 1 for label in labels]]
    assert measured.cells["v1", "v1"].retrieval.cmc(1) == pytest.approx(expected.mean())


def test_the_tables_name_every_number(measured: Evaluation) -> None:
    text = "\n".join(lines(measured))
    score = measured.cells["v3", "v1"].retrieval.interval("mAP@1.0")
    assert f"{score.value:.3f} ({score.low:.3f} - {score.high:.3f})" in text
    assert "45 queries" in text
    (row,) = [line for line in text.splitlines() if line.split()[:5] == ["v3/v1", "identity", "+", "truncate", "cmc@1"]]
    assert f"{measured.upgrades['v3', 'v1'].flips}: " in row
    for word in ("P_com", "update gain", "P_up", "TAR@FAR=0.01", "TPIR@FPIR=0.1", "largest dip", "calibrated"):
        assert word in text
    better = sum(u.difference["cmc@5"].value > 0 for u in measured.upgrades.values())
    assert f"new/old > old/old in {better} of 3 pairs" in text


def test_a_cell_without_an_edge_is_a_dash_in_the_table_and_absent_in_json(data: Data, chain: list[Version]) -> None:
    measured = evaluate([chain[0], chain[3]], data, points=2)
    second = [line.split()[1] for line in lines(measured) if line.startswith(f"{measured.names[1]} ")]
    assert second == ["-"] * len(METRICS)
    assert set(as_json(measured)["matrix"]) == {"v1/v1", "alone/alone"}
    assert measured.upgrades == {}
    assert measured.curves == {}


def test_json_holds_everything_and_no_number_that_json_lacks(measured: Evaluation) -> None:
    held = json.loads(json.dumps(as_json(measured), allow_nan=False))
    assert held["matrix"]["v3/v1"]["edges"] == ["identity", "truncate"]
    assert held["matrix"]["v3/v1"]["cmc@1"] == vars(measured.cells["v3", "v1"].retrieval.interval("cmc@1"))
    assert held["upgrades"]["v2/v1"]["negative_flips"]["count"] == measured.upgrades["v2", "v1"].flips
    assert held["upgrades"]["v3/v1"]["p_com"]["cmc@1"]["value"] == measured.upgrades["v3", "v1"].p_com["cmc@1"].value
    assert len(held["curves"]) == len(measured.curves)
    curve = held["curves"][0]
    assert len(curve["shares"]) == len(curve["values"]) == 6
    assert {"new", "old", "kind", "order", "scores", "metric", "area", "largest_dip"} <= set(curve)


def test_a_ratio_resamples_both_sides_together() -> None:
    generator = np.random.default_rng(0)
    bottom = generator.random(300)
    score = ratio_interval(0.5 * bottom, bottom)
    assert (score.value, score.low, score.high) == pytest.approx((0.5, 0.5, 0.5))
    noisy = ratio_interval(0.5 * bottom + generator.normal(size=300) * 0.1, bottom)
    assert noisy.low < noisy.value < noisy.high
    assert noisy.high - noisy.low == pytest.approx(2 * 1.96 * 0.1 / 300**0.5 / bottom.mean(), rel=0.2)
    assert ratio_interval([1.0, 2.0], [1.0, -1.0]) is None
    assert ratio_interval([-1.0, -2.0], [-1.0, -1.0]) is None


def test_what_cannot_be_evaluated_is_named(data: Data, chain: list[Version]) -> None:
    with pytest.raises(InvalidArgument, match="two of the versions are named 'v1'"):
        evaluate([chain[0], chain[0]], data)
    with pytest.raises(InvalidArgument, match=r"metric must be one of cmc@1, cmc@5, mAP@1.0, not 'cmc@7'"):
        evaluate(chain[:1], data, metric="cmc@7")
    for order in ("loudest", "traffic", "transformed"):
        with pytest.raises(InvalidArgument, match=f"one of random, uncertainty, oldest, newest, not '{order}'"):
            evaluate(chain[:2], data, orders=["oldest", order])
    alone = Data(data.train, data.query.take(np.arange(1)), data.gallery)
    with pytest.raises(InvalidArgument, match="at least two queries"):
        relevance_of(alone)


@pytest.mark.slow
def test_versions_trained_here_are_evaluated_without_faiss_onnx_or_matplotlib() -> None:
    """Where only torch is installed the weights stand in for the ONNX models, forward edges included."""
    folders = [ROOT / "examples" / name for name in ("v1", "v2-fct")]
    code = f"""
import json, sys
for name in ("faiss", "onnx", "onnxruntime", "onnxscript", "matplotlib", "fastapi", "sqlalchemy", "pydantic"):
    sys.modules[name] = None
import torch
torch.set_num_threads(1)
from pathlib import Path
from index.version_folder.folder import load_version
from index.space import space_from_json
from training.evaluation.matrix import evaluate
from training.sources import load_data
versions = [load_version(Path(folder)) for folder in {list(map(str, folders))}]
measured = evaluate(versions, load_data("digits_new", ""), points=2)
print(json.dumps({{"/".join(pair): cell.retrieval.mean("mAP@1.0") for pair, cell in measured.cells.items()}}))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    trained = load_version(folders[1]).card.metrics
    names = {"old/old": "v1/v1", "new/old": "v2-fct/v1", "new/new": "v2-fct/v2-fct"}
    expected = {name: trained[pair]["mAP@1.0"]["value"] for pair, name in names.items()}
    assert json.loads(ended.stdout) == pytest.approx(expected, abs=1e-3)
