"""What travels in bodies: models for the routes where clarity counts, plain JSON where thousands of numbers travel."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema, model_validator

from index.errors import InvalidVector
from index.item_id import LEGAL_ID, MAX_ID
from index.space import Space, Vectors, check_vectors
from index.version import EdgeKind
from service.errors import InvalidBody

LIMIT = "x-limit"
"""In a schema: the setting that says how many elements a list may have."""
MOST = (1 << 53) - 1
"""The largest integer that every reader of JSON keeps as it is (RFC 8259, section 6)."""
NAME = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", "maxLength": 64}
"""The schema of a gallery's or a version's name, as `index.version.NAME` has it."""
Number = Annotated[int, Field(ge=1, le=MOST)]
"""What the database numbers: gates, deployments, backfills, chunks, edges."""
Seed = Annotated[int, Field(ge=0, le=MOST)]
ID = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_ID,
    "pattern": r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$",
    "description": LEGAL_ID,
}
"""The schema of an item's id, as far as JSON Schema can say it."""
Name = Annotated[str, WithJsonSchema(NAME)]
"""A gallery's or a version's. One that cannot be is as unknown as any other."""
ItemId = Annotated[str, WithJsonSchema(ID)]
"""An item's in a path. One that cannot be is as unknown as any other."""
KindName = Annotated[str, WithJsonSchema({"type": "string", "enum": list(EdgeKind)})]
"""An edge's in a path. One that cannot be is as unknown as any other."""
Reason = Annotated[str, Field(max_length=1024, pattern=r"^[^\x00]*$")]
"""Words for the audit or a report; PostgreSQL stores no zero character."""
FieldPath = Annotated[str, Field(min_length=1, max_length=1024)]
"""A metadata field, as filters name it."""
MAX_FIELDS = 100
"""Fields an object of a body can have."""
NUMBERS = 1 << 14
"""Numbers of embeddings that are read in one go."""
MAX_SHOWN = 100
"""Characters of an unknown field's name that an error repeats."""


class Body(BaseModel):
    """A request body: no unknown fields, no lax conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    largest: ClassVar[str] = "max_model_bytes"
    """The setting that says how large it may be."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        # Each unknown one would be an error of its own.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"an object of {len(value)} fields; at most {MAX_FIELDS}")
        return value


class GalleryIn(Body):
    """A gallery to be created."""

    name: Name


class GalleryOut(BaseModel):
    """A gallery, as far as this process has followed its feed."""

    name: str
    current: str | None
    items: int
    mix: dict[str, int]
    seq: int
    created: float


class Galleries(BaseModel):
    """Every gallery."""

    galleries: list[GalleryOut]


class EdgeOut(BaseModel):
    """A declared way to compare a version with an older one."""

    old: str
    kind: str
    scores: dict[str, dict[str, float]]


class VersionOut(BaseModel):
    """A registered version and the edges that lead from it now.

    `loaded` names the encoders this process holds in memory: `images`, `texts`. `problem`: why it is set aside.
    `created` is null in a rehearsal.
    """

    name: str
    dim: int
    space: dict[str, Any]
    method: str
    metrics: dict[str, Any]
    side_dim: int
    encoder: bool
    text: bool
    loaded: list[str]
    edges: list[EdgeOut]
    created: float | None
    problem: str | None


class Versions(BaseModel):
    """Every registered version, in order of registration."""

    versions: list[VersionOut]


class ItemError(BaseModel):
    """Why one item of a batch was not stored."""

    index: int
    id: str | None
    code: str
    detail: str
    pointer: str


class ImageWarning(BaseModel):
    """So many images are much larger than what a version reads; `pointer` is where the first stands in the request.

    `code` is `image_mostly_unseen` or `image_much_reduced`.
    """

    code: str
    version: str
    count: int
    pointer: str
    detail: str


class Ingested(BaseModel):
    """What became of a batch; `seq` is the number of its last write in the gallery's feed.

    Of the items `stored`, `new` were not there, `updated` got an embedding beside those they held, and of those
    `replaced` nothing stayed but, where none were named, the metadata.
    """

    stored: int
    new: int
    updated: int
    replaced: int
    failed: int
    seq: int
    errors: list[ItemError]
    warnings: list[ImageWarning]


class ItemOut(BaseModel):
    """A stored item."""

    id: str
    metadata: dict[str, Any]
    active: str
    image: bool
    seq: int
    created: float


class EmbeddingOut(BaseModel):
    """An embedding an item holds."""

    version: str
    origin: str


class ItemDetail(ItemOut):
    """A stored item and the embeddings it holds."""

    embeddings: list[EmbeddingOut]


class Items(BaseModel):
    """A page of items; `next` is the cursor of the page behind it, null at the end."""

    items: list[ItemOut]
    next: str | None


