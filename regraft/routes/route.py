"""One body for both clients: Client returns what a method comes to, AsyncClient what is to be awaited.

A method is written as a coroutine function over the steps of `Connection`, which those of Client do at once: its
coroutines end without ever being suspended, so that nothing has to run them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from regraft.connection import AsyncConnection, Connection, SyncConnection

Params = ParamSpec("Params")
Answer = TypeVar("Answer")


class route(Generic[Params, Answer]):  # noqa: N801 - a decorator
    """A method of both clients that gives one answer."""

    def __init__(self, function: Callable[Concatenate[Any, Params], Coroutine[Any, Any, Answer]]) -> None:
        self._function = function

    @overload
    def __get__(self, client: None, kind: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: SyncConnection, kind: type) -> Callable[Params, Answer]: ...
    @overload
    def __get__(self, client: AsyncConnection, kind: type) -> Callable[Params, Coroutine[Any, Any, Answer]]: ...
    def __get__(self, client: Connection | None, kind: type) -> Callable[..., Any]:
        method: Callable[..., Any] = self.of(kind).__get__(client, kind)
        return method

    def of(self, kind: type) -> Callable[..., Any]:
        """The function that clients of this kind have."""
        function = self._function
        if not issubclass(kind, SyncConnection):
            return function

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Answer:
            return _outcome(function(*args, **kwargs))

        return call


class stream(Generic[Params, Answer]):  # noqa: N801 - a decorator
    """A method of both clients that gives answers as they come."""

    def __init__(self, function: Callable[Concatenate[Any, Params], AsyncGenerator[Answer, None]]) -> None:
        self._function = function

    @overload
    def __get__(self, client: None, kind: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: SyncConnection, kind: type) -> Callable[Params, Generator[Answer, None, None]]: ...
    @overload
    def __get__(self, client: AsyncConnection, kind: type) -> Callable[Params, AsyncGenerator[Answer, None]]: ...
    def __get__(self, client: Connection | None, kind: type) -> Callable[..., Any]:
        method: Callable[..., Any] = self.of(kind).__get__(client, kind)
        return method

    def of(self, kind: type) -> Callable[..., Any]:
        """The function that clients of this kind have."""
        function = self._function
        if not issubclass(kind, SyncConnection):
            return function

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Generator[Answer, None, None]:
            answers = function(*args, **kwargs)
            try:
                while True:
                    yield _outcome(anext(answers))
            except StopAsyncIteration:
                return
            finally:
                _outcome(answers.aclose())

        return call


def define_methods(client: type) -> None:
    """Have these methods in a class of clients as functions, which mocks with a spec and `help` look for."""
    found: dict[str, Any] = {}
    for kind in reversed(client.__mro__):
        found |= vars(kind)
    for name, method in found.items():
        if isinstance(method, route | stream):
            setattr(client, name, method.of(client))


def _outcome(coroutine: Awaitable[Answer]) -> Answer:
    """What a coroutine comes to that waits for nothing but by blocking.

    Raises:
        RuntimeError: it was suspended: one of its steps is none of `SyncConnection`.
    """
    steps = coroutine.__await__()
    try:
        next(steps)
    except StopIteration as ended:
        answer: Answer = ended.value
        return answer
    raise RuntimeError("a method of the synchronous client waited for an event loop")
