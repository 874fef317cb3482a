"""index.version: the vocabulary as values."""

from __future__ import annotations

import json

import pytest

from index.version import NAME, Card, Edge, EdgeKind, Preprocess, Score


@pytest.mark.parametrize("name", ["v1", "a", "V2.0-rc_1", "9", "x" * 64])
def test_legal_names(name: str) -> None:
    assert NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", ".", "..", "-v", "_v", "a/b", "a b", "v1\n", "é", "x" * 65, "a%2f", "a\\b"])
def test_names_that_would_not_be_safe_in_a_path_or_url(name: str) -> None:
    assert not NAME.fullmatch(name)


def test_only_a_forward_edge_moves_items() -> None:
    assert [k for k in EdgeKind if k.direction == "item"] == [EdgeKind.FORWARD]
    assert {k.direction for k in EdgeKind} == {"item", "query"}


@pytest.mark.parametrize(
    ("scores", "measured"),
    [
        ({}, 0.0),
        ({"cmc@1": Score(0.8, 0.7, 0.9), "mAP@1.0": Score(0.2, 0.1, 0.3)}, 0.8),
        ({"cmc@5": Score(0.8, 0.7, 0.9), "mAP@1.0": Score(0.2, 0.1, 0.3)}, 0.5),
    ],
)
def test_routes_are_planned_by_the_first_match(scores: dict[str, Score], measured: float) -> None:
    assert Edge("v2", "v1", EdgeKind.IDENTITY, scores).measured == pytest.approx(measured)


def test_a_card_is_plain_json() -> None:
    card = Card("v1", 4, {"kind": "cosine"}, Preprocess(8, 8, "L", mean=(0.5,), std=(0.5,)))
    told = json.loads(json.dumps(card.as_json()))
    assert told["format"] == 1
    assert told["preprocess"]["mean"] == [0.5]
    assert card.encoder == ""


def test_channels_follow_the_mode() -> None:
    assert (Preprocess(8, 8, "L").channels, Preprocess(8, 8).channels) == (1, 3)
