"""What the demo measures itself with: metrics, answers and states that are the same, the engine it is given."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from examples.demo.engines import engine
from examples.demo.measure import as_row, difference, measure, same_answers, same_state
from examples.demo.pictures import load_pictures
from examples.demo.steps import agreement
from index.evaluation.metrics import MEAN_AP
from staging.inputs.demo_pictures import answer, body, pictures


def test_the_pictures_share_nothing_between_items_and_queries():
    drawn = load_pictures()

    assert len({item.id for item in drawn.items}) == len(drawn.items) == 577
    assert not {item.image for item in drawn.items} & set(drawn.queries)
    assert len(drawn.queries) == len(drawn.query_digits) == 320
    assert set(drawn.item_digits.values()) == set(range(10))


def test_metrics_are_those_of_the_ranking_by_hand():
    measured = measure(answer("abc", "acb"), pictures())

    assert measured.cmc(1) == 0.5
    assert measured.cmc(5) == 1.0
    assert measured.mean(MEAN_AP) == pytest.approx(((1 + 2 / 3) / 2 + 1 / 3) / 2)


def test_items_that_come_and_go_do_not_change_the_metrics():
    with_visitors = answer("xabyc", "axczb", scores=(1, 0.9, 0.8, 0.7, 0.6))

    assert as_row(measure(with_visitors, pictures())) == as_row(measure(answer("abc", "acb"), pictures()))


def test_a_difference_is_paired():
    better, base = measure(answer("abc", "bac"), pictures()), measure(answer("abc", "acb"), pictures())

    assert difference(better, base)["cmc1"]["value"] == 0.5
    assert difference(base, base)["map"] == {"value": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (answer("abc", "bca"), True),
        (answer("abc", "bca", scores=(0.9 + 1e-7, 0.8, 0.7)), True),
        (answer("abc", "bac"), False),
        (answer("abc", "bcd"), False),
        (answer("abc", "bc"), False),
        (answer("abc"), False),
        (answer("abc", "bca", scores=(0.9, 0.8, 0.71)), False),
    ],
)
def test_answers_are_the_same_when_items_and_scores_are(other, expected):
    assert same_answers(answer("abc", "bca"), other) is expected


def test_items_that_score_the_same_may_stand_in_any_order():
    tied = (0.9, 0.8, 0.8)

    assert same_answers(answer("abc", scores=tied), answer("acb", scores=tied))


def test_states_are_the_same_when_items_versions_and_numbers_are():
    state = {("a", "v1", "encoded"): np.array([0.5, 0.5], np.float32)}

    assert same_state(state, copy.deepcopy(state))
    assert not same_state(state, {("a", "v1", "transformed"): state["a", "v1", "encoded"]})
    assert not same_state(state, {("a", "v1", "encoded"): np.array([0.5, 0.6], np.float32)})
    assert not same_state(state, {})


def test_a_shadow_is_held_against_what_a_client_sees():
    old, new = ([body(*ids) for ids in rows] for rows in (("ab", "cd"), ("ba", "ce")))

    assert agreement(old, new) == {"overlap": 0.75, "rank_correlation": pytest.approx(-1 / 3), "first_match_flips": 1}


@pytest.mark.parametrize(
    ("name", "given", "settings"),
    [
        (None, {}, {}),
        ("pgvector", {"REGRAFT_PGVECTOR_URL": "p"}, {"REGRAFT_PGVECTOR_URL": "p"}),
        ("milvus", {"REGRAFT_MILVUS_URI": "m", "MILVUS_TEST_URI": "t"}, {"REGRAFT_MILVUS_URI": "m"}),
        (
            "milvus",
            {"MILVUS_TEST_URI": "t", "MILVUS_TEST_TOKEN": "a:b"},
            {"REGRAFT_MILVUS_URI": "t", "REGRAFT_MILVUS_TOKEN": "a:b"},
        ),
    ],
)
def test_an_engine_is_the_server_that_the_caller_names(name, given, settings, tmp_path, monkeypatch):
    for variable in ("REGRAFT_PGVECTOR_URL", "REGRAFT_MILVUS_URI", "MILVUS_TEST_URI"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)

    with engine(name, tmp_path) as known:
        assert known == settings
    assert list(tmp_path.iterdir()) == []
