"""The routes that fit edges, on stored items or on pairs in a file, and ask how far queries are from those pairs."""

from __future__ import annotations

from typing import Any, BinaryIO, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from index.evaluation.fitting import PairArrays
from regraft.models import DomainCheck, EdgeInfo
from service.errors import InvalidBody
from service.http.body_schemas import FILE, fields, reads
from service.http.edges import describe
from service.http.forms import FORM, JSON, Form, media_type, read_form
from service.http.npy import read_npy
from service.http.npz import read_pairs
from service.http.parsing import parse_json
from service.http.request_context import RequestContext
from service.http.requests import CheckedRoute, Service, read_body
from service.runtime import Runtime
from service.schemas import Body
from service.store.audit import ChangeContext
from service.upgrades.edges.domains import DomainIn, check
from service.upgrades.edges.fitting import FitIn, fit

router = APIRouter(route_class=CheckedRoute, tags=["edges"])

Asked = TypeVar("Asked", bound=Body)

TEXTS = {"new", "old", "kind"}
"""Fields of a form that are text; others are JSON."""
OF_A_FILE = (*sorted(TEXTS), "options", "seed", "replace")
"""What can be said of a fit on a file of pairs; the rest is about stored items."""
ASKED = FitIn.model_json_schema()
SENT = {**FILE, "description": "an .npz: `new` (S, M), `old` (S, N), row by row, and `labels` (S,) if known"}
BODY = reads(
    json=ASKED,
    form=fields(
        {"pairs": SENT, **{name: ASKED["properties"][name] for name in OF_A_FILE}},
        required=("pairs", "new", "old", "kind"),
    ),
)


@router.post("/edges:fit", status_code=201, openapi_extra=BODY)
async def create_fit(request: Request, response: Response, service: Service, context: RequestContext) -> EdgeInfo:
    """Fit an edge and measure it on pairs it was not fitted on.

    As JSON on items that hold embeddings by both versions; as a form on the file `pairs`, an .npz as NumPy writes it.
    """
    response.status_code = context.status(201)
    if media_type(request, JSON, FORM) == JSON:
        raw = await read_body(request, service.settings.max_model_bytes)
        return await service.run_write(fit_items, service, raw, context)
    most = service.settings.max_model_bytes
    async with read_form(request, files="pairs", fields={*OF_A_FILE}, max_files=1, max_field_bytes=most) as form:
        return await service.run_write(fit_file, service, form, context)


QUERIES = {**FILE, "description": "queries by `new`, a matrix in NumPy's format (.npy), a row each"}
CHECKED = DomainIn.model_json_schema()
CHECK_BODY = reads(
    json=CHECKED,
    form=fields(
        {"vectors": QUERIES, **{name: CHECKED["properties"][name] for name in sorted(TEXTS)}},
        required=("vectors", *sorted(TEXTS)),
    ),
)


@router.post("/edges:check", openapi_extra=CHECK_BODY)
async def check_domain(request: Request, service: Service) -> DomainCheck:
    """How far queries are from the pairs that an edge was fitted on: queries that are sent, or items of a gallery."""
    most = service.settings.max_model_bytes
    if media_type(request, JSON, FORM) == JSON:
        raw = await read_body(request, most)
        return await service.run_blocking(lambda: _shown(service, parse_json(raw), None))
    async with read_form(request, files="vectors", fields=TEXTS, max_files=1, max_field_bytes=most) as form:
        if not form.files:
            raise InvalidBody("the form needs one file in the field 'vectors', an .npy", pointer="/vectors")
        return await service.run_blocking(lambda: _shown(service, dict(form.fields), form.files[0].file))


def _shown(service: Runtime, value: object, stream: BinaryIO | None) -> DomainCheck:
    given = None if stream is None else read_npy(stream.read(), "/vectors")
    found = check(service.database, service.registry, _validated(DomainIn, value), given)
    numbers = {name: value for name, value in vars(found).items() if name != "outside"}
    return DomainCheck(**numbers, share=found.share, advice=found.in_words())


def fit_items(service: Runtime, raw: bytes, context: ChangeContext) -> EdgeInfo:
    """Fit on stored items. Raises RequestValidationError for a body that is no `FitIn`, and what `fit` raises."""
    return _fitted(service, _validated(FitIn, parse_json(raw)), context)


def fit_file(service: Runtime, form: Form, context: ChangeContext) -> EdgeInfo:
    """Fit on pairs that were sent.

    Raises:
        InvalidBody: the file is missing or no .npz of pairs, or a field is not JSON.
        RequestValidationError: a field is missing or wrong.
    """
    if not form.files:
        raise InvalidBody("the form needs one file in the field 'pairs', an .npz", pointer="/pairs")
    asked = _validated(
        FitIn, {name: text if name in TEXTS else _json(name, text) for name, text in form.fields.items()}
    )
    return _fitted(service, asked, context, read_pairs(form.files[0].file, service.settings.max_body_bytes))


def _fitted(service: Runtime, asked: FitIn, context: ChangeContext, pairs: PairArrays | None = None) -> EdgeInfo:
    contents = service.blobs, service.decoder
    return describe(fit(service.database, service.registry, service.replica, contents, asked, context, pairs))


def _validated(kind: type[Asked], value: object) -> Asked:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]) from error


def _json(name: str, text: str) -> Any:
    try:
        return parse_json(text)
    except InvalidBody as error:
        raise InvalidBody(error.message, pointer=f"/{name}") from error
