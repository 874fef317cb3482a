"""Answers of the API of which a test states only some fields; the others are blank, by the OpenAPI description."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from email.message import MIMEPart
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import httpx
from pydantic import BaseModel

from regraft import models
from regraft.client import AsyncClient, Client

Handler = Callable[[httpx.Request], httpx.Response]
PATHS = json.loads((Path(__file__).parents[4] / "docs/openapi.json").read_text())["paths"]
BLANK = {str: "", int: 0, float: 0.0, bool: False, list: [], tuple: [], dict: {}}


def whole(request: httpx.Request, body: Any) -> Any:
    """The body completed by the OpenAPI description; a problem or a page is returned unchanged."""
    for path, operations in PATHS.items():
        pattern = re.sub(r"\\?{\w+\\?}", "[^/]+", re.escape(path))
        if request.method.lower() in operations and re.fullmatch(
            pattern, request.url.raw_path.decode().partition("?")[0]
        ):
            answers = operations[request.method.lower()]["responses"]
            content = next(answer for status, answer in answers.items() if status[0] == "2").get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            kinds = [getattr(models, each["$ref"].rpartition("/")[2]) for each in schema.get("anyOf", [schema]) if each]
            return filled(max(kinds, key=lambda kind: len({*kind.model_fields} & {*body})), body) if kinds else body
    raise AssertionError(f"the API has no {request.method} {request.url.path}")


def filled(kind: Any, value: Any = None) -> Any:
    """A value of a type as JSON, completed; None: a blank one."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        given = value or {}
        fields = {n: f for n, f in kind.model_fields.items() if n in given or f.is_required()}
        return {**given, **{n: filled(field.annotation, given.get(n)) for n, field in fields.items()}}
    if type(None) in inner:
        return None if value is None else filled(inner[0], value)
    if value is None:
        return inner[0] if origin is Literal else BLANK.get(origin)
    if origin in {list, tuple}:
        return [filled(inner[0], one) for one in value]
    return {key: filled(inner[1], one) for key, one in value.items()} if inner and isinstance(value, Mapping) else value


GALLERY = {"name": "g", "current": "v1", "items": 2, "mix": {"v1": 2}, "seq": 3, "created": 0.0}


def problem(status: int, **body: object) -> httpx.Response:
    return httpx.Response(status, json=body)


def connected(handler: Handler, **options: Any) -> Client:
    """A client whose requests `handler` answers."""
    return Client("http://service:1", transport=httpx.MockTransport(handler), **options)


def awaiting(handler: Handler, call: Callable[[AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    """The result of a call of an AsyncClient whose requests `handler` answers."""

    async def within() -> Any:
        async with AsyncClient("http://service:1", transport=httpx.MockTransport(handler), **options) as client:
            return await call(client)

    return asyncio.run(within())


def answering(body: object, status: int = 200) -> tuple[list[httpx.Request], Handler]:
    """A list of the received requests, and a handler that gives the same answer to all."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        if status == 200 and request.method == "DELETE" and "/edges/" not in request.url.path:
            return httpx.Response(204)  # all other deletions answer without a body
        return httpx.Response(status, json=whole(request, body) if status < 400 else body)

    return seen, handler


def named(request: httpx.Request, name: str) -> list[MIMEPart]:
    """The parts with this name of a form."""
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    parts = BytesParser(policy=HTTP).parsebytes(head + request.content).iter_parts()
    return [part for part in parts if part.get_param("name", header="content-disposition") == name]
