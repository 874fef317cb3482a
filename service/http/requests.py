"""The checks of every route before its own work: query parameters, and the size, type and JSON of the body."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Annotated, Any, cast, get_args

from fastapi import Depends, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from index.errors import InvalidArgument, shortened
from index.version import NAME
from service.backfills.records import backfill_row
from service.errors import BodyTooLarge, UnknownParameter
from service.http.forms import JSON, media_type
from service.http.parsing import parse_json
from service.http.scopes import outside_galleries
from service.runtime import Runtime
from service.schemas import Body, Number
from service.settings import Settings
from service.store.api_keys import ApiKeyRow
from service.store.galleries.gallery import gallery_row


async def runtime_of(request: Request) -> Runtime:
    """The runtime of the request's application; async, or FastAPI would run this on a thread."""
    return cast(Runtime, request.app.state.runtime)


Service = Annotated[Runtime, Depends(runtime_of)]
Newest = Annotated[int | None, Query(ge=1, le=1000, description="only this many, the newest; default: all")]
"""Limits lists of a gallery's history, which grows forever."""


async def _load(request: Request, service: Service) -> None:
    await service.ensure_loaded(request.path_params["name"])


LOADED = Depends(_load)
"""Dependency of a route that needs a gallery in memory: requests wait for its load without taking a thread."""


async def _key_opens_backfill(request: Request, number: Number, service: Service) -> None:
    key: ApiKeyRow | None = request.state.key
    if key is not None and key.galleries is not None:
        await service.run_blocking(_check_key, service, key, number)


def _check_key(service: Runtime, key: ApiKeyRow, number: int) -> None:
    with service.database.read() as connection:
        gallery = gallery_row(connection, backfill_row(connection, number).gallery_id)
    if gallery is None or not key.opens(gallery.name):
        raise outside_galleries(key)


KEY_OPENS_BACKFILL = Depends(_key_opens_backfill)
"""Dependency of a route for one backfill: a key limited to some galleries permits only their backfills."""


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
            unknown = shortened(name)
            raise UnknownParameter(f"unknown query parameter {unknown!r}; {named}", pointer=f"/{unknown}")
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


def check_name(name: str, reserved: Collection[str] = ()) -> None:
    """Check the name of something new.

    Args:
        name: the name.
        reserved: names that are not legal.

    Raises:
        InvalidArgument: it is malformed or reserved; says which names are legal.
    """
    if not NAME.fullmatch(name) or name in reserved:
        but = f", and none of {', '.join(sorted(reserved))}" if reserved else ""
        legal = "1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        raise InvalidArgument(f"name must be {legal}{but}", pointer="/name")
