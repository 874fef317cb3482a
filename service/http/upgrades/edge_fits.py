"""Routes that fit edges, on stored items or pairs in a file, and measure how far queries are from those pairs."""

from __future__ import annotations

from typing import BinaryIO, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from index.evaluation.fitting import PairArrays
from regraft.models import DomainCheck, EdgeInfo
from service.http.bodies.forms import Form, read_form
from service.http.bodies.media_types import FORM, JSON, media_type
from service.http.bodies.npy import read_npy
from service.http.bodies.npz import read_pairs
from service.http.bodies.schemas import FILE, fields, reads
from service.http.bodies.strict_json import parse_json
from service.http.requests.checked_route import CheckedRoute, read_body
from service.http.requests.dependencies import RequestContext, Service
from service.http.upgrades.edges import describe
from service.runtime import Runtime
from service.schemas import Body
from service.store.audit import ChangeContext
from service.upgrades.edges.domains import DomainIn, check
from service.upgrades.edges.fitting import FitIn, fit

router = APIRouter(route_class=CheckedRoute, tags=["edges"])

Model = TypeVar("Model", bound=Body)

TEXTS = {"new", "old", "kind"}
"""Fields of a form that are text; others are JSON."""
FILE_FIELDS = (*sorted(TEXTS), "options", "seed", "replace")
"""Fields of a fit on a file of pairs; the others are about stored items."""
FIT_SCHEMA = FitIn.model_json_schema()
PAIRS_FILE = {**FILE, "description": "an .npz: `new` (S, M), `old` (S, N), matching rows, and optionally `labels` (S,)"}
BODY = reads(
    json=FIT_SCHEMA,
    form=fields(
        {"pairs": PAIRS_FILE, **{name: FIT_SCHEMA["properties"][name] for name in FILE_FIELDS}},
        required=("pairs", "new", "old", "kind"),
    ),
)


@router.post("/edges:fit", status_code=201, openapi_extra=BODY)
async def create_fit(request: Request, response: Response, service: Service, context: RequestContext) -> EdgeInfo:
    """Fit an edge and measure it on held-out pairs.

    As JSON: on items with embeddings by both versions. As a form: on the file `pairs`, an .npz as NumPy writes it.
    """
    response.status_code = context.status(201)
    if media_type(request, JSON, FORM) == JSON:
        raw = await read_body(request, service.settings.max_model_bytes)
        return await service.run_write(fit_items, service, raw, context)
    most = service.settings.max_model_bytes
    async with read_form(request, files="pairs", fields={*FILE_FIELDS}, max_files=1, max_field_bytes=most) as form:
        return await service.run_write(fit_file, service, form, context)


QUERIES_FILE = {**FILE, "description": "queries by `new`, a matrix in NumPy's format (.npy), one per row"}
CHECK_SCHEMA = DomainIn.model_json_schema()
CHECK_BODY = reads(
    json=CHECK_SCHEMA,
    form=fields(
        {"vectors": QUERIES_FILE, **{name: CHECK_SCHEMA["properties"][name] for name in sorted(TEXTS)}},
        required=("vectors", *sorted(TEXTS)),
    ),
)


@router.post("/edges:check", openapi_extra=CHECK_BODY)
async def check_domain(request: Request, service: Service) -> DomainCheck:
    """Measure how far queries, sent or taken from a gallery, are from the pairs that an edge was fitted on."""
    most = service.settings.max_model_bytes
    if media_type(request, JSON, FORM) == JSON:
        raw = await read_body(request, most)
        return await service.run_blocking(lambda: _check_domain(service, parse_json(raw), None))
    async with read_form(request, files="vectors", fields=TEXTS, max_files=1, max_field_bytes=most) as form:
        vectors = form.only_file("vectors", ".npy").file
        return await service.run_blocking(lambda: _check_domain(service, dict(form.fields), vectors))


def _check_domain(service: Runtime, value: object, stream: BinaryIO | None) -> DomainCheck:
    queries = None if stream is None else read_npy(stream.read(), "/vectors")
    domain = check(service.database, service.registry, _validated(DomainIn, value), queries)
    numbers = {name: value for name, value in vars(domain).items() if name in DomainCheck.model_fields}
    return DomainCheck(**numbers, share=domain.share, advice=domain.in_words())


def fit_items(service: Runtime, raw: bytes, context: ChangeContext) -> EdgeInfo:
    """Fit on stored items. Raises RequestValidationError for a body that is not a `FitIn`, and as `fit`."""
    return _fit(service, _validated(FitIn, parse_json(raw)), context)


def fit_file(service: Runtime, form: Form, context: ChangeContext) -> EdgeInfo:
    """Fit on the pairs in a form.

    Raises:
        InvalidBody: the file is missing or not an .npz of pairs, or a field is not JSON.
        RequestValidationError: a field is missing or invalid.
    """
    pairs = form.only_file("pairs", ".npz").file
    request = _validated(
        FitIn, {name: text if name in TEXTS else parse_json(text, f"/{name}") for name, text in form.fields.items()}
    )
    return _fit(service, request, context, read_pairs(pairs, service.settings.max_body_bytes))


def _fit(service: Runtime, request: FitIn, context: ChangeContext, pairs: PairArrays | None = None) -> EdgeInfo:
    contents = service.blobs, service.decoder
    return describe(fit(service.database, service.registry, service.replica, contents, request, context, pairs))


def _validated(kind: type[Model], value: object) -> Model:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]) from error
