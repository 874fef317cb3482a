from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from index.edges.calibration import calibration_from_json, fit_calibration
from index.edges.transform import Truncate
from index.evaluation.metrics import Retrieval
from index.version import Card, Edge, EdgeKind
from training.data.images import Arrays, Data, ImageSet
from training.measurement import Report, apply_trained_edge, compare, embed, measure
from training.method import OldSummary
from training.recipes import RECIPES
from training.trained import Trained, build_method


def retrieved(hits: list[bool]) -> Retrieval:
    first = np.array(hits)
    return Retrieval({1: first, 5: np.ones(len(hits), bool)}, first.astype(np.float64), np.ones(len(hits), bool))


def image_set(count: int, seed: int) -> ImageSet:
    generator = np.random.default_rng(seed)
    return ImageSet(Arrays(generator.integers(0, 256, (count, 8, 8), dtype=np.uint8)), np.arange(count) % 3)


DATA = Data(image_set(12, 0), image_set(9, 1), image_set(12, 2))


def trained(dim: int = 4, method: str = "independent", old: OldSummary | None = None) -> Trained:
    torch.manual_seed(dim)
    recipe = replace(RECIPES["digits_v1"](), method=method, dim=dim)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, dim))
    return Trained(recipe, backbone, build_method(recipe, 3, old), [0, 1, 2], 0 if old is None else old.dim)


def described(dim: int) -> OldSummary:
    return OldSummary(torch.randn(3, dim), torch.arange(3), torch.randn(3, dim), centre_CN=torch.randn(3, dim))


def test_the_report_prints_each_pair_the_differences_and_the_flips() -> None:
    report = Report(
        new_new=retrieved([True] * 4),
        old_old=retrieved([True, False, False, True]),
        new_old=retrieved([False, True, True, True]),
    )
    text = "\n".join(report.lines())

    assert list(report.rows()) == ["old/old", "new/old", "new/new"]
    assert "old/old    0.500" in text
    assert "new/old - old/old on cmc@1: 0.250" in text
    assert ", perhaps compatible" in text
    assert "new/new - new/old on cmc@1: 0.250" in text
    assert "right before and wrong now: 1" in text


def test_a_first_version_reports_itself_alone() -> None:
    report = measure(trained(), None, DATA)

    assert list(report.rows()) == ["new/new"]
    assert len(list(report.lines())) == 2


def test_an_incompatible_version_is_not_compared_with_the_old_one() -> None:
    report = measure(trained(4), trained(3), DATA)

    assert list(report.rows()) == ["old/old", "new/new"]


def test_where_both_sides_are_one_list_no_image_finds_itself() -> None:
    same = Data(DATA.train, DATA.query, DATA.query, same=True)
    vectors = embed(trained(), DATA.query)

    apart = compare(vectors, vectors, same, "cosine")
    assert compare(vectors, vectors, replace(same, same=False), "cosine").cmc(1) == 1.0
    assert apart.cmc(1) < 1.0
    assert apart.valid.all()


def test_crossing_an_edge_in_torch_equals_what_serving_does() -> None:
    old, new = trained(3), trained(5, "bct", described(3))
    queries, items = embed(new, DATA.query), embed(old, DATA.gallery)
    edge = Edge("v2", "v1", EdgeKind.TRUNCATE)
    cards = Card("v2", 5, {"kind": "cosine"}), Card("v1", 3, {"kind": "cosine"})

    crossed, unmoved = apply_trained_edge(new, queries, items)
    np.testing.assert_allclose(crossed, Truncate(edge, *cards)(queries), atol=1e-6)
    assert unmoved is items


@pytest.mark.parametrize(("dim", "method"), [(3, "l2"), (5, "bct")])
def test_an_edge_is_calibrated_on_the_gallery_alone_each_image_among_the_others(
    dim: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("index.evaluation.score_maps.FEW", 0)  # each map by itself
    old, new = trained(3), trained(dim, method, described(3))
    made = measure(new, old, DATA).calibration or {}
    other_queries = replace(DATA, query=DATA.train)
    new_ND, old_ND = embed(new, DATA.gallery).astype(np.float64), embed(old, DATA.gallery).astype(np.float64)
    asked_ND = new_ND[:, :3] / np.linalg.norm(new_ND[:, :3], axis=1, keepdims=True)
    pairs = [(i, j) for i in range(len(new_ND)) for j in range(len(new_ND)) if i != j]
    right = [DATA.gallery.labels[i] == DATA.gallery.labels[j] for i, j in pairs]

    for name, queries, items in (("edge", asked_ND, old_ND), ("own", new_ND, new_ND)):
        naive = fit_calibration([queries[i] @ items[j] for i, j in pairs], right, higher_is_better=True)
        fitted = calibration_from_json(made[name])
        np.testing.assert_allclose(fitted(np.linspace(-1, 1, 9)), naive(np.linspace(-1, 1, 9)), atol=1e-4)
    assert measure(new, old, other_queries).calibration == made


def test_a_gallery_with_one_image_of_each_class_cannot_calibrate() -> None:
    lone = replace(DATA, gallery=DATA.gallery.take(np.arange(3)))

    assert measure(trained(3, "l2", described(3)), trained(3), lone).calibration is None


def test_embedding_leaves_the_model_on_the_cpu_in_eval_mode() -> None:
    model = trained()
    vectors = embed(model, DATA.query)

    assert not model.training
    assert vectors.dtype == np.float32
    assert vectors.shape == (9, 4)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
