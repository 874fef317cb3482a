"""The packages Regraft installs beside `regraft`, and a check that no other of the same name shadows them.

Their names are common words. Python takes the first on its path, which may be a file of the user's program.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

OWN = ("index", "service", "training", "migrations")
HERE = Path(__file__).resolve().parents[1]


def check_not_shadowed(name: str) -> None:
    """Find what `import name` would import, without importing it.

    Args:
        name: one of OWN.

    Raises:
        ImportError: it is not the package beside this one.
    """
    try:
        spec = find_spec(name)
    except ValueError:  # it is imported, and is not from any file
        spec = None
    origin = Path(spec.origin).resolve() if spec and spec.origin else None
    if origin != HERE / name / "__init__.py":
        found = origin or "something without a file"
        raise ImportError(
            f"`import {name}` finds {found}, not Regraft's package {HERE / name}: rename the first, or run Regraft in"
            " an environment of its own",
            name=name,
        )
