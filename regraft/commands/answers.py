"""Output for programs: `--json` on every command, by one mechanism.

With it, standard output holds one JSON document on one line and nothing else; a stream (a watched backfill) holds one
object a line. Output for people is left out; progress and notes stay on standard error, and an error is one JSON object
there, its last line, with the same exit code as without `--json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

import typer
from pydantic_core import to_jsonable_python

from index.errors import RegraftError
from regraft.commands.console import PlainConsole
from regraft.connection import Problem

OPTION = "--json"
USAGE: type[Exception] = typer.BadParameter.__mro__[2]
"""Click's own error, of which wrong usage is one kind; releases of typer keep it in different places."""

out = PlainConsole()
err = PlainConsole(stderr=True)


class Answers:
    """Prints the answer of the running command as JSON, if `--json` was given."""

    def __init__(self) -> None:
        self._stdout: TextIO | None = None

    @property
    def requested(self) -> bool:
        """Whether `--json` was given."""
        return self._stdout is not None

    @contextmanager
    def redirecting(self) -> Iterator[None]:
        """Let nothing but answers reach standard output: libraries that print find standard error instead."""
        self._stdout, out.quiet = sys.stdout, True
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            self._stdout, out.quiet = None, False

    def __call__(self, value: object) -> None:
        """Print an answer, if requested: models, dataclasses, paths and arrays as JSON, NaN as null."""
        if self.requested:
            print(as_json(value), file=self._stdout, flush=True)


answer = Answers()
"""Called once by each command, or once for each line of a stream."""


def as_json(value: object) -> str:
    """One line of plain ASCII, so that nothing in it acts on a terminal."""
    return json.dumps(to_jsonable_python(value, inf_nan_mode="null", fallback=_plain), allow_nan=False)


def json_requested(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, also one that cannot be parsed."""
    return OPTION in arguments


def run(app: typer.Typer) -> int:
    """Run a command with `--json`: an error is one JSON object on standard error. Returns the exit code."""
    try:
        return int(app(standalone_mode=False) or 0)
    except RegraftError as error:
        fields: dict[str, Any] = {"code": error.code, "detail": str(error)}
        fields |= {"pointer": error.pointer} if error.pointer else {}
        if isinstance(error, Problem):
            fields |= {"status": error.status, "errors": error.errors, "request_id": error.request_id}
        return _print_error(fields, 1)
    except OSError as error:
        return _print_error({"code": "os_error", "detail": str(error)}, 1)
    except USAGE as error:
        return _print_error({"code": "usage", "detail": error.format_message()}, error.exit_code)  # type: ignore[attr-defined]


def _plain(value: Any) -> Any:
    """Values unknown to pydantic: arrays and numbers of numpy as lists and numbers, others as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _print_error(fields: dict[str, Any], code: int) -> int:
    print(as_json({**fields, "exit_code": code}), file=sys.stderr, flush=True)
    return code