class IdsIn(Body):
    """Items to be deleted."""

    largest = "max_json_bytes"

    ids: Annotated[list[str], FailFast(), Field(json_schema_extra={"minItems": 1, LIMIT: "max_batch"})]


class Deleted(BaseModel):
    """How many items were deleted, and which ids were not there."""

    deleted: int
    missing: list[str]


class Match(BaseModel):
    """An item that was found: `raw_score` is in its version's space, `score` what the list is ranked by."""

    id: str
    score: float
    raw_score: float
    version: str
    origin: str
    route: list[str]
    metadata: dict[str, Any]


class QueryMatches(BaseModel):
    """The matches of one query, best first: where it stands in the request, what embedded it, how it was ranked."""

    query: str
    version: str
    mode: str
    matches: list[Match]


class DegradedOut(BaseModel):
    """Items that could not be asked."""

    version: str
    items: int
    reason: str


class EdgeUsed(BaseModel):
    """An edge on a route, and what was measured on it."""

    new: str
    old: str
    kind: str
    scores: dict[str, dict[str, float]]


class ShardOut(BaseModel):
    """One shard that was asked: its route, the versions that embedded the query for it, and the map of its scores."""

    queries: list[str]
    version: str
    origin: str
    items: int
    route: list[EdgeUsed]
    encoders: list[str]
    calibration: dict[str, Any] | None
    seconds: dict[str, float]


class SecondsOut(BaseModel):
    """Where the time of an answer went; `encode` by version."""

    encode: dict[str, float]
    transform: float
    filter: float
    scan: float
    merge: float
    fetch: float


class ExplainOut(BaseModel):
    """How an answer came about."""

    shards: list[ShardOut]
    seconds: SecondsOut


class SearchResponse(BaseModel):
    """The answer to queries: `version`, `mode` and `mix` (items per version) are those of the first.

    All of it - matches, what they show, `mix`, `degraded` - is as it was at number `seq` of the gallery's change feed.

    `mode` says what `score` is: a probability (`calibrated`), the raw score (`raw`) or a fused rank (`rank`). `next` is
    the cursor of the page behind this one, null at the end.
    """

    version: str
    k: int
    mode: str
    seq: int
    mix: dict[str, int]
    degraded: list[DegradedOut]
    warnings: list[ImageWarning]
    results: list[QueryMatches]
    next: str | None
    explain: ExplainOut | None = None
    took_ms: float


def take_object(value: object, legal: set[str], pointer: str) -> dict[str, Any]:
    """A JSON object that has no fields but `legal` ones.

    Raises:
        InvalidBody: it is something else, or names the unknown field.
    """
    if not isinstance(value, dict):
        raise InvalidBody(f"this must be a JSON object, not {type(value).__name__}", pointer=pointer)
    if unknown := sorted(set(value) - legal):
        name = unknown[0][:MAX_SHOWN]
        raise InvalidBody(f"unknown field {name!r}; legal: {', '.join(sorted(legal))}", pointer=f"{pointer}/{name}")
    return value


def check_embeddings(value: object, dim: int, space: Space, pointer: str) -> Vectors:
    """A JSON list of embeddings -> (N, dim) float32, valid for the space.

    Raises:
        InvalidVector: not a list of lists of `dim` finite numbers, or no direction where one is needed; the pointer
            names the first bad one.
    """
    if not isinstance(value, list) or not value:
        raise InvalidVector("embeddings must be a list of at least one embedding", pointer=pointer)
    # A few at a time: NumPy holds the interpreter's lock while it reads a list.
    step = max(1, NUMBERS // dim)
    blocks = [_numbers(value[start : start + step], dim) for start in range(0, len(value), step)]
    whole = [block for block in blocks if block is not None]
    if len(whole) < len(blocks):
        bad = next((row for row, one in enumerate(value) if not _is_numbers(one, dim)), 0)
        raise InvalidVector(f"an embedding is a list of {dim} numbers", pointer=f"{pointer}/{bad}")
    return check_vectors(np.concatenate(whole), dim, space, pointer=pointer)


def _numbers(rows: list[Any], dim: int) -> NDArray[Any] | None:
    """Lists of `dim` numbers as an array; None: they are something else."""
    try:
        # NumPy would take true for 1.
        x = np.asarray(rows if {int, float}.issuperset(map(type, chain.from_iterable(rows))) else [])
    except (TypeError, ValueError):  # a row that is no list; rows of different lengths
        return None
    return x if x.ndim == 2 and x.shape[1] == dim and x.dtype.kind in "fiu" else None


def _is_numbers(value: object, dim: int) -> bool:
    if not isinstance(value, list) or len(value) != dim:
        return False
    return all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in value)
