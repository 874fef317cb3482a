"""`needs`: imports of packages that only an extra of Regraft installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from index.errors import RegraftError
from regraft.own_packages import OWN, check_not_shadowed


class MissingExtra(RegraftError):
    """An optional part of Regraft is not installed."""

    code = "missing_extra"


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Convert errors of imports within the block to one that says what to install.

    Raises:
        MissingExtra: a package of `extra` is missing, or another module shadows one of Regraft's packages.
        ModuleNotFoundError: a module of Regraft itself is missing, which no extra brings.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        _check_not_shadowed(package)
        if package in (*OWN, "regraft"):
            raise
        raise MissingExtra(
            f"{error.name} is not installed; this command needs: pip install 'regraft[{extra}]'"
        ) from error


def _check_not_shadowed(name: str) -> None:
    if name in OWN:
        try:
            check_not_shadowed(name)
        except ImportError as error:
            raise MissingExtra(str(error)) from error
