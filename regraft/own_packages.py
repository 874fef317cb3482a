"""Check that no other module shadows the packages that Regraft installs besides `regraft`.

Their names are common words, and Python imports the first on its path, which may be a file of the user's program.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

OWN = ("index", "service", "training", "migrations")
HERE = Path(__file__).resolve().parents[1]


def check_not_shadowed(name: str) -> None:
    """Check what `import name` would import, without importing it.

    Args:
        name: one of OWN.

    Raises:
        ImportError: it is not the package that was installed with this one.
    """
    try:
        spec = find_spec(name)
    except ValueError:  # it is already imported, and not from a file
        spec = None
    origin = Path(spec.origin).resolve() if spec and spec.origin else None
    if origin != HERE / name / "__init__.py":
        found = origin or "something without a file"
        raise ImportError(
            f"`import {name}` finds {found}, not Regraft's package {HERE / name}: rename it, or run Regraft in"
            " a separate environment",
            name=name,
        )
