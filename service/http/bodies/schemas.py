"""OpenAPI schemas of the bodies that routes read themselves: forms, arrays, and JSON with many numbers."""

from __future__ import annotations

from typing import Any

from index.metadata.filter import MAX_CONDITIONS, MAX_KEYS, MAX_VALUES
from service.http.bodies.arrow import ARROW
from service.http.bodies.media_types import FORM, JSON
from service.http.bodies.npy import NPY
from service.schemas import LIMIT

Schema = dict[str, Any]

FILE: Schema = {"type": "string", "format": "binary"}
SWITCH: Schema = {"type": "boolean", "default": False}
FILE_NAME: Schema = {"type": "string", "description": "the file name of a part"}
EMBEDDING: Schema = {"type": "array", "minItems": 1, "items": {"type": "number"}}


def gives(media_type: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that returns a file."""
    return {200: {"content": {media_type: {"schema": FILE}}}}


def reads(*, form: Schema | None = None, json: Schema | None = None, npy: str = "", arrow: str = "") -> dict[str, Any]:
    """The `openapi_extra` of a route with a body; fields of a form that are neither files nor text are JSON."""
    content: dict[str, Any] = {}
    if form is not None:
        inner = {name: schema for name, schema in form["properties"].items() if schema.get("type") != "string"}
        encoding = {name: {"contentType": JSON} for name, schema in inner.items() if schema.get("items") is not FILE}
        content[FORM] = {"schema": form, **({"encoding": encoding} if encoding else {})}
    if json is not None:
        content[JSON] = {"schema": json}
    if npy:
        content[NPY] = {"schema": {**FILE, "description": f"an array in NumPy's format: {npy}"}}
    if arrow:
        content[ARROW] = {"schema": {**FILE, "description": f"a table in Arrow's IPC stream format: {arrow}"}}
    return {"requestBody": {"required": True, "content": content}}


def fields(properties: dict[str, Schema], *, required: tuple[str, ...] = (), **more: Any) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": list(required)} if required else {}),
        **more,
    }


def many(items: Schema, *, least: int = 1, **more: Any) -> Schema:
    """A list of `least` items to as many as the setting `max_batch` allows."""
    return {"type": "array", "minItems": least, LIMIT: "max_batch", "items": items, **more}


_SCALAR: Schema = {"type": ["string", "number", "boolean", "null"]}
_END: Schema = {"type": ["string", "number"]}
_PATH: Schema = {
    "anyOf": [
        {"type": "string", "pattern": r"^[^.]+(\.[^.]+)*$"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}, "description": f"at most {MAX_KEYS} keys"},
    ]
}


def _operator(name: str, schema: Schema) -> Schema:
    return fields({"field": _PATH, name: schema}, required=("field", name))


_FILTER = {"$ref": "#/components/schemas/Filter"}
_PARTS = {
    "type": "array",
    "minItems": 1,
    "items": _FILTER,
    "description": f"{MAX_CONDITIONS} conditions at most",
}
FILTER: Schema = {
    "description": "Only items whose metadata pass it: docs/filters.md.",
    "anyOf": [
        _operator("eq", _SCALAR),
        _operator("in", {"type": "array", "minItems": 1, "items": _SCALAR, "description": f"at most {MAX_VALUES:,}"}),
        _operator("range", fields(dict.fromkeys(("gt", "gte", "lt", "lte"), _END), minProperties=1)),
        _operator("prefix", {"type": "string"}),
        _operator("exists", {"type": "boolean"}),
        fields({"and": _PARTS}, required=("and",)),
        fields({"or": _PARTS}, required=("or",)),
        fields({"not": _FILTER}, required=("not",)),
    ],
}
"""The component `Filter`; `service.http.openapi` adds it to the document."""
