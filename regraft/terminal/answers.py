"""`answer`: output for programs, by the option `--json` of every command.

With it, standard output has only one JSON document on one line; a stream (a watched backfill) has one object per line.
Output for people is omitted. Progress and notes are printed to standard error; an error is one JSON object on its last
line, with the same exit code as without `--json`.
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
from regraft.connection import Problem
from regraft.terminal.console import PlainConsole

OPTION = "--json"
USAGE: type[Exception] = typer.BadParameter.__mro__[2]
"""Click's base class of errors, such as wrong usage; its module differs between releases of typer."""

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
        """Send everything but answers to standard error, such as the output of libraries that print."""
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
"""Called once by each command, or once per line of a stream."""


def as_json(value: object) -> str:
    """JSON as one line of ASCII, so that nothing in it controls a terminal."""
    return json.dumps(to_jsonable_python(value, inf_nan_mode="null", fallback=_plain), allow_nan=False)


def json_requested(arguments: Sequence[str]) -> bool:
    """Whether a command line has `--json`, even if it cannot be parsed."""
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
    """Convert values unknown to pydantic: NumPy arrays and numbers to lists and numbers, others to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _print_error(fields: dict[str, Any], code: int) -> int:
    print(as_json({**fields, "exit_code": code}), file=sys.stderr, flush=True)
    return code
