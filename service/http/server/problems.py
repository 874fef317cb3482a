"""Problem+json (RFC 9457): how each error becomes a response."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, ConfigDict
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Scope

from index.errors import RegraftError, pointer_to, shortened
from index.events import Event
from service.errors import DatabaseUnavailable, ItemsRefused, message_of
from service.store.database.connections import COMMIT_STATE

logger = logging.getLogger(__name__)

READINESS = "/v1/health/ready"
MOST_ERRORS = 100
"""Most faults of one body that a response lists."""
CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    422: "invalid_request",
    500: "internal_error",
}
"""Codes of the framework's errors, independent of HTTP phrases, which change with Python releases."""
TITLES = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    412: "Precondition Failed",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    422: "Unprocessable Content",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
"""The names of RFC 9110: those that Python knows change with its releases."""
PROBLEM = "application/problem+json"
UNCHANGED = "the database does not answer; nothing was changed"
"""Replaces the message of `DatabaseUnavailable` if nothing can have been committed."""


class Fault(BaseModel):
    """The error of one field, or of one item of a batch; `pointer` is its JSON pointer."""

    model_config = ConfigDict(extra="allow")

    pointer: str
    detail: str


class ProblemDetails(BaseModel):
    """Why a request could not be carried out."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[Fault]
    request_id: str


def problem(request_id: str, status: int, code: str, detail: str, errors: Sequence[Mapping[str, Any]] = ()) -> Response:
    """A problem+json response; `errors` name fields by JSON pointer."""
    content = {
        "type": f"urn:regraft:problem:{code}",
        "title": TITLES.get(status, "HTTP Error"),
        "status": status,
        "detail": detail,
        "code": code,
        "errors": list(errors),
        "request_id": request_id,
    }
    headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
    # ASCII, because names from the request are repeated, and half a surrogate pair could not be encoded in UTF-8.
    return Response(json.dumps(content), status, headers, media_type=PROBLEM)


def problem_of(error: RegraftError, request_id: str) -> Response:
    """The response to a `RegraftError`."""
    named = [{"pointer": error.pointer, "detail": error.message}] if error.pointer else []
    errors = error.errors if isinstance(error, ItemsRefused) else named
    return problem(request_id, error.status, error.code, error.message, errors)


def failure_of(error: RegraftError, scope: Scope) -> Response:
    """The response to a `RegraftError`, which is logged if its status is 500 or more.

    Metrics count such answers, but only their clients see why. Probes of readiness repeat, so they are not logged.
    """
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and scope["path"] != READINESS:
        where = {"method": scope["method"], "path": scope["path"]}
        logger.warning(Event("request_refused", **where, status=error.status, code=error.code, reason=error.message))
    return problem_of(error, scope["state"]["request_id"])


def install(app: FastAPI) -> None:
    """Turn expected errors into problem responses; `service.http.server.auth.Guard` does so for unexpected ones."""
    app.add_exception_handler(RegraftError, _regraft_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(PoolTimeout, database_error)  # every connection is taken


def request_id_of(request: Request) -> str:
    """The id that `service.http.server.auth.Guard` gave the request."""
    return str(request.state.request_id)


async def _regraft_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RegraftError)
    return failure_of(error, request.scope)


async def database_error(request: Request, error: Exception) -> Response:
    """The response if the database is locked, restarting or unreachable, or all connections to it are taken."""
    # No traceback, as every request fails like this until the database answers again.
    logger.error(Event("database_unavailable", reason=str(error).partition("\n")[0]))
    commit_state = COMMIT_STATE.get()
    unknown = commit_state.committed or commit_state.committing
    return problem_of(DatabaseUnavailable(None if unknown else UNCHANGED), request_id_of(request))


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [
        {"pointer": _pointer(e["loc"]), "detail": message_of(e), "code": e["type"]}
        for e in error.errors()[:MOST_ERRORS]
    ]
    detail = "; ".join(f"{e['pointer'] or 'the body'}: {e['detail']}" for e in errors)
    return problem(request_id_of(request), 422, "invalid_request", detail, errors)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, detail, headers = CODES.get(error.status_code, "http_error"), str(error.detail), dict(error.headers or {})
    path = shortened(request.scope["path"])
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["allow"] = ", ".join(_methods(request))
        detail = f"{request.method} is not legal for {path!r}; legal: {headers['allow']}"
    elif detail == HTTPStatus.NOT_FOUND.phrase:  # the framework's
        detail = f"there is no route {path!r}; GET /openapi.json lists them"
    response = problem(request_id_of(request), error.status_code, code, detail)
    response.headers.update(headers)
    return response


def _methods(request: Request) -> list[str]:
    """All methods of a path, since a route of the framework knows only its own."""
    routes = iter_route_contexts(request.app.routes)
    paths = [(compile_path(route.path or ""), route.methods or ()) for route in routes]
    found = [(path, methods) for (regex, path, _), methods in paths if regex.match(request.scope["path"])]
    return sorted({method for path, methods in found if path == found[0][0] for method in methods})


def _pointer(place: Sequence[int | str]) -> str:
    """FastAPI's location, below "body", "query" or "path", as a JSON pointer."""
    return pointer_to(*place[1:])
