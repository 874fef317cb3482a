"""Build filters of docs/filters.md from the filters of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from index.errors import InvalidFilter

Condition = dict[str, Any]
Scalar = str | int | float | bool | None


class UnsupportedFilter(InvalidFilter, ValueError):
    """A filter has no counterpart in docs/filters.md; the message names the operator and those that have one."""

    code = "unsupported_filter"


def condition(field: str, **operator: Any) -> Condition:
    """A condition with one operator. A name with a dot may be a key or a path, as frameworks store both."""
    plain = {"field": field, **operator}
    return plain if "." not in field else either([plain, {"field": [field], **operator}])


def equals(field: str, value: Any) -> Condition:
    """A value of the field equals this one. Raises UnsupportedFilter for lists and objects."""
    if not isinstance(value, Scalar):
        raise UnsupportedFilter(f"{field}: the value must be one string, number, boolean or null, not {value!r}")
    return condition(field, eq=value)


def one_of(field: str, values: Any) -> Condition:
    """A value of the field is among these. Raises UnsupportedFilter."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise UnsupportedFilter(f"{field}: `in` requires a list of values, not {values!r}")
    for value in values:
        equals(field, value)
    return condition(field, **{"in": list(values)}) if values else nothing(field)


def within(field: str, **bounds: Any) -> Condition:
    """A value of the field lies between bounds: gt, gte, lt, lte. Raises UnsupportedFilter."""
    for bound in bounds.values():
        if isinstance(bound, bool) or not isinstance(bound, str | int | float):
            raise UnsupportedFilter(f"{field}: the bounds of a range must be numbers or strings, not {bound!r}")
    return condition(field, range=bounds)


def present(field: str, there: bool = True) -> Condition:
    """The field exists, with any value; or, if not `there`, does not exist."""
    found = condition(field, exists=True)
    return found if there else negated(found)


def nothing(field: str) -> Condition:
    """A filter that no item passes."""
    return {"and": [present(field), present(field, False)]}


def anything() -> Condition:
    """A filter that every item passes."""
    return either([present("any"), present("any", False)])


def is_null(field: str) -> Condition:
    """The field does not exist or is null."""
    return either([present(field, False), equals(field, None)])


def both(conditions: Sequence[Condition]) -> Condition:
    """All conditions hold."""
    return conditions[0] if len(conditions) == 1 else {"and": list(conditions)}


def either(conditions: Sequence[Condition]) -> Condition:
    """At least one condition holds."""
    return conditions[0] if len(conditions) == 1 else {"or": list(conditions)}


def differs(field: str, value: Any) -> Condition:
    """No value of the field equals this one. Raises UnsupportedFilter."""
    return negated(equals(field, value))


def none_of(field: str, values: Any) -> Condition:
    """No value of the field is among these. Raises UnsupportedFilter."""
    return negated(one_of(field, values))


def bounded(bound: str) -> Callable[[str, Any], Condition]:
    """`within` with one bound: gt, gte, lt or lte."""
    return lambda field, value: within(field, **{bound: value})


def negated(condition: Condition) -> Condition:
    """The condition does not hold."""
    return {"not": condition}
