"""Expected answers to an ingest."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def blobs(served: Any) -> set[str]:
    return {p.name for p in (Path(served.runtime.settings.data) / "blobs").rglob("*") if p.is_file()}


def ingest_answer(stored: int, seq: int, **counts: int) -> dict[str, Any]:
    """The answer to a batch without an error."""
    counted = {"stored": stored, "new": 0, "updated": 0, "replaced": 0, **counts, "failed": 0}
    return {**counted, "seq": seq, "errors": [], "warnings": []}
