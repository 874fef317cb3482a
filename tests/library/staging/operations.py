"""Every operation of the API, as its description has them."""

from __future__ import annotations

import json
from pathlib import Path

PATHS = json.loads((Path(__file__).parents[3] / "docs/openapi.json").read_text())["paths"]
OPERATIONS = [(method.upper(), path) for path, operations in PATHS.items() for method in operations]
WITH_KEY = [(method, path) for method, path in OPERATIONS if path != "/v1/health"]
"""Those that want a key where there is one."""
