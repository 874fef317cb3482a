from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def alone(keyed: Any) -> Iterator[None]:
    """What a test leaves running must not occupy the workers of the next."""
    yield
    keyed.cancel_backfills()
