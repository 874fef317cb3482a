"""`SearchParams`: the options of a search, validated once where a request arrives.

The OpenAPI description, the cursor and the gallery use this model; a test compares the options of the client and the
command with its fields.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from index.errors import InvalidArgument
from index.metadata.filter import Filter, parse_filter
from index.metadata.projection import MAX_FIELDS, MAX_LENGTH, Projection
from index.query.merge import Mode

MAX_K = (1 << 31) - 1
"""The largest k; a service also limits queries x k."""
ANY_PAGE = frozenset({"k", "cursor", "fields", "with_text", "strict", "explain"})
"""Options that may differ from page to page, because they do not change the ranking."""

FIELDS = {
    "type": ["array", "null"],
    "items": {"type": "string", "pattern": r"^[^.]+(\.[^.]+)*$", "maxLength": MAX_LENGTH},
    "maxItems": MAX_FIELDS,
}


def _read_filter(value: object) -> Filter | None:
    return value if value is None or isinstance(value, Filter) else parse_filter(value)


def _read_cursor(value: object) -> str | None:
    # A value of another type cannot be from an answer: same error as a foreign cursor.
    if value is None or isinstance(value, str):
        return value
    raise foreign_cursor()


def _read_fields(value: object) -> Projection | None:
    return None if value is None else Projection(value)


def foreign_cursor() -> InvalidArgument:
    """The error about a cursor of another request."""
    why = "cursor must be the `next` of an earlier answer to this request: the same gallery, queries and options"
    return InvalidArgument(f"{why} (except {', '.join(sorted(ANY_PAGE - {'cursor'}))})", pointer="/cursor")


class SearchParams(BaseModel):
    """The options of a search.

    Raises:
        InvalidFilter, InvalidArgument: of the filter and the cursor; ValidationError: of all else.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
    )

    k: Annotated[int, Field(ge=1, le=MAX_K)] = 10
    """matches wanted for each query; fewer items give fewer matches"""
    mode: Annotated[Mode, Field(strict=False), WithJsonSchema({"type": "string", "enum": list(Mode)})] | None = None
    """how matches of several versions rank as one list; default: the first possible"""
    threshold: float | None = None
    """matches must have at least so good a score"""
    filter: Annotated[Filter | None, PlainValidator(_read_filter), WithJsonSchema({"type": ["object", "null"]})] = None
    """only items whose metadata pass it are found"""
    cursor: Annotated[str | None, PlainValidator(_read_cursor), WithJsonSchema({"type": ["string", "null"]})] = None
    """`next` of the answer to the same request"""
    fields: Annotated[Projection | None, PlainValidator(_read_fields), WithJsonSchema(FIELDS)] = None
    """the metadata that matches show, as "name" or "outer.inner"; none: []; default: all"""
    with_text: bool = False
    """show the texts that matches are; they are read from where images lie"""
    strict: bool = False
    """refuse an answer that leaves items out"""
    exact: bool = False
    """compare every item, also where an approximate index would answer"""
    recall: Annotated[float, Field(gt=0, lt=1)] | None = None
    """share of the exact ten best that an approximate index is to find; default: the gallery's"""
    explain: bool = False
    """tell how the answer came about"""

    def ranking(self) -> str:
        """The options that must be the same on every page, as text."""
        return repr({name: value for name, value in self if name not in ANY_PAGE})


DEFAULTS = SearchParams()
