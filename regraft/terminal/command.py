"""`Commands`: a typer app that adds shared options to its commands: `--json`, and a service's URL, key and timeout.

A command that calls a service has a parameter `client`, which is created from these options when it runs.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Annotated, Any

import typer

from index.errors import InvalidArgument, did_you_mean
from regraft.client import DEFAULT_URL, Client, Problem
from regraft.connection import TIMEOUT
from regraft.terminal.answers import OPTION, answer

CLIENT = "client"
"""The parameter of commands that call a service."""
Url = Annotated[str, typer.Option("--url", envvar="REGRAFT_URL", help="URL of the service.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="REGRAFT_API_KEY", help="API key, if the service requires one.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option(OPTION, help="Print the answer as JSON on standard output.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        envvar=TIMEOUT,
        metavar="SECONDS",
        help="Maximum time to wait for an answer; default 60, for changes 3600.",
        show_default=False,
    ),
]
UNAUTHORIZED = 401


class Commands(typer.Typer):
    """A typer app whose commands get the shared options."""

    def command(  # type: ignore[override]
        self, name: str | None = None, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Overrides typer's method to add the shared options."""
        register = super().command(name, **options)

        def add(command: Callable[..., Any]) -> Callable[..., Any]:
            register(_with_options(command))
            return command

        return add


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    asks = parameters.pop(CLIENT, None) is not None
    added = [_option("json_wanted", Json, False)]
    if asks:
        added = [_option("url", Url, DEFAULT_URL), _option("api_key", ApiKey, None), *added]
        added.append(_option("timeout", Timeout, None))

    @wraps(command)
    def run_command(*, json_wanted: bool, timeout: float | None = None, **options: Any) -> None:
        if timeout is not None:
            os.environ[TIMEOUT] = str(timeout)  # read by every connection of this process
        with ExitStack() as running:
            if json_wanted:
                running.enter_context(answer.redirecting())
            if asks:
                options[CLIENT] = running.enter_context(_connected(options.pop("url"), options.pop("api_key")))
            command(**options)

    run_command.__signature__ = inspect.Signature([*parameters.values(), *added])  # type: ignore[attr-defined]
    return run_command


def _option(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextmanager
def _connected(url: str, api_key: str | None) -> Iterator[Client]:
    """A client for one command; its errors name options, and for an unknown gallery similar names."""
    with Client(url, api_key) as client:
        try:
            yield client
        except Problem as problem:
            if problem.code != "unknown_gallery":
                raise _in_options(problem) from problem
            named = re.search("'(.+)'", problem.detail)
            near = named and did_you_mean(named[1], [found.name for found in client.galleries()])
            raise InvalidArgument(f"{problem.detail}{near or '; `regraft gallery list` lists them'}") from problem


def _in_options(problem: Problem) -> Problem:
    """The same problem with the names of options instead of fields and headers of the API."""
    detail = problem.detail.replace("replace=true", "--replace").replace("`override`", "--override")
    if problem.status == UNAUTHORIZED:
        detail = "the service requires an API key: --api-key or REGRAFT_API_KEY is missing or wrong"
    elif re.search(r"/\d", problem.pointer) and problem.pointer not in detail:
        detail += f" (at {problem.pointer})"  # which of many entries or embeddings
    said = {"code": problem.code, "errors": problem.errors, "request_id": problem.request_id}
    return Problem(problem.status, {**said, "detail": detail})
