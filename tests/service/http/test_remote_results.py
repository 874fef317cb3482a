"""service.http.remote_results: what is given back is looked at as far as a chunk can go."""

from __future__ import annotations

from typing import Any

import pytest

from service.schemas import MAX_CHUNK
from staging.served import problem


@pytest.mark.parametrize("where", ["moved", "failed"])
def test_more_than_a_chunk_can_hold_is_refused_before_it_is_looked_at(served: Any, where: str) -> None:
    one = {"item": 1, "seq": 1, **({"vector": ""} if where == "moved" else {"reason": ""})}
    # What comes behind the last that may be is no result at all, and nobody notices.
    body = {"moved": [], where: [one] * MAX_CHUNK + [None]}

    told = problem(served.http.post("/work/1?lease=x", json=body), 422, "invalid_request", f"/{where}")

    assert f"at most {MAX_CHUNK}" in told["detail"]
