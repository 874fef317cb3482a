"""Request bodies: pydantic models, and checks of plain JSON for bodies with thousands of numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema, model_validator

from index.engines.config import IndexConfig
from index.errors import InvalidArgument, InvalidVector, pointer_to, shortened
from index.item_id import LEGAL_ID, MAX_ID
from index.space import Space, Vectors, check_vectors
from index.version import NAME as LEGAL_NAME
from index.version import EdgeKind
from service.errors import InvalidBody

LIMIT = "x-limit"
"""The schema extension that names the setting for the largest length of a list."""
MOST = (1 << 53) - 1
"""The largest integer that every reader of JSON represents exactly (RFC 8259, section 6)."""
NAME = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", "maxLength": 64}
"""The schema of a gallery's or a version's name, equivalent to `index.version.NAME`."""
Number = Annotated[int, Field(ge=1, le=MOST)]
"""A number from the database: of a gate, deployment, backfill, chunk or edge."""
Seed = Annotated[int, Field(ge=0, le=MOST)]
ID = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_ID,
    "pattern": r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$",
    "description": LEGAL_ID,
}
"""The schema of an item's id, as far as JSON Schema can express it."""
Name = Annotated[str, WithJsonSchema(NAME)]
"""The name of an existing gallery or version; not validated: an illegal one is unknown like any other."""
ItemId = Annotated[str, WithJsonSchema(ID)]
"""The id of an item in a path; not validated, like `Name`."""
KindName = Annotated[str, WithJsonSchema({"type": "string", "enum": list(EdgeKind)})]
"""The kind of an edge in a path; not validated, like `Name`."""
NO_ZERO = r"^[^\x00]*$"
"""PostgreSQL can neither store nor compare the NUL character."""
Reason = Annotated[str, Field(max_length=1024, pattern=NO_ZERO)]
"""A text for the audit log or a report."""
FieldPath = Annotated[str, Field(min_length=1, max_length=1024)]
"""A metadata field, as filters name it."""
PATCHES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["id", "metadata"],
        "properties": {"id": ID, "metadata": {"type": "object"}},
        "additionalProperties": False,
    },
}
MAX_CHUNK = 4096
"""Most items in a chunk of a backfill."""
FILTER = {"type": "object", "description": "docs/filters.md"}
"""The schema of a metadata filter in a pydantic model."""
MAX_FIELDS = 100
"""Most fields of an object in a body."""
NUMBERS = 1 << 14
"""Numbers of embeddings that are converted at a time."""


class Body(BaseModel):
    """A request body: no unknown fields, no lax conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    largest: ClassVar[str] = "max_model_bytes"
    """The setting for the largest size of the body."""
    lists: ClassVar[Mapping[str, str]] = {}
    """Name of a list -> the setting for its largest length."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        # Each unknown field would be a separate error.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"the object has {len(value)} fields; at most {MAX_FIELDS} are legal")
        return value


class GalleryIn(Body):
    """A gallery to create."""

    name: Name
    index: IndexConfig = IndexConfig()


class GalleryChange(Body):
    """The settings of a gallery that can be changed while it serves."""

    index: IndexConfig


class DeletionIn(Body):
    """Items to delete: by their ids, or those whose metadata pass a filter."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [name]} for name in ("ids", "filter")]})
    largest = "max_json_bytes"
    lists: ClassVar[Mapping[str, str]] = {"ids": "max_batch"}

    ids: Annotated[list[str], FailFast()] = Field([], json_schema_extra={"minItems": 1, LIMIT: lists["ids"]})
    filter: Annotated[dict[str, Any] | None, WithJsonSchema(FILTER)] = None


class MetadataIn(Body):
    """Patches of metadata (RFC 7396): of items by their ids, or one for all items whose metadata pass a filter."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["items"]}, {"required": ["filter"]}],
            "dependentRequired": {"filter": ["metadata"], "metadata": ["filter"]},
        }
    )
    largest = "max_json_bytes"
    lists: ClassVar[Mapping[str, str]] = {"items": "max_batch"}

    items: Annotated[list[Any], WithJsonSchema(PATCHES)] = Field([], json_schema_extra={LIMIT: lists["items"]})
    filter: Annotated[dict[str, Any] | None, WithJsonSchema(FILTER)] = None
    metadata: Annotated[dict[str, Any] | None, WithJsonSchema({"type": "object"})] = None


def check_name(name: str, reserved: Collection[str] = ()) -> None:
    """Check the name of something new.

    Args:
        name: the name.
        reserved: names that are not legal.

    Raises:
        InvalidArgument: it is malformed or reserved; says which names are legal.
    """
    if not LEGAL_NAME.fullmatch(name) or name in reserved:
        but = f", and none of {', '.join(sorted(reserved))}" if reserved else ""
        legal = "1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        raise InvalidArgument(f"name must be {legal}{but}", pointer="/name")


def take_object(value: object, legal: set[str], pointer: str) -> dict[str, Any]:
    """Check that a value is a JSON object with only `legal` fields, and return it.

    Raises:
        InvalidBody: it is not an object, or it has an unknown field, to which the pointer leads.
    """
    if not isinstance(value, dict):
        raise InvalidBody(f"must be a JSON object, not {type(value).__name__}", pointer=pointer)
    if not value.keys() <= legal:
        name = min(value.keys() - legal)
        why = f"unknown field {shortened(name)!r}; legal: {', '.join(sorted(legal))}"
        raise InvalidBody(why, pointer=pointer + pointer_to(name))
    return value


def check_embeddings(value: object, dim: int, space: Space, pointer: str, version: str) -> Vectors:
    """A JSON list of embeddings by `version`, or an array -> (N, dim) float32, valid for its space.

    Raises:
        InvalidVector: not a list of lists of `dim` finite numbers, or a zero vector where a direction is needed; the
            pointer leads to the first bad one.
    """
    if not isinstance(value, (list, np.ndarray)) or not len(value):
        raise InvalidVector("embeddings must be a list of at least one embedding", pointer=pointer)
    if isinstance(value, np.ndarray):
        return check_vectors(value, dim, space, pointer=pointer, version=version)
    # A few at a time, since NumPy holds the GIL while it reads a list.
    step = max(1, NUMBERS // dim)
    blocks = [_numbers(value[start : start + step], dim) for start in range(0, len(value), step)]
    whole = [block for block in blocks if block is not None]
    if len(whole) < len(blocks):
        bad = next(row for row, one in enumerate(value) if _numbers([one], dim) is None)
        raise InvalidVector(f"an embedding by {version!r} must be a list of {dim} numbers", pointer=f"{pointer}/{bad}")
    return check_vectors(whole[0] if len(whole) == 1 else np.concatenate(whole), dim, space, pointer=pointer)


def _numbers(rows: list[Any], dim: int) -> NDArray[Any] | None:
    """Lists of `dim` numbers as an array; None: they are not such lists."""
    try:
        if set(map(len, rows)) != {dim}:  # a row of millions would be read to its end
            return None
        kinds = set(map(type, chain.from_iterable(rows)))  # NumPy would take true for 1
        x = np.array(rows if kinds <= {int, float} else [], np.float64)
    except (TypeError, ValueError, OverflowError):  # a row that is no list; of different lengths; above every float
        return None
    return x if x.ndim == 2 and x.shape[1] == dim else None
