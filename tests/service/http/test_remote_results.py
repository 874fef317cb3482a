"""service.http.remote_results: what is given back is looked at as far as a chunk can go."""

from __future__ import annotations

from typing import Any

import pytest

from service.http.remote_results import MAX_EDGES
from service.schemas import MAX_CHUNK
from staging.served import problem


@pytest.mark.parametrize("where", ["moved", "failed"])
def test_more_than_a_chunk_can_hold_is_refused_before_it_is_looked_at(served: Any, where: str) -> None:
    one = {"item": 1, "seq": 1, **({"vector": ""} if where == "moved" else {"reason": ""})}
    # What comes behind the last that may be is no result at all, and nobody notices.
    body = {"moved": [], where: [one] * MAX_CHUNK + [None]}

    told = problem(served.http.post("/work/1?lease=x", json=body), 422, "invalid_request", f"/{where}")

    assert f"at most {MAX_CHUNK}" in told["detail"]


@pytest.mark.parametrize(("path", "body"), [("/work/1?lease=x", {"moved": []}), ("/work:claim", {"worker": "w"})])
def test_of_a_list_of_what_is_wrong_one_error_is_made(served: Any, path: str, body: dict[str, Any]) -> None:
    where = "edges" if "moved" in body else "kinds"
    told = problem(served.http.post(path, json={**body, where: ["x"] * 20}), 422, "invalid_request", f"/{where}/0")

    assert len(told["errors"]) == 1


def test_more_edges_than_there_may_be_are_not_looked_at(served: Any) -> None:
    body = {"moved": [], "edges": [1] * MAX_EDGES + [None]}

    problem(served.http.post("/work/1?lease=x", json=body), 422, "invalid_request", "/edges")
