"""Versions and a gallery on trial."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    served.add("drifted", 4, drift=2.0, edges=[("v1", "identity")])
    served.add("twin", 4, edges=[("v1", "identity")])


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures)
