"""Settings for tests of vectors in files: vectors are moved at once, and a few fill a file."""

from __future__ import annotations

from typing import Any

import pytest

from service.store.offloading import moves, offloader


def settled_at_once(patch: pytest.MonkeyPatch, **others: Any) -> None:
    """Set constants of the offloader: defaults, and `others` by name."""
    usual = {"SETTLED_SECONDS": 0.0, "LEAST_ROWS": 1, "GRACE_SECONDS": 0.0}
    for name, value in {**usual, **others}.items():
        owners = [module for module in (offloader, moves) if hasattr(module, name)]
        assert owners, name
        for owner in owners:
            patch.setattr(owner, name, value)
