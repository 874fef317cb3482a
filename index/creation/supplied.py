"""A version without an encoder: clients supply the vector of each item and query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from index.space import space_from_json
from index.version import Card, Origin


@dataclass(frozen=True)
class Supplied:
    """Vectors of `dim` numbers, compared in `space` (the `space` field of a card)."""

    dim: int
    space: Mapping[str, Any] = field(default_factory=lambda: {"kind": "cosine"})

    def write(self, folder: Path, name: str) -> Card:
        return Card(name, self.dim, space_from_json(dict(self.space)).as_json(), method=Origin.SUPPLIED)
