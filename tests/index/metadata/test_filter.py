"""index.metadata.filter: what is a filter, and what is said about everything else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from index.errors import InvalidFilter
from index.metadata.filter import (
    MAX_CONDITIONS,
    MAX_DEPTH,
    MAX_KEYS,
    MAX_VALUES,
    And,
    Bound,
    Condition,
    Exists,
    Not,
    OneOf,
    Or,
    Prefix,
    Range,
    _Size,
    parse_filter,
    value_at,
    value_text,
)


def nested(depth: int) -> dict[str, Any]:
    """A condition below `depth` times `not`."""
    value: dict[str, Any] = {"field": "a", "eq": 1}
    for _ in range(depth):
        value = {"not": value}
    return value


def test_every_operator_and_join_is_read() -> None:
    given = {
        "and": [
            {"field": "shop.city", "eq": "Bern"},
            {"or": [{"field": "tag", "in": ["a", 1, True, None]}, {"not": {"field": "sku", "prefix": "AB-"}}]},
            {"field": ["a.b", ""], "range": {"gt": 1, "lte": 2.5}},
            {"field": "note", "exists": False},
        ]
    }
    assert parse_filter(given) == And(
        (
            Condition(("shop", "city"), OneOf(("Bern",))),
            Or((Condition(("tag",), OneOf(("a", 1, True, None))), Not(Condition(("sku",), Prefix("AB-"))))),
            Condition(("a.b", ""), Range(Bound(1, closed=False), Bound(2.5, closed=True))),
            Condition(("note",), Exists(wanted=False)),
        )
    )


@pytest.mark.parametrize(
    "given",
    [
        nested(MAX_DEPTH),
        {"or": [{"field": "a", "eq": 1}] * MAX_CONDITIONS},
        {"field": "a", "in": list(range(MAX_VALUES))},
        {"field": ["k"] * MAX_KEYS, "exists": True},
        {"field": "a", "prefix": ""},
        {"field": "a", "range": {"gt": 5, "lt": 1}},
        {"field": "a", "eq": 10**400},
    ],
)
def test_the_largest_legal_filters_are_read(given: Any) -> None:
    parse_filter(given)


LEGAL_FILTER = ['"field"', '{"and": [..]}', '{"or": [..]}', '{"not": ..}', "eq, in, range, prefix, exists"]
LEGAL_BOUNDS = ["gt, gte", "lt, lte"]
LEGAL_FIELD = ['"outer.inner"', "keys such as"]

BAD: list[tuple[Any, str, list[str]]] = [
    # not a filter at all
    (None, "", ["not null", *LEGAL_FILTER]),
    (True, "", ["not a boolean", *LEGAL_FILTER]),
    (3, "", ["not a number", *LEGAL_FILTER]),
    ("a = 1", "", ["not a string", *LEGAL_FILTER]),
    ([{"field": "a", "eq": 1}], "", ["not a list", *LEGAL_FILTER]),
    ({}, "", LEGAL_FILTER),
    ({"color": "red"}, "/color", ["'color'", *LEGAL_FILTER]),
    ({"a/b~c": 1}, "/a~1b~0c", LEGAL_FILTER),
    ({"$and": []}, "/$and", ["'$and'", *LEGAL_FILTER]),
    ({"and": [{"field": "a", "eq": 1}], "or": [{"field": "a", "eq": 1}]}, "", ["exactly one name", *LEGAL_FILTER]),
    ({"and": [{"field": "a", "eq": 1}], "xor": []}, "/xor", ["'xor'", *LEGAL_FILTER]),
    # joins
    ({"and": []}, "/and", ["at least one"]),
    ({"or": []}, "/or", ["at least one"]),
    ({"or": {"field": "a", "eq": 1}}, "/or", ["must be a list"]),
    ({"not": [{"field": "a", "eq": 1}]}, "/not", ["not a list", *LEGAL_FILTER]),
    ({"and": [{"field": "a", "eq": 1}, {"or": [{"field": "a", "like": 1}]}]}, "/and/1/or/0/like", ["'like'"]),
    # fields
    ({"field": 3, "eq": 1}, "/field", LEGAL_FIELD),
    ({"field": "", "eq": 1}, "/field", LEGAL_FIELD),
    ({"field": "a..b", "eq": 1}, "/field", LEGAL_FIELD),
    ({"field": ".a", "eq": 1}, "/field", LEGAL_FIELD),
    ({"field": [], "eq": 1}, "/field", LEGAL_FIELD),
    ({"field": ["a", 0], "eq": 1}, "/field", LEGAL_FIELD),
    ({"field": None, "eq": 1}, "/field", LEGAL_FIELD),
    ({"field": ["k"] * (MAX_KEYS + 1), "eq": 1}, "/field", [f"1 to {MAX_KEYS}"]),
    # operators
    ({"field": "a"}, "", ["one operator", "eq, in, range, prefix, exists"]),
    ({"field": "a", "eq": 1, "in": [1]}, "", ["one operator, not 2"]),
    ({"field": "a", "ne": 1}, "/ne", ["'ne'", "legal: eq, in, range, prefix, exists"]),
    ({"field": "a", "$gt": 1}, "/$gt", ["legal: eq, in, range, prefix, exists"]),
    ({"field": "a", "eq": 1, "and": []}, "/and", ["'and'", "legal: eq, in, range, prefix, exists"]),
    # values
    ({"field": "a", "eq": [1]}, "/eq", ["a string, a number, true, false or null", "not a list"]),
    ({"field": "a", "eq": {"gt": 1}}, "/eq", ["not an object"]),
    ({"field": "a", "eq": math.nan}, "/eq", ["finite"]),
    ({"field": "a", "in": [1, math.inf]}, "/in/1", ["finite"]),
    ({"field": "a", "eq": "\ud800"}, "/eq", ["surrogate"]),
    ({"field": "a", "in": []}, "/in", ["at least one"]),
    ({"field": "a", "in": "abc"}, "/in", ["must be a list"]),
    ({"field": "a", "in": [1, [2]]}, "/in/1", ["not a list"]),
    ({"field": "a", "in": [0] * (MAX_VALUES + 1)}, "/in", [f"at most {MAX_VALUES}"]),
    ({"field": "a", "exists": 1}, "/exists", ["true or false"]),
    ({"field": "a", "exists": None}, "/exists", ["true or false", "not null"]),
    ({"field": "a", "prefix": 1}, "/prefix", ["must be a string", "not a number"]),
    ({"field": "a", "prefix": ["x"]}, "/prefix", ["must be a string"]),
    ({"field": "a", "prefix": "\udfff"}, "/prefix", ["surrogate"]),
    # ranges
    ({"field": "a", "range": {}}, "/range", LEGAL_BOUNDS),
    ({"field": "a", "range": [1, 2]}, "/range", LEGAL_BOUNDS),
    ({"field": "a", "range": {"from": 1}}, "/range/from", ["'from'", *LEGAL_BOUNDS]),
    ({"field": "a", "range": {"gt": 1, "gte": 1}}, "/range", ["gt and gte", *LEGAL_BOUNDS]),
    ({"field": "a", "range": {"lt": 1, "lte": 1, "gt": 0}}, "/range", ["lt and lte", *LEGAL_BOUNDS]),
    ({"field": "a", "range": {"gt": True}}, "/range/gt", ["a number or a string", "not a boolean"]),
    ({"field": "a", "range": {"lt": None}}, "/range/lt", ["a number or a string", "not null"]),
    ({"field": "a", "range": {"lt": [1]}}, "/range/lt", ["not a list"]),
    ({"field": "a", "range": {"lt": -math.inf}}, "/range/lt", ["finite"]),
    ({"field": "a", "range": {"gt": 1, "lt": "b"}}, "/range", ["two numbers or two strings"]),
    # size
    (nested(MAX_DEPTH + 1), "/not" * MAX_DEPTH, [f"{MAX_DEPTH} deep"]),
    (nested(500), "/not" * MAX_DEPTH, [f"{MAX_DEPTH} deep"]),
    ({"or": [{"field": "a", "eq": 1}] * (MAX_CONDITIONS + 1)}, "", [f"at most {MAX_CONDITIONS}"]),
    ({"or": [{"field": "a", "in": [0] * MAX_VALUES}, {"field": "a", "eq": 1}]}, "", [f"at most {MAX_VALUES} values"]),
]


@pytest.mark.parametrize(("given", "pointer", "said"), BAD, ids=lambda part: json.dumps(part)[:40])
def test_everything_else_is_refused_with_its_place_and_what_is_legal(given: Any, pointer: str, said: list[str]) -> None:
    with pytest.raises(InvalidFilter) as caught:
        parse_filter(given)
    assert caught.value.pointer == f"/filter{pointer}"
    for words in said:
        assert words in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("a", 1),
        ("b.c", 2),
        ("b.c.d", None),
        ("b", {"c": 2, "e": [3]}),
        ("x.y", 4),
        ("b.e", [3]),
        ("b.e.0", None),
        ("z", None),
    ],
)
def test_a_field_is_a_key_or_a_path_of_keys(field: str, value: object) -> None:
    assert value_at({"a": 1, "b": {"c": 2, "e": [3]}, "x.y": 4, "x": {"y": 5}}, field) == value


def test_values_have_one_text_where_they_are_equal_and_no_other_has_it() -> None:
    classes: list[list[Any]] = [
        [1, 1.0],
        [0, -0.0],
        ["1"],
        [True],
        [1.5],
        [2**53, 2.0**53],
        [2**53 + 1],
        [[1, {"a": 2}], [1.0, {"a": 2.0}]],
        [{"a": 1, "b": None}, {"b": None, "a": 1.0}],
    ]

    texts = [{value_text(value) for value in values} for values in classes]

    assert all(len(same) == 1 for same in texts)
    assert len(set().union(*texts)) == len(classes)


@pytest.mark.parametrize(
    "part",
    [{"field": "a", "eq": 1}, {"not": {"field": "a", "eq": 1}}, {"field": "a", "in": list(range(MAX_VALUES // 2))}],
)
def test_a_filter_that_is_too_large_is_read_no_further_than_that(
    part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def count(self: Any, value: Any) -> Any:
        nonlocal read
        read += 1
        return add(self, value)

    add = _Size.add
    monkeypatch.setattr(_Size, "add", count)

    with pytest.raises(InvalidFilter, match="at most"):
        parse_filter({"or": [{"and": [part] * 1000}] * 100})
    assert read <= MAX_CONDITIONS + 1


def test_a_filter_of_nothing_but_joins_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    part: dict[str, Any] = {"field": "a", "eq": 1}
    for _ in range(5):
        part = {"and": [part]}
    with pytest.raises(InvalidFilter, match="at most"):
        parse_filter({"or": [part] * 100_000})
