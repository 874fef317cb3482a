"""An independent implementation of docs/filters.md over plain JSON, and random filters."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

KEYS = ("a", "b", "a.b")


def holds(filter_json: Any, item: Any) -> bool:
    if "and" in filter_json:
        return all(holds(part, item) for part in filter_json["and"])
    if "or" in filter_json:
        return any(holds(part, item) for part in filter_json["or"])
    if "not" in filter_json:
        return not holds(filter_json["not"], item)
    field = filter_json["field"]
    path = field.split(".") if isinstance(field, str) else field
    if "exists" in filter_json:
        return bool(is_there(path, item) == filter_json["exists"])
    return any(passes(filter_json, value) for value in reached(path, item))


def reached(path: list[str], value: Any) -> list[Any]:
    """The scalars at the end of a path, of each element of arrays."""
    if isinstance(value, list):
        return [scalar for element in value for scalar in reached(path, element)]
    if path:
        return reached(path[1:], value[path[0]]) if isinstance(value, dict) and path[0] in value else []
    return [] if isinstance(value, dict) else [value]


def is_there(path: list[str], value: Any) -> bool:
    if not path:
        return True
    if isinstance(value, list):
        return any(is_there(path, element) for element in value)
    return isinstance(value, dict) and path[0] in value and is_there(path[1:], value[path[0]])


def same(one: Any, other: Any) -> bool:
    numbers = (int, float)
    if type(one) in numbers and type(other) in numbers:
        return bool(one == other)
    return type(one) is type(other) and bool(one == other)


def passes(filter_json: Any, value: Any) -> bool:
    if "eq" in filter_json:
        return same(value, filter_json["eq"])
    if "in" in filter_json:
        return any(same(value, one) for one in filter_json["in"])
    if "prefix" in filter_json:
        return isinstance(value, str) and value.startswith(filter_json["prefix"])
    ends = filter_json["range"]
    alike = str if isinstance(next(iter(ends.values())), str) else (int, float)
    if not isinstance(value, alike) or isinstance(value, bool):
        return False
    return (
        ("gt" not in ends or value > ends["gt"])
        and ("gte" not in ends or value >= ends["gte"])
        and ("lt" not in ends or value < ends["lt"])
        and ("lte" not in ends or value <= ends["lte"])
    )


# Few values, so that filters match, among them edge cases.
STRINGS = [
    "",
    "a",
    "ab",
    "abc",
    "b",
    "a\x00",
    "a\x00b",
    "\ud7ff",
    "\ue000",
    "\U0010ffff",
    "a\U0010ffff",
    "é",
    "1",
    "true",
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    0.5,
    -0.0,
    1.0,
    2**53,
    2**53 + 1,
    2**53 + 2,
    -(2**53) - 1,
    2**60 + 1,
    2**60,
    1e300,
    10**400,
    -(10**400),
    5e-324,
]

strings = st.sampled_from(STRINGS) | st.text("ab\x00é\U0010ffff", max_size=4)
numbers = st.sampled_from(NUMBERS) | st.integers(-3, 3) | st.floats(allow_nan=False, allow_infinity=False)
scalars = strings | numbers | st.booleans() | st.none()
keys = st.sampled_from(KEYS)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
documents = st.dictionaries(keys, values, max_size=3)

fields = st.sampled_from(["a", "b", "a.b", "b.a"]) | st.lists(keys, min_size=1, max_size=3)


def ends(ordered: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    lower = st.none() | st.tuples(st.sampled_from(["gt", "gte"]), ordered)
    upper = st.none() | st.tuples(st.sampled_from(["lt", "lte"]), ordered)
    return st.tuples(lower, upper).map(lambda two: dict(end for end in two if end)).filter(bool)


conditions = (
    st.fixed_dictionaries({"field": fields, "eq": scalars})
    | st.fixed_dictionaries({"field": fields, "in": st.lists(scalars, min_size=1, max_size=12)})
    | st.fixed_dictionaries({"field": fields, "range": ends(strings) | ends(numbers)})
    | st.fixed_dictionaries({"field": fields, "prefix": strings})
    | st.fixed_dictionaries({"field": fields, "exists": st.booleans()})
)
filters = st.recursive(
    conditions,
    lambda inner: (
        st.fixed_dictionaries({"and": st.lists(inner, min_size=1, max_size=3)})
        | st.fixed_dictionaries({"or": st.lists(inner, min_size=1, max_size=3)})
        | st.fixed_dictionaries({"not": inner})
    ),
    max_leaves=4,
)
