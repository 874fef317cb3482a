"""The checks of every route before its own work: query parameters, and the size, type and JSON of the body."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, get_args

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from index.errors import pointer_to, shortened
from service.errors import BodyTooLarge, UnknownParameter
from service.http.bodies.media_types import JSON, media_type
from service.http.bodies.strict_json import parse_json
from service.http.requests.dependencies import runtime_of
from service.schemas import Body
from service.settings import Settings


class CheckedRoute(APIRoute):
    """A route that refuses undeclared query parameters, and whose body, if it has a model, must be JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the checks."""
        handle = super().get_route_handler()
        legal = sorted(set(_parameters(self.dependant)))
        model = _model(self)

        async def checked(request: Request) -> Response:
            check_parameters(request, legal)
            return await handle(request if model is None else await _ParsedRequest.of(request, model))

        return checked

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # A route's pattern permits a trailing line break, with which an item's path would lead to another item.
        return (Match.NONE, {}) if scope["path"].endswith("\n") else super().matches(scope)


class _ParsedRequest(Request):
    """A request whose body was parsed on a thread, to keep the event loop free."""

    value: Any = None

    @classmethod
    async def of(cls, request: Request, model: type[Body]) -> _ParsedRequest:
        """Read the body of a route that takes a model."""
        parsed = cls(request.scope, request.receive)
        runtime = await runtime_of(request)
        if raw := await read_body(parsed, getattr(runtime.settings, model.largest)):
            media_type(parsed, JSON)
            parsed.value = await runtime.run_blocking(parse_json, raw)
            # FastAPI checks the elements of lists on the event loop.
            _check_lists(parsed.value, model, runtime.settings)
        return parsed

    async def json(self) -> Any:
        return self.value


def _check_lists(value: Any, model: type[Body], settings: Settings) -> None:
    """Raise BodyTooLarge for a list with more elements than its setting permits."""
    for name, setting in model.lists.items():
        elements = value.get(name) if isinstance(value, dict) else None
        if isinstance(elements, list) and len(elements) > (limit := getattr(settings, setting)):
            raise BodyTooLarge(f"{name} has {len(elements)} elements; at most {limit} are legal", pointer=f"/{name}")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, of at most `limit` bytes. Raises BodyTooLarge."""
    request.state.exchange.bound(limit)
    return await request.body()


def check_parameters(request: Request, legal: list[str]) -> None:
    """Raise UnknownParameter for a query parameter that the route does not have, or that is repeated."""
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in legal:
            named = f"legal: {', '.join(legal)}" if legal else "this route has none"
            why = f"unknown query parameter {shortened(name)!r}; {named}"
            raise UnknownParameter(why, pointer=pointer_to(name))
        if name in seen:
            raise UnknownParameter(f"query parameter {name!r} is given twice", pointer=f"/{name}")
        seen.add(name)


def _parameters(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _parameters(dependency)


def _model(route: APIRoute) -> type[Body] | None:
    """The model of a route's body, if it has one."""
    annotation = None if route.body_field is None else route.body_field.field_info.annotation
    models = [
        candidate
        for candidate in (annotation, *get_args(annotation))
        if isinstance(candidate, type) and issubclass(candidate, Body)
    ]
    return models[0] if models else None
