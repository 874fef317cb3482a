"""A skipped half of the suite must not go unseen where it is required."""

from __future__ import annotations

import os
from typing import Any


def test_postgresql_runs_where_it_is_required(postgres: Any) -> None:
    if os.environ.get("REGRAFT_REQUIRE_POSTGRES") == "1":
        assert not isinstance(postgres, str), postgres
