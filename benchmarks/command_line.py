"""The command line of a benchmark: the parameters of its `main` by position; `--help` shows the docstring."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from index.errors import RegraftError

Sizes = tuple[int, ...]
"""On the command line with commas between them."""


def sizes(text: str) -> Sizes:
    return tuple(map(int, text.split(",")))


def run_main(main: Callable[..., None]) -> None:
    """Call `main` with the arguments of the command line, each of the type that it is annotated with.

    Exits with 2 and one line where one is missing, unknown, of another type or refused.
    """
    parser = argparse.ArgumentParser(
        description=main.__globals__["__doc__"], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    signature = inspect.signature(main, eval_str=True)
    for name, parameter in signature.parameters.items():
        kind: dict[str, Any] = {"type": sizes if parameter.annotation == Sizes else parameter.annotation}
        if get_origin(parameter.annotation) is Literal:
            kind = {"choices": get_args(parameter.annotation)}
        if parameter.kind is parameter.VAR_POSITIONAL:
            kind["nargs"] = "*"
        elif parameter.default is not parameter.empty:
            kind |= {"nargs": "?", "default": parameter.default}
        parser.add_argument(name, **kind)
    arguments = vars(parser.parse_args())
    with refusals():
        main(*inspect.BoundArguments(signature, arguments).args)


@contextmanager
def refusals() -> Iterator[None]:
    """Exit with 2 and one line where what was asked for is refused."""
    try:
        yield
    except RegraftError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error.message}", file=sys.stderr)
        sys.exit(2)


def existing(text: str) -> Path:
    """The type of an argument of argparse that is a path to something."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return Path(text)
