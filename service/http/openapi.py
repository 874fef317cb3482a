"""The OpenAPI document: FastAPI's description of each route, completed by what applies to all routes; see `describe`.

Error classes declare their `status` and `code`; the statuses that an operation may return follow from its parameters
and body.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from index.errors import RegraftError, Unwritable
from service.http.bodies.schemas import FILTER
from service.http.server.auth import PUBLIC_PATHS
from service.http.server.problems import CODES, PROBLEM, ProblemDetails
from service.http.server.scopes import required_scope
from service.schemas import LIMIT
from service.settings import Settings

Document = dict[str, Any]

BEARER = HTTPBearer(
    description="The API key, or a key of `POST /v1/keys` whose scope permits the operation: query, ingest or admin; "
    "each includes the previous ones, for all galleries or those it names. /v1/work also accepts the worker key."
).model

DESCRIPTION = """A retrieval service whose gallery outlives its embedding model.

Errors are problem+json (RFC 9457): `code` is for programs, `detail` for people, `errors` point at the fields."""


STATUSES = (400, 401, 403, 404, 409, 412, 413, 415, 422, 500, 502, 503, 504)
"""The statuses of errors that operations may return."""


def install(app: FastAPI, settings: Settings) -> None:
    """Serve this description as /openapi.json."""

    def described() -> Document:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app, settings)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]  # as FastAPI documents it


def operation_id(route: APIRoute) -> str:
    """A name for clients to call an operation by: `galleries_create`."""
    return "_".join([*map(str, route.tags), route.name.removesuffix("_all")])


def describe(app: FastAPI, settings: Settings) -> Document:
    """The OpenAPI document of an application with these settings."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=DESCRIPTION,
        routes=app.routes,
        separate_input_output_schemas=app.separate_input_output_schemas,
    )
    components = document["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    schema = ProblemDetails.model_json_schema(ref_template="#/components/schemas/{model}")
    components["schemas"] |= {**schema.pop("$defs"), "Problem": schema, "Filter": FILTER}
    codes = codes_by_status()
    components["responses"] = {_name(status): _problem(codes[status]) for status in STATUSES}
    if settings.api_key is not None:
        components["securitySchemes"] = {"bearer": BEARER.model_dump(by_alias=True, exclude_none=True, mode="json")}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path in PUBLIC_PATHS:
                operation["security"] = []
            elif settings.api_key is not None:
                # A role name, as OpenAPI 3.1 has it for schemes that are not OAuth's.
                operation["security"] = [{"bearer": [required_scope(method.upper(), path)]}]
            _summarise(operation)
            _add_dry_run(operation)
            _add_problems(method, operation)
    _fill_limits(document, settings)
    return document


CREATION = "index.creation."
"""Makes version folders: no request meets its errors, though tests may have imported them."""


def codes_by_status() -> Mapping[int, list[str]]:
    """Status -> the codes of all errors of this service and of the framework."""
    codes: dict[int, set[str]] = defaultdict(set)
    for kind in _kinds(RegraftError):
        codes[kind.status].add(kind.code)
    for status, code in CODES.items():
        codes[status].add(code)
    return {status: sorted(found) for status, found in codes.items()}


def _kinds(kind: type[RegraftError]) -> Iterator[type[RegraftError]]:
    # No request writes what may be Unwritable: commands and trainings do.
    of_requests = kind is not Unwritable and not kind.__module__.startswith(CREATION)
    if of_requests and kind.__module__.startswith(("index.", "service.")):
        yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _name(status: int) -> str:
    return f"Problem{status}"


def _problem(codes: list[str]) -> Document:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": f"One of: {', '.join(codes)}.", "content": {PROBLEM: {"schema": schema}}}


def _summarise(operation: Document) -> None:
    """Make the first line of the route's docstring its summary, instead of the function's name."""
    summary, _, rest = operation.pop("description").partition("\n")
    operation["summary"] = summary.removesuffix(".")
    if rest:
        operation["description"] = rest.strip()


def _add_dry_run(operation: Document) -> None:
    answers = operation["responses"]
    done = next(answer for status, answer in answers.items() if status.startswith("2"))
    if _takes(operation, "dry_run") and "content" in done:
        answers.setdefault("200", {**done, "description": "A dry run: nothing was changed."})


def _add_problems(method: str, operation: Document) -> None:
    answers = operation["responses"]
    # FastAPI's model of an invalid request is not the one of this service.
    answers.pop("422", None)
    for status in sorted(_failures(method, operation)):
        answers[str(status)] = {"$ref": f"#/components/responses/{_name(status)}"}


def _failures(method: str, operation: Document) -> set[int]:
    """The statuses of errors that an operation may return, by its parameters and body."""
    found = {401, 403, 422, 500, 503}
    reads_body = "requestBody" in operation
    if operation.get("parameters") or reads_body:
        found.add(404)
    if method != "get" or _takes(operation, "lease"):
        found.add(409)
    if _takes(operation, "if-match"):
        found.add(412)
    return found | ({400, 413, 415, 502, 504} if reads_body else set())


def _takes(operation: Document, name: str) -> bool:
    return any(parameter["name"] == name for parameter in operation.get("parameters", ()))


def _fill_limits(value: Any, settings: Settings) -> None:
    if isinstance(value, dict):
        if isinstance(setting := value.get(LIMIT), str):
            del value[LIMIT]
            value["maxItems"] = getattr(settings, setting)
        value = list(value.values())
    for member in value if isinstance(value, list) else ():
        _fill_limits(member, settings)
