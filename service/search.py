"""QUERY PATH over HTTP: read the queries, then in one hop to a thread encode, search and fetch what a match shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from PIL.Image import Image
from pydantic_core import to_json
from starlette.datastructures import UploadFile

from index.encoder import BATCH
from index.errors import InvalidArgument, RegraftError
from index.gallery import Encode, check_k
from index.image import decode_image, preprocess
from index.space import Vectors, space_from_json
from service.catalog import Registered
from service.errors import BodyTooLarge, InvalidBody
from service.forms import FORM, JSON, Form, media_type, read_form
from service.replica import Answer
from service.repository import describe
from service.runtime import Runtime, Service
from service.schemas import Answered, check_embeddings, parse_json, take_object

router = APIRouter(tags=["query"])

DEFAULT_K = 10
ATTEMPTS = 3
"""How often a query is answered anew because items it found were deleted or replaced before they could be shown."""

QUERY_BODY = {
    "requestBody": {
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {
                        "images": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        "k": {"type": "integer", "minimum": 1, "default": DEFAULT_K},
                        "strict": {"type": "boolean", "default": False},
                    },
                }
            },
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["version", "embeddings"],
                    "properties": {
                        "version": {"type": "string", "description": "which version made the embeddings"},
                        "embeddings": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
                        "k": {"type": "integer", "minimum": 1, "default": DEFAULT_K},
                        "strict": {"type": "boolean", "default": False},
                    },
                }
            },
        }
    }
}


@dataclass(frozen=True)
class Question:
    """A checked request: `version` None means the current one; `encode` embeds the queries by a version."""

    version: str | None
    encode: Encode
    encoders: frozenset[str]
    queries: int
    k: int
    strict: bool


@router.post("/galleries/{name}/query", response_model=Answered, openapi_extra=QUERY_BODY)
async def query(name: str, request: Request, service: Service) -> Response:
    """The k best items for each query, over every version the gallery holds; `strict` refuses a degraded answer."""
    settings = service.settings
    if media_type(request, JSON, FORM) == JSON:
        raw = await request.body()
        return await service.hop(respond, service, name, lambda: by_embeddings(service, raw))
    async with read_form(
        request, files="images", fields={"k", "strict"}, max_files=settings.max_batch, max_field_bytes=1024
    ) as form:
        return await service.hop(respond, service, name, lambda: by_images(service, form))


def respond(service: Runtime, name: str, read: Callable[[], Question]) -> Response:
    """The answer as a response, written on this thread: a large one would keep the event loop from other requests."""
    return Response(to_json(answer(service, name, read)), media_type="application/json")


def answer(service: Runtime, name: str, read: Callable[[], Question]) -> dict[str, Any]:
    """Search and show what was found.

    Raises:
        UnknownGallery: there is no such gallery.
        InvalidArgument: k is not 1 to the number of items, or the response would be too large.
        NoRoute: strict, and some items cannot be reached; or none can.
    """
    started = time.perf_counter()
    live = service.replica.find(name)
    question = read()
    service.replica.declare(live)
    check_k(question.k, sum(live.gallery.mix().values()))
    _check_size(question, service.settings.max_results)
    for _ in range(ATTEMPTS):
        found = live.search(question.version, question.encode, question.k, question.encoders, question.strict)
        results, complete = _show(service, found)
        if complete:
            break
        service.replica.refresh(live.id)
    return {
        "version": found.version,
        "k": question.k,
        "mix": found.found.mix,
        "degraded": [vars(degraded) for degraded in found.degraded],
        "results": results,
        "took_ms": round((time.perf_counter() - started) * 1000, 3),
    }


def by_embeddings(service: Runtime, raw: bytes) -> Question:
    """A question in JSON: embeddings of a named version. Only that version's edges lead to other items."""
    body = take_object(parse_json(raw), {"k", "version", "embeddings", "strict"}, "")
    version, k, strict = body.get("version"), body.get("k", DEFAULT_K), body.get("strict", False)
    if not isinstance(version, str):
        raise InvalidBody("version must name the version that made the embeddings", pointer="/version")
    if not isinstance(k, int) or isinstance(k, bool):
        raise InvalidBody("k must be an integer", pointer="/k")
    if not isinstance(strict, bool):
        raise InvalidBody("strict must be true or false", pointer="/strict")
    registered = service.catalog.named(version)
    _check_count(body.get("embeddings"), service.settings.max_batch, "/embeddings")
    space = space_from_json(registered.card.space)
    vectors = check_embeddings(body.get("embeddings"), registered.card.dim, space, "/embeddings")
    return Question(version, lambda _: vectors, frozenset(), len(vectors), k, strict)


