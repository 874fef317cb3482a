"""kill -9 while a version or an edge comes or goes: it is there as a whole, or can be brought again.

A quick twin is in `tests/service/registry/test_versions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from staging.api.edges import npz
from staging.inputs.builders import make_version, zip_version
from staging.waiting import until

AFTER_RENAME = 2


def register(http: httpx.Client, folder: Path) -> httpx.Response:
    return http.post("/versions", files={"archive": zip_version(folder)})


def connect(http: httpx.Client, _: Path) -> httpx.Response:
    random = np.random.default_rng(0)
    pairs = npz(**{name: random.normal(size=(40, dim)).astype(np.float32) for name, dim in (("new", 6), ("old", 4))})
    return http.post("/edges:fit", data={"new": "v2", "old": "v1", "kind": "ridge"}, files={"pairs": ("p.npz", pairs)})


def unregister(http: httpx.Client, _: Path) -> httpx.Response:
    return http.delete("/versions/v3", params={"confirm": "v3"})


def known(http: httpx.Client) -> tuple[dict[str, str | None], list[str]]:
    """Versions and what is wrong with each; kinds of edges."""
    versions, edges = (http.get(f"/{what}").json()[what] for what in ("versions", "edges"))
    return {one["name"]: one["problem"] for one in versions}, sorted(edge["kind"] for edge in edges)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "number", "change"),
    [
        ("registering", 1, register),
        ("registering", AFTER_RENAME, register),
        ("connecting", 1, connect),
        ("connecting", AFTER_RENAME, connect),
        ("unregistering", 1, unregister),
    ],
)
def test_what_was_cut_off_has_not_happened_and_can_be_asked_again(
    site: Any, tmp_path: Path, point: str, number: int, change: Callable[[httpx.Client, Path], httpx.Response]
) -> None:
    folder = make_version(tmp_path / "v3", "v3", 5, seed=3).folder
    process = site.launch("tests/faults/doomed_server.py", str(site.port), point, str(number))
    until(site.answers, process)
    if change is unregister:
        assert register(site.http, folder).status_code == 201
    before, edges = known(site.http)

    with pytest.raises(httpx.TransportError):
        change(site.http, folder)
    process.wait(timeout=30)
    site.server()

    now, edges_now = known(site.http)
    assert (now.keys(), edges_now) == (before.keys(), edges)
    if change is unregister:  # its folder was aside: told, and registered once more
        assert now.pop("v3") is not None
        assert register(site.http, folder).status_code in {200, 201}
        now = known(site.http)[0]
    assert set(now.values()) == {None}
    assert change(site.http, folder).status_code in {201, 204}
    assert list(site.settings.data.glob("*/.incoming*")) == []
    assert site.http.post("/galleries/g/query", json={"items": ["i1"]}).status_code == 200
