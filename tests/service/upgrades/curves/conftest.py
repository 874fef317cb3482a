"""A gallery whose backfills are measured."""

from __future__ import annotations

from typing import Any

import pytest

from service.http.backfills import progress
from service.upgrades.curves import measure as curves
from staging.api.curves import deploy, group


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(curves, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.01)


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    """`new` sees other things than v1, which it reaches by its first 4 numbers; `apart` reaches v1 through v1 only."""
    served.add("new", 6, drift=1.0, edges=[("v1", "truncate")])
    served.add("apart", 5, seed=3)


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    """Twenty items of v1 in groups, `new` current."""
    path = served.gallery("v1")
    items = [{"id": f"i{n}", "metadata": {"group": group(n)}, "image": f"{n}.png"} for n in range(20)]
    assert served.post_items(path, items, [(f"{n}.png", p) for n, p in enumerate(pictures)]).status_code == 200
    deploy(served, path, "new")
    return path
