"""Helpers of commands that use a service's data directly: its settings and its database."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from index.errors import InvalidArgument, RegraftError
from regraft.terminal.answers import err

if TYPE_CHECKING:
    from service.settings import Settings

PREFIX = "REGRAFT_"
FOLLOW_PARENT = "REGRAFT_WORKER_FOLLOWS_STDIN"
"""Set for processes that `serve` starts: they also stop when their standard input closes, so they never outlive it."""
ALIKE = 0.85
"""Similarity to the name of a setting from which a variable is reported as misspelt."""
DRIVERS = ("sqlite", "sqlite+pysqlite", "postgresql+psycopg")
"""The beginnings of a database's URL whose drivers have what the service uses of them."""
Data = Annotated[Path | None, typer.Option(help="Folder of the database, images and versions.", show_default=False)]


class UnusableDatabase(RegraftError):
    """The database cannot be used."""

    code = "unusable_database"


@contextmanager
def usable_database(settings: Settings) -> Iterator[None]:
    """Convert errors of REGRAFT_DATABASE_URL to UnusableDatabase."""
    from sqlalchemy.exc import SQLAlchemyError

    from service.errors import DatabaseDamaged
    from service.store.faults import is_damage

    try:
        _check_url(settings.database_url)
        yield
    except SQLAlchemyError as error:
        if is_damage(error):
            raise DatabaseDamaged(f"{DatabaseDamaged.__doc__} ({str(error).splitlines()[0]})") from error
        raise UnusableDatabase(f"the database cannot be used: {str(error).splitlines()[0]}") from error
    except ModuleNotFoundError as error:
        how = ": pip install 'regraft[postgres]'" if error.name == "psycopg" else ""
        raise UnusableDatabase(f"REGRAFT_DATABASE_URL needs the Python package {error.name}{how}") from error


def _check_url(given: str) -> None:
    """Check that a database can serve several processes, before its driver is imported. Raises UnusableDatabase."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    legal = "REGRAFT_DATABASE_URL must be postgresql://USER:PASSWORD@HOST/DATABASE or sqlite:////PATH/FILE.db"
    try:
        url = make_url(given)
    except ArgumentError as error:
        raise UnusableDatabase(f"the database cannot be used: {legal}") from error
    except ValueError as error:
        raise UnusableDatabase("the database cannot be used: the port in its URL is not a number") from error
    if url.drivername not in DRIVERS:
        raise UnusableDatabase(f"the database cannot be used: {legal}, not {url.drivername}")
    # Each connection would have its own database in memory.
    named = url.database or ":memory:"
    if url.drivername != "postgresql+psycopg" and (":memory:" in named or url.query.get("mode") == "memory"):
        raise UnusableDatabase(f"the database cannot be used: {legal}, not a database in memory")


def checked_settings() -> Settings:
    """The settings of the environment; the error has a line per invalid one. Warns of misspelt ones."""
    from pydantic import ValidationError

    from service.errors import message_of
    from service.settings import Settings

    try:
        settings = Settings()
    except ValidationError as error:
        said = ((str(fault["loc"][0]).upper(), message_of(fault)) for fault in error.errors())
        raise InvalidArgument("; ".join(f"{PREFIX}{name}: {why}" for name, why in said)) from error
    if FOLLOW_PARENT not in os.environ:
        _warn_of_misspellings({f"{PREFIX}{name.upper()}" for name in Settings.model_fields})
    if settings.data.exists() and not settings.data.is_dir():
        raise InvalidArgument(f"--data {settings.data} is a file, not a folder", pointer="/data")
    return settings


def _warn_of_misspellings(settings: Collection[str]) -> None:
    for name in sorted(os.environ.keys() - set(settings)):
        if name.startswith(PREFIX) and (meant := get_close_matches(name, settings, 1, ALIKE)):
            err.print(f"warning: unknown setting {name}; did you mean {meant[0]}?", style="yellow")


def apply_options(options: Mapping[str, object]) -> None:
    """Set options of the command line in the environment, as settings of this process and its workers."""
    os.environ.update({f"{PREFIX}{name.upper()}": str(value) for name, value in options.items() if value is not None})