def by_images(service: Runtime, form: Form) -> Question:
    """A question in images: embedded by the gallery's current version, and by others where only `dual` leads on."""
    k, strict = form.fields.get("k", str(DEFAULT_K)), form.fields.get("strict", "false")
    if not k.strip().isascii() or not k.strip().removeprefix("-").isdecimal():
        raise InvalidBody("k must be an integer", pointer="/k")
    if strict not in {"true", "false"}:
        raise InvalidBody("strict must be true or false", pointer="/strict")
    if not form.files:
        raise InvalidBody("the form needs at least one file in the field 'images'", pointer="/images")
    encode = _Images(service, form.files)
    return Question(None, encode, service.catalog.encoders(), len(form.files), int(k), strict == "true")


class _Images:
    """Embeds a request's images by any version, once each; holds decoded pixels of a few images at a time."""

    def __init__(self, service: Runtime, files: Sequence[UploadFile]) -> None:
        self._service = service
        self._files = files
        self._embedded: dict[str, Vectors] = {}

    def __call__(self, version: str) -> Vectors:
        if version not in self._embedded:
            self._embedded[version] = self._encode(self._service.catalog.named(version))
        return self._embedded[version]

    def _encode(self, version: Registered) -> Vectors:
        encoder = version.encoder()
        parts = []
        for start in range(0, len(self._files), BATCH):
            numbers = range(start, min(start + BATCH, len(self._files)))
            pixels = [preprocess(self._decode(number), encoder.spec) for number in numbers]
            parts.append(encoder.encode_arrays(np.stack(pixels)).vectors)
        return np.concatenate(parts)

    def _decode(self, number: int) -> Image:
        file = self._files[number].file
        file.seek(0)
        try:
            return decode_image(file.read(), max_pixels=self._service.settings.max_image_pixels)
        except RegraftError as error:
            error.pointer = f"/images/{number}"
            raise


def _check_count(listed: object, most: int, pointer: str) -> None:
    if isinstance(listed, list) and len(listed) > most:
        raise BodyTooLarge(f"{len(listed)} queries; at most {most} in one request", pointer=pointer)


def _check_size(question: Question, most: int) -> None:
    if question.queries * question.k > most:
        legal = f"at most {most} matches in one response, so k can be {most // question.queries}"
        raise InvalidArgument(f"k is {question.k} for {question.queries} queries; {legal}", pointer="/k")


def _show(service: Runtime, answer: Answer) -> tuple[list[dict[str, Any]], bool]:
    """What the matches show, and whether every one of them is still as it was found."""
    found = answer.found
    routes = [(service.catalog.named(r.item_version).id, r.item_version, list(r.kinds)) for r in found.routes]
    with service.database.lookup() as connection:
        shown = describe(connection, np.unique(found.keys_QK[found.shards_QK >= 0]).tolist())
    results, complete = [], True
    for scores, keys, shards in zip(
        found.scores_QK.tolist(), found.keys_QK.tolist(), found.shards_QK.tolist(), strict=True
    ):
        matches = []
        for score, key, shard in zip(scores, keys, shards, strict=True):
            if shard < 0:
                break
            version_id, version, kinds = routes[shard]
            item = shown.get((key, version_id))
            if item is None:
                complete = False
                continue
            external_id, metadata, origin = item
            matches.append(
                {
                    "id": external_id,
                    "score": score,
                    "version": version,
                    "origin": origin,
                    "route": kinds,
                    "metadata": metadata,
                }
            )
        results.append({"matches": matches})
    return results, complete
