"""What every route checks of a request before its own work: its parameters, and the size, type and JSON of its body."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Annotated, Any, cast, get_args

from fastapi import Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from index.errors import InvalidArgument
from index.version import NAME
from service.backfills.records import backfill_row
from service.errors import BodyTooLarge, UnknownParameter
from service.http.forms import JSON, media_type
from service.http.parsing import parse_json
from service.http.scopes import beyond
from service.runtime import Runtime
from service.schemas import Body, Number
from service.settings import Settings
from service.store.api_keys import ApiKeyRow
from service.store.repository import gallery_row


async def runtime_of(request: Request) -> Runtime:
    """The runtime of the application that got the request; async, or FastAPI would run it in a thread."""
    return cast(Runtime, request.app.state.runtime)


Service = Annotated[Runtime, Depends(runtime_of)]


async def _load(request: Request, service: Service) -> None:
    await service.ensure_loaded(request.path_params["name"])


LOADED = Depends(_load)
"""Of a route that asks a gallery in memory: while it is loaded, requests wait for it and take no thread."""


async def _own(request: Request, number: Number, service: Service) -> None:
    key: ApiKeyRow | None = request.state.key
    if key is not None and key.galleries is not None:
        await service.run_blocking(_check_own, service, key, number)


def _check_own(service: Runtime, key: ApiKeyRow, number: int) -> None:
    with service.database.read() as connection:
        its = gallery_row(connection, backfill_row(connection, number).gallery_id)
    if its is None or not key.opens(its.name):
        raise beyond(key)


OF_ITS_GALLERIES = Depends(_own)
"""Of a route that names a backfill by its number: a key of some galleries opens theirs alone."""


class CheckedRoute(APIRoute):
    """A route that takes the parameters it declares and no others, and whose body, if it is a model, is JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the checks."""
        handle = super().get_route_handler()
        legal = sorted(set(_parameters(self.dependant)))
        model = _model(self)

        async def checked(request: Request) -> Response:
            check_parameters(request, legal)
            return await handle(request if model is None else await _Parsed.of(request, model))

        return checked

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # Behind the pattern of a route one line break may follow, and an item's path would lead to another one.
        return (Match.NONE, {}) if scope["path"].endswith("\n") else super().matches(scope)


class _Parsed(Request):
    """A request whose body was parsed already, and not by the event loop, which other requests wait for."""

    value: Any = None

    @classmethod
    async def of(cls, request: Request, model: type[Body]) -> _Parsed:
        """Read the body of a route that takes a model."""
        parsed = cls(request.scope, request.receive)
        runtime = await runtime_of(request)
        if raw := await read_body(parsed, getattr(runtime.settings, model.largest)):
            media_type(parsed, JSON)
            parsed.value = await runtime.run_blocking(parse_json, raw)
            # FastAPI checks what is in a list on the event loop.
            _check_lists(parsed.value, model, runtime.settings)
        return parsed

    async def json(self) -> Any:
        return self.value


def _check_lists(value: Any, model: type[Body], settings: Settings) -> None:
    """Raise BodyTooLarge for a list of more elements than a setting says."""
    for name, setting in model.lists.items():
        listed = value.get(name) if isinstance(value, dict) else None
        if isinstance(listed, list) and len(listed) > (most := getattr(settings, setting)):
            raise BodyTooLarge(f"{name} holds {len(listed)} elements; at most {most}", pointer=f"/{name}")


async def read_body(request: Request, most: int) -> bytes:
    """The whole body, of at most `most` bytes. Raises BodyTooLarge."""
    request.state.exchange.bound(most)
    return await request.body()


def check_parameters(request: Request, legal: list[str]) -> None:
    """Raise UnknownParameter for a query parameter that the route does not have, or that is given twice."""
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in legal:
            named = f"legal: {', '.join(legal)}" if legal else "this route has none"
            raise UnknownParameter(f"unknown query parameter {name!r}; {named}", pointer=f"/{name}")
        if name in seen:
            raise UnknownParameter(f"query parameter {name!r} is given twice", pointer=f"/{name}")
        seen.add(name)


def _parameters(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _parameters(inner)


def _model(route: APIRoute) -> type[Body] | None:
    """The model a route's body is read as."""
    declared = None if route.body_field is None else route.body_field.field_info.annotation
    kinds = [kind for kind in (declared, *get_args(declared)) if isinstance(kind, type) and issubclass(kind, Body)]
    return kinds[0] if kinds else None


def check_name(name: str, taken: Collection[str] = ()) -> None:
    """Refuse what is to be made under a name that nothing can have, or that is `taken` by what is no name.

    Raises:
        InvalidArgument: says which are legal.
    """
    if not NAME.fullmatch(name) or name in taken:
        but = f", and none of {', '.join(sorted(taken))}" if taken else ""
        legal = "1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        raise InvalidArgument(f"name must be {legal}{but}", pointer="/name")
