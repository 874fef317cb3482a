"""Edges fitted on pairs: what is written loads, serves, and scores what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.edges.calibration import calibration_from_json
from index.encoders.encoder import verify_version
from index.errors import InvalidArgument, InvalidVector, InvalidVersionFolder, Unwritable
from index.evaluation.fitting import Pairs
from index.evaluation.metrics import retrieval_from_rankings
from index.gallery import Gallery
from index.version import Version
from index.version_folder.folder import load_version
from training.adapters import fit_edge as module
from training.adapters.fit_edge import KINDS, fit_edge, read_options
from training.adapters.pairs import embed_pairs, read_pairs
from training.adapters.residual_mlp import FewPairsWarning
from training.data.images import Data
from training.evaluation.matrix import evaluate

OPTIONS: dict[str, dict[str, float]] = {"low_rank": {"rank": 2}, "mlp": {"epochs": 3, "hidden": 16}}
SERVED = {
    "procrustes": "matrix",
    "ridge": "matrix",
    "low_rank": "matrix",
    "mlp": "onnx",
    "slerp": "slerp",
    "zero_pad": "zero_pad",
}


@pytest.fixture(autouse=True)
def _few_pairs_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index.evaluation.adapters.FEW_PAIRS", 0)


@pytest.fixture(scope="module")
def data(image_set: Callable) -> Data:
    return Data(*(image_set(count, 6, seed) for count, seed in ((120, 0), (40, 1000), (55, 2000))))


@pytest.fixture
def old(make_version: Callable, tmp_path: Path) -> Version:
    return make_version(tmp_path / "v1", "v1", 4)


@pytest.fixture
def new(make_version: Callable, tmp_path: Path) -> Version:
    return make_version(tmp_path / "v2", "v2", 6, drift=0.3, seed=0)


def served(old: Version, new: Version, pairs: Pairs) -> Any:
    """CMC@1 and mAP over a gallery of old items alone, asked by new queries."""
    gallery = Gallery()
    gallery.declare(old)
    gallery.declare(load_version(new.folder))
    keys = range(len(pairs.old_items_IN))
    gallery.apply({("v1", "encoded"): (keys, pairs.old_items_IN)})
    queries = {"v1": pairs.old_QN, "v2": pairs.new_QM}
    found = gallery.search("v2", queries.__getitem__, len(keys), encoders=frozenset({"v1"}))
    right = pairs.relevance.relevant(slice(None)).sum(axis=1)
    return retrieval_from_rankings(pairs.relevance.item_codes[found.keys_QK], pairs.relevance.query_codes, right)


@pytest.mark.parametrize("kind", SERVED)
def test_a_written_edge_loads_and_the_gallery_scores_what_was_measured(
    data: Data, old: Version, new: Version, kind: str
) -> None:
    pairs = embed_pairs(data, old, new)
    fitted = fit_edge(old, new, pairs, kind, OPTIONS.get(kind))
    verified = verify_version(new.folder, {"v1": old.card})
    (edge,) = verified.edges
    assert edge.kind.value == SERVED[kind]
    assert edge.support == (0 if kind == "zero_pad" else 120)
    assert edge.old_encoder == old.card.encoder
    assert edge.scores == fitted.edge.scores
    answer = served(old, new, pairs)
    for metric in ("cmc@1", "mAP@1.0"):
        assert answer.mean(metric) == pytest.approx(edge.scores[metric].value, abs=1e-4)
        assert edge.scores[metric].low <= edge.scores[metric].value <= edge.scores[metric].high
    calibration = edge.calibration or {}
    through, own = (calibration_from_json(calibration[name]) for name in ("edge", "own"))
    assert own(0.99) > own(0.0)
    assert through(0.99) > through(0.0)


def test_the_best_kind_on_pairs_of_the_fitting_share_is_chosen_and_every_other_told(
    data: Data, old: Version, new: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "mlp", lambda pairs, new, old, _: module._mlp(pairs, new, old, OPTIONS["mlp"]))
    fitted = fit_edge(old, new, embed_pairs(data, old, new), "auto")

    choice = fitted.choice
    assert set(choice.reached) == {"procrustes", "ridge", "low_rank", "slerp", "mlp"}
    assert choice.left_out == {}
    assert {len(measured.valid) for measured in choice.reached.values()} == {24}
    assert fitted.edge.kind.value == SERVED[choice.kind]
    assert fitted.edge.support == 120
    assert len(fitted.advice) == 3
    assert sum(line.startswith(("tried ", "left out ")) for line in fitted.lines()) == 5


def test_evaluation_measures_the_same(data: Data, old: Version, new: Version) -> None:
    for kind in ("ridge", "slerp"):
        fitted = fit_edge(old, load_version(new.folder), embed_pairs(data, old, new), kind, overwrite=True)
        measured = evaluate([old, load_version(new.folder)], data, points=2)
        assert measured.cells["v2", "v1"].retrieval.cmc(1) == pytest.approx(fitted.edge.scores["cmc@1"].value)


def test_the_lines_say_what_was_fitted_and_what_it_gains(data: Data, old: Version, new: Version) -> None:
    text = "\n".join(fit_edge(old, new, embed_pairs(data, old, new), "procrustes").lines())
    assert "v2 -> v1: matrix, fitted on 120 pairs, measured with 40 queries" in text
    assert "new/old - old/old on cmc@1: " in text


def test_a_query_without_an_item_of_its_class_counts_nowhere(
    data: Data, old: Version, new: Version, tmp_path: Path
) -> None:
    """Every third pair is alone in its class."""
    labels = np.where(np.arange(120) % 3, np.arange(120) % 2, 1000 + np.arange(120))
    pairs = read_pairs(write_pairs(tmp_path / "pairs.npz", old, new, data, {"labels": labels}), old, new)

    fitted = fit_edge(old, new, pairs, "procrustes")

    used = int((labels[np.random.default_rng(0).permutation(120)[:24]] < 2).sum())
    assert used < 24
    assert fitted.as_json()["queries"] == used
    assert f"measured with {used} queries" in next(fitted.lines())


def write_pairs(path: Path, old: Version, new: Version, data: Data, change: dict[str, Any] | None = None) -> Path:
    pairs = embed_pairs(data, old, new)
    np.savez(path, **{"new": pairs.new_SM, "old": pairs.old_SN, "labels": pairs.labels_S} | (change or {}))
    return path


def test_pairs_from_a_file_are_split_into_those_to_fit_on_and_those_to_measure_with(
    data: Data, old: Version, new: Version, tmp_path: Path
) -> None:
    pairs = read_pairs(write_pairs(tmp_path / "p.npz", old, new, data), old, new)
    assert (len(pairs.new_SM), len(pairs.new_QM), len(pairs.old_items_IN)) == (96, 24, 120)
    held_out = {row.tobytes() for row in pairs.new_QM}
    assert not held_out & {row.tobytes() for row in pairs.new_SM}
    itself = pairs.relevance.self_Q
    np.testing.assert_array_equal(pairs.new_items_IM[itself], pairs.new_QM)
    fitted = fit_edge(old, new, pairs, "ridge")
    assert fitted.edge.support == 96
    assert fitted.old_old is not None


def test_without_labels_only_the_own_image_is_right(data: Data, old: Version, new: Version, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "p.npz", old, new, data)
    with np.load(path) as held:
        np.savez(tmp_path / "bare.npz", new=held["new"], old=held["old"])
    pairs = read_pairs(tmp_path / "bare.npz", old, new)
    fitted = fit_edge(old, new, pairs, "ridge")
    assert fitted.old_old is None
    assert fitted.edge.calibration is None
    assert served(old, new, pairs).mean("cmc@1") == pytest.approx(fitted.edge.scores["cmc@1"].value, abs=1e-6)
    with pytest.raises(InvalidArgument, match="kind slerp needs labels"):
        fit_edge(old, new, pairs, "slerp", overwrite=True)


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "of one array"])
def test_a_file_that_is_no_npz_is_told_as_one(old: Version, new: Version, tmp_path: Path, cut: bool) -> None:
    path = tmp_path / "p.npz"
    np.savez(path, new=np.ones((9, 6)))
    if cut:
        path.write_bytes(path.read_bytes()[:60])
    else:
        np.save(tmp_path / "p.npy", np.ones(3))
        path.write_bytes((tmp_path / "p.npy").read_bytes())
    with pytest.raises(
        InvalidArgument, match=r"p\.npz cannot be used: " + ("" if cut else r"it is an \.npy of one array")
    ):
        read_pairs(path, old, new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"new": np.ones((120, 5))},
            r"hold new \(120, 5\) and old \(120, 4\); versions 'v2' and 'v1' need \(S, 6\) and",
        ),
        ({"old": np.ones((119, 4))}, r"old \(119, 4\); .* with one S of at least 10"),
        ({"new": np.ones((9, 6)), "old": np.ones((9, 4))}, "at least 10"),
        ({"new": np.float64(3)}, r"hold new \(\)"),
        ({"labels": np.arange(4)}, r"hold labels \(4,\), not \(120,\)"),
        ({"labels": np.arange(120)}, r"no two of the 120 pairs .*p\.npz share a label"),
        ({"labels": np.zeros(120)}, r"p\.npz hold labels of only one class, 0\.0, so that every answer is right"),
        ({"labels": np.where(np.arange(120) < 2, np.nan, 1.0)}, r"p\.npz hold labels that are NaN"),
        ({"old": np.array([object()])}, "cannot be used"),
    ],
)
def test_pairs_that_do_not_fit_the_versions_are_refused_in_one_message(
    data: Data, old: Version, new: Version, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read_pairs(write_pairs(tmp_path / "p.npz", old, new, data, change), old, new)


def test_pairs_that_are_no_embeddings_are_refused(data: Data, old: Version, new: Version, tmp_path: Path) -> None:
    with pytest.raises(InvalidVector, match=r"p\.npz, /pairs/new/0: .* finite"):
        read_pairs(write_pairs(tmp_path / "p.npz", old, new, data, {"new": np.full((120, 6), np.nan)}), old, new)
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(InvalidArgument, match=r"text\.npz cannot be used"):
        read_pairs(tmp_path / "text.npz", old, new)


def test_an_edge_that_is_there_is_only_replaced_on_demand(data: Data, old: Version, new: Version) -> None:
    pairs = embed_pairs(data, old, new)
    fit_edge(old, new, pairs, "ridge")
    again = load_version(new.folder)
    with pytest.raises(InvalidArgument, match=r"already has an edge .* of kind matrix; --overwrite replaces it"):
        fit_edge(old, again, pairs, "zero_pad")
    fit_edge(old, again, pairs, "zero_pad", overwrite=True)
    assert [p.name for p in (new.folder / "edges/v1").iterdir()] == ["edge.json"]


def test_other_edges_and_files_stay_as_they_were(
    data: Data, old: Version, make_version: Callable, tmp_path: Path
) -> None:
    v0 = make_version(tmp_path / "v0", "v0", 6)
    new = make_version(tmp_path / "v2", "v2", 6, drift=0.3, edges=[(v0, "matrix")])
    before = dict(new.card.files)
    fit_edge(old, new, embed_pairs(data, old, new), "ridge")
    after = load_version(new.folder).card
    assert {path: after.files[path] for path in before} == before
    assert set(after.files) - set(before) == {"edges/v1/edge.json", "edges/v1/edge.npz"}


@pytest.mark.parametrize("fails", ["write_card", "write_edge", "measure"])
def test_a_failure_leaves_the_folder_as_it_was_and_nothing_beside_it(
    data: Data, old: Version, new: Version, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    pairs = embed_pairs(data, old, new)
    beside = sorted(new.folder.parent.iterdir())
    monkeypatch.setattr(module, fails, full_disk)
    with pytest.raises(Unwritable, match="No space left"):
        fit_edge(old, new, pairs, "ridge")
    assert load_version(new.folder) == new
    assert sorted(new.folder.parent.iterdir()) == beside


def test_versions_and_kinds_that_cannot_be_joined_are_refused(
    data: Data, old: Version, new: Version, make_version: Callable, tmp_path: Path
) -> None:
    pairs = embed_pairs(data, old, new)
    with pytest.raises(InvalidArgument, match="kind must be one of procrustes, ridge, low_rank, slerp, mlp, zero_pad"):
        fit_edge(old, new, pairs, "magic")
    with pytest.raises(InvalidArgument, match="both versions are named 'v1'"):
        fit_edge(old, old, pairs, "ridge")
    newer = make_version(tmp_path / "v3", "v3", 4, edges=[(old, "identity")])
    with pytest.raises(InvalidArgument, match="form a cycle"):
        fit_edge(newer, Version(old.card, old.folder), embed_pairs(data, newer, old), "ridge")
    with pytest.raises(InvalidVersionFolder, match="kind zero_pad needs dim >= 6, not 4"):
        fit_edge(new, old, embed_pairs(data, new, old), "zero_pad")
    assert not (old.folder / "edges").exists()


def test_settings_are_those_of_the_adapter() -> None:
    assert read_options("low_rank", ["rank=8", "strength=0.5"]) == {"rank": 8, "strength": 0.5}
    assert read_options("procrustes", []) == {}
    for kind, setting, message in (
        ("ridge", "rank=8", r"'rank=8' is not a setting of kind ridge; legal: strength=0.001"),
        ("procrustes", "rank=8", "legal: none"),
        ("mlp", "hidden", "'hidden' is not a setting"),
        ("mlp", "unit=1", "not a setting of kind mlp; legal: hidden=256, epochs=100"),
        ("mlp", "hidden=wide", "hidden must be a whole number, not 'wide'"),
        ("magic", "a=1", "kind must be one of"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            read_options(kind, [setting])
    assert set(SERVED) == set(KINDS)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hidden", -4),
        ("hidden", 0),
        ("epochs", -1),
        ("rate", float("nan")),
        ("rate", -1.0),
        ("batch_size", 0),
        ("seed", -1),
    ],
)
def test_numbers_that_no_map_can_be_trained_by_are_refused(
    option: str, value: float, data: Data, old: Version, new: Version
) -> None:
    with pytest.raises(InvalidArgument, match=f"{option} must be .* or more, not|{option} must be 0 to") as refused:
        fit_edge(old, new, embed_pairs(data, old, new), "mlp", {option: value})
    assert refused.value.pointer == f"/{option}"
    assert not (new.folder / "edges").exists()


def test_few_pairs_warn(data: Data, old: Version, new: Version, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index.evaluation.adapters.FEW_PAIRS", 4000)
    with pytest.warns(FewPairsWarning, match="120 pairs"):
        fit_edge(old, new, embed_pairs(data, old, new), "ridge")


def test_a_copy_of_the_old_version_under_another_name_is_joined_perfectly(
    data: Data, old: Version, make_version: Callable, tmp_path: Path
) -> None:
    twin = make_version(tmp_path / "twin", "twin", 4)
    fitted = fit_edge(old, twin, embed_pairs(data, old, twin), "procrustes")
    np.testing.assert_allclose(fitted.new_old.ap, fitted.old_old.ap, atol=1e-6)
