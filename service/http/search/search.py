"""The query path over HTTP: read the queries, then encode, search and describe the matches; see `respond`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Header, Request, Response

from index.encoders.text import MAX_CHARACTERS
from index.query.query_plan import GalleryQuery
from index.query.search_params import SearchParams
from index.retry import attempts
from regraft.models import SearchResponse
from service.http.bodies.arrow import ARROW, accepts_arrow, write_matches
from service.http.bodies.forms import read_form
from service.http.bodies.media_types import FORM, JSON, media_type
from service.http.bodies.npy import NPY
from service.http.bodies.schemas import EMBEDDING, FILE, fields, many, reads
from service.http.requests.checked_route import CheckedRoute
from service.http.requests.dependencies import Service
from service.http.search.answer import Page, answer_of, page_of
from service.http.search.request import LISTS, OPTIONS, QueryBatch, SearchRequest, from_form
from service.http.server.auth import Exchange
from service.replica.loaded import LoadedGallery
from service.runtime import Runtime
from service.schemas import ID, NAME, Name
from service.upgrades.trials.monitor import TrialQuery

router = APIRouter(route_class=CheckedRoute, tags=["query"])

QUERY_KEY = "X-Query-Key"
QueryKey = Annotated[
    str | None, Header(alias=QUERY_KEY, description="during a canary, queries with the same value use the same version")
]

ReadRequest = Callable[[LoadedGallery], SearchRequest]
"""Reads a request for the current state of a gallery."""

WriteAnswer = Callable[[SearchRequest, Sequence[Page], float], Response]
T = TypeVar("T")

OPTION_SCHEMAS: dict[str, Any] = SearchParams.model_json_schema()["properties"]
OPTION_SCHEMAS["filter"] |= {"anyOf": [{"$ref": "#/components/schemas/Filter"}, {"type": "null"}]}
QUERY_SCHEMAS: dict[str, Any] = {
    "texts": many({"type": "string", "minLength": 1, "maxLength": MAX_CHARACTERS}),
    "items": many(ID, description="ids of stored items: find similar items"),
}
QUERY_BODY = reads(
    arrow="the column `embedding` (fixed-size lists of floats), and parameters as of an array",
    npy="a matrix (queries, dimension); the options and `version` are query parameters, as in a form",
    form=fields({"images": many(FILE), **QUERY_SCHEMAS, **OPTION_SCHEMAS}, required=("images",)),
    json=fields(
        {
            "version": {**NAME, "description": "version of the embeddings"},
            "embeddings": many(EMBEDDING),
            **QUERY_SCHEMAS,
            **OPTION_SCHEMAS,
        },
        anyOf=[{"required": ["embeddings", "version"]}, {"required": ["texts"]}, {"required": ["items"]}],
        dependentRequired={"version": ["embeddings"], "embeddings": ["version"]},
    ),
)


@router.post("/galleries/{name}/query", response_model=SearchResponse, openapi_extra=QUERY_BODY)
async def query(name: Name, request: Request, service: Service, key: QueryKey = None) -> Response:
    """Search for the k best items of each query, over all versions; `strict` refuses a degraded answer."""
    media_type(request, JSON, FORM, NPY, ARROW)  # only forms get here, see `service.http.search.query_route`
    async with read_form(
        request,
        files="images",
        fields={*OPTIONS, *LISTS},
        max_files=service.settings.max_batch,
        max_field_bytes=service.settings.max_json_bytes,
    ) as form:
        await service.ensure_loaded(name)
        exchange: Exchange = request.state.exchange
        write = writer_of(request.headers.get("accept", ""))
        with exchange.cancelled_on_disconnect():
            return await service.run_blocking(
                respond, service, name, lambda loaded: from_form(service, loaded, form), key, write
            )


class Written(Response):
    """A response of bytes; constructing the framework's own would take as long as encoding them."""

    def __init__(self, content: bytes, kind: str) -> None:
        self.status_code, self.media_type, self.background, self.body = 200, kind, None, content
        self.raw_headers = [(b"content-length", b"%d" % len(content)), (b"content-type", kind.encode())]


def as_json(request: SearchRequest, pages: Sequence[Page], seconds: float) -> Response:
    """The answer as JSON."""
    return Written(orjson.dumps(answer_of(request, pages, seconds)), JSON)


def as_table(request: SearchRequest, pages: Sequence[Page], seconds: float) -> Response:
    """The matches in Arrow's format."""
    return Written(write_matches(answer_of(request, pages, seconds)), ARROW)


def writer_of(accept: str) -> WriteAnswer:
    """Writes the answer as a request's header `Accept` asks for it."""
    return as_table if accepts_arrow(accept) else as_json


def respond(
    service: Runtime,
    name: str,
    read: ReadRequest,
    key: str | None,
    write: Callable[[SearchRequest, Sequence[Page], float], T],
    loaded: LoadedGallery | None = None,
) -> T:
    """Parse, encode, search and describe; queries of one `key` stay with one version during a canary.

    `write` encodes the response from request, pages and seconds taken, on this thread, since a large one would block
    the event loop. `loaded`: the gallery, if the caller has just looked it up.

    Raises:
        UnknownGallery: there is no gallery of this name.
        InvalidArgument: an option is out of range, or the response would be too large.
        NoRoute: no item can be reached, or, if strict, some cannot.
        ModeUnavailable: the items cannot be ranked together in the requested mode.
    """
    started = time.perf_counter()
    for attempt in attempts():
        with attempt:
            if loaded is None or attempt.is_retry:
                loaded = service.replica.find(name)
            if attempt.is_retry:
                service.replica.refresh(loaded.id)
            loaded.declare()
            request = read(loaded)
            answers = service.trials.answer(loaded, [_trial_query(request, part, key) for part in request.parts])
    pages = [page_of(service, request, part, answer) for part, answer in zip(request.parts, answers, strict=True)]
    return write(request, pages, time.perf_counter() - started)


def _trial_query(request: SearchRequest, part: QueryBatch, key: str | None) -> TrialQuery:
    # One more than shown, to know whether there is a next page; one more if a stored item finds itself.
    depth = request.end + 1 + (max(part.exclude_keys) >= 0)
    ask = GalleryQuery(part.encode, depth, request.params, part.encoders, part.stored)
    return TrialQuery(part.version, ask, part.content, key, request.params.k)
