"""Verification and open-set rates of a data set's queries and items."""

from __future__ import annotations

import numpy as np
import pytest

import naive
from index.evaluation.metrics import Compared
from index.evaluation.relevance import LabelRelevance
from index.space import Cosine, Euclidean
from training.evaluation import rates
from training.evaluation.rates import verification_rates


def compared_with(queries: int, items: int, classes: int, noise: float) -> tuple[Compared, LabelRelevance]:
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(classes, 5))
    query_codes, item_codes = generator.integers(classes, size=queries), generator.integers(classes, size=items)
    q, x = (
        Cosine().normalise((centres[codes] + noise * generator.normal(size=(len(codes), 5))).astype(np.float32))
        for codes in (query_codes, item_codes)
    )
    return Compared(q, x, Cosine()), LabelRelevance(query_codes, item_codes, np.full(queries, -1))


def test_tar_is_over_all_pairs_of_queries_and_items() -> None:
    compared, relevance = compared_with(31, 47, 6, 0.5)
    measured = verification_rates(compared, relevance)
    scores = naive.scores(compared.queries, compared.items, compared.space)
    same = relevance.query_codes[:, None] == relevance.item_codes

    for far in (1e-2, 1e-3):
        assert measured[f"TAR@FAR={far:g}"] == pytest.approx(naive.tar(scores[same], scores[~same], far))


def test_a_share_of_the_pairs_gives_about_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, relevance = compared_with(200, 300, 10, 0.8)
    whole = verification_rates(compared, relevance)
    monkeypatch.setattr(rates, "PAIRS", 4000)
    part = verification_rates(compared, relevance)
    assert part["TAR@FAR=0.01"] != whole["TAR@FAR=0.01"]
    assert part["TAR@FAR=0.01"] == pytest.approx(whole["TAR@FAR=0.01"], abs=0.08)


def test_perfect_embeddings_accept_and_identify_everyone() -> None:
    compared, relevance = compared_with(60, 90, 8, 0.01)
    assert verification_rates(compared, relevance) == dict.fromkeys(rates.COLUMNS, 1.0)


def test_embeddings_that_know_nothing_accept_about_the_false_share() -> None:
    generator = np.random.default_rng(3)
    _, relevance = compared_with(200, 300, 10, 0.5)
    blind = Compared(generator.normal(size=(200, 5)), generator.normal(size=(300, 5)), Euclidean())
    assert verification_rates(blind, relevance)["TAR@FAR=0.01"] == pytest.approx(0.01, abs=0.01)


def test_an_image_on_both_sides_never_meets_itself() -> None:
    """One image a class: without itself there is no pair of one class, and nobody to identify."""
    compared, _ = compared_with(20, 20, 20, 0.1)
    codes = np.arange(20)
    same = LabelRelevance(codes, codes, codes)
    assert all(
        np.isnan(rate) for rate in verification_rates(Compared(compared.items, compared.items, Cosine()), same).values()
    )


def test_a_data_set_of_one_class_has_no_rates() -> None:
    compared, relevance = compared_with(5, 6, 1, 0.5)
    measured = verification_rates(compared, relevance)
    assert np.isnan(measured["TAR@FAR=0.01"])
    assert np.isnan(measured["TPIR@FPIR=0.1"])
