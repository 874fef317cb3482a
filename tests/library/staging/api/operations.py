"""All operations of the OpenAPI description."""

from __future__ import annotations

import json
from pathlib import Path

PATHS = json.loads((Path(__file__).parents[4] / "docs/openapi.json").read_text())["paths"]
OPERATIONS = [(method.upper(), path) for path, operations in PATHS.items() for method in operations]
WITH_KEY = [(method, path) for method, path in OPERATIONS if path != "/v1/health"]
"""The operations that require a key if the service has one."""
