"""`route` and `stream`: decorators that make one implementation a method of both Client and AsyncClient.

A method is written as a coroutine function over the steps of `Connection`. The steps of Client block, so its coroutines
are never suspended and need no event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from regraft.connection import AsyncConnection, Connection, SyncConnection

Params = ParamSpec("Params")
Answer = TypeVar("Answer")


class route(Generic[Params, Answer]):  # noqa: N801 - a decorator
    """A method of both clients that returns one answer."""

    def __init__(self, function: Callable[Concatenate[Any, Params], Coroutine[Any, Any, Answer]]) -> None:
        self._function = function

    @overload
    def __get__(self, client: None, kind: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: SyncConnection, kind: type) -> Callable[Params, Answer]: ...
    @overload
    def __get__(self, client: AsyncConnection, kind: type) -> Callable[Params, Coroutine[Any, Any, Answer]]: ...
    def __get__(self, client: Connection | None, kind: type) -> Callable[..., Any]:
        method: Callable[..., Any] = self.method_for(kind).__get__(client, kind)
        return method

    def method_for(self, kind: type) -> Callable[..., Any]:
        """The function for clients of this kind."""
        function = self._function
        if not issubclass(kind, SyncConnection):
            return function

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Answer:
            return _run_to_end(function(*args, **kwargs))

        return call


class stream(Generic[Params, Answer]):  # noqa: N801 - a decorator
    """A method of both clients that yields answers as they come."""

    def __init__(self, function: Callable[Concatenate[Any, Params], AsyncGenerator[Answer, None]]) -> None:
        self._function = function

    @overload
    def __get__(self, client: None, kind: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: SyncConnection, kind: type) -> Callable[Params, Generator[Answer, None, None]]: ...
    @overload
    def __get__(self, client: AsyncConnection, kind: type) -> Callable[Params, AsyncGenerator[Answer, None]]: ...
    def __get__(self, client: Connection | None, kind: type) -> Callable[..., Any]:
        method: Callable[..., Any] = self.method_for(kind).__get__(client, kind)
        return method

    def method_for(self, kind: type) -> Callable[..., Any]:
        """The function for clients of this kind."""
        function = self._function
        if not issubclass(kind, SyncConnection):
            return function

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Generator[Answer, None, None]:
            answers = function(*args, **kwargs)
            try:
                while True:
                    yield _run_to_end(anext(answers))
            except StopAsyncIteration:
                return
            finally:
                _run_to_end(answers.aclose())

        return call


def define_methods(client: type) -> None:
    """Define the methods of a client class as plain functions, for `help` and for mocks with a spec."""
    found: dict[str, Any] = {}
    for kind in reversed(client.__mro__):
        found |= vars(kind)
    for name, method in found.items():
        if isinstance(method, route | stream):
            setattr(client, name, method.method_for(client))


def _run_to_end(coroutine: Awaitable[Answer]) -> Answer:
    """Run a coroutine that blocks and is never suspended.

    Raises:
        RuntimeError: it was suspended, because a step is not one of `SyncConnection`.
    """
    steps = coroutine.__await__()
    try:
        next(steps)
    except StopIteration as ended:
        answer: Answer = ended.value
        return answer
    raise RuntimeError("a method of the synchronous client waited for an event loop")
