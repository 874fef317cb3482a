"""Versions between which gates are measured, and labelled galleries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from index.version import Version
from staging.api.edges import edge_archive, send
from staging.inputs.builders import make_version


@pytest.fixture(scope="module")
def made(served: Any, versions: dict[str, Version], tmp_path_factory: Any) -> dict[str, Version]:
    """Registered versions; those over `poor` see one component and know the rest as side-information."""
    root = tmp_path_factory.mktemp("made")
    poor = make_version(root / "poor", "poor", 1, side_dim=62)
    blind = make_version(root / "blind", "blind", 4, encoder=False, edges=[(versions["v1"], "identity")])
    found = {
        "poor": poor,
        "wrong": make_version(root / "wrong", "wrong", 4, seed=5, edges=[(versions["v1"], "identity")]),
        "apart": make_version(root / "apart", "apart", 5, seed=9),
        "fct": make_version(root / "fct", "fct", 5, edges=[(poor, "forward")]),
        "two_edges": make_version(root / "two_edges", "two_edges", 7, edges=[(poor, "truncate")]),
        "chain": make_version(root / "chain", "chain", 6, drift=0.05, edges=[(versions["v2"], "identity")]),
        "blind": blind,
        "blind2": make_version(root / "blind2", "blind2", 4, encoder=False, edges=[(blind, "identity")]),
        "sighted": make_version(root / "sighted", "sighted", 4, edges=[(blind, "identity")]),
    }
    for version in found.values():
        assert served.register(version).status_code == 201
    moving = edge_archive(make_version(root / "moving", "moving", 7, edges=[(poor, "forward")]), "poor")
    assert send(served, moving, new="two_edges", old="poor").status_code == 201
    return found


@pytest.fixture(scope="module")
def labelled(served: Any, made: dict[str, Version], pictures: list[bytes]) -> Callable[..., str]:
    """Makes a gallery of twenty labelled pictures with this version current."""

    def fill(version: str = "v1") -> str:
        return served.filled(pictures, version, about=lambda n: {"digit": n % 5})

    return fill
