"""QUERY PATH over HTTP: read the queries, then in one hop to a thread encode, search and fetch what a match shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from index.errors import InvalidArgument
from index.found import Found
from index.gallery import Encode, check_k
from index.merge import Mode
from index.space import space_from_json
from index.text import MAX_CHARACTERS, check_text
from service.embedding import embed_images, embed_texts, pointing
from service.errors import BodyTooLarge, InvalidBody
from service.forms import FORM, JSON, Form, media_type, read_form
from service.replica import Answer
from service.repository import describe
from service.runtime import Runtime, Service
from service.schemas import Answered, check_embeddings, parse_json, take_object

router = APIRouter(tags=["query"])

DEFAULT_K = 10
FLAGS = ("strict", "explain")
ATTEMPTS = 3
"""How often a query is answered anew because items it found were deleted or replaced before they could be shown."""

MODE = {"type": "string", "enum": [mode.value for mode in Mode], "description": "default: the first that is possible"}

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
                        "mode": MODE,
                        "explain": {"type": "boolean", "default": False},
                    },
                }
            },
            JSON: {
                "schema": {
                    "type": "object",
                    "description": "either texts, or embeddings and version",
                    "properties": {
                        "texts": {"type": "array", "items": {"type": "string", "maxLength": MAX_CHARACTERS}},
                        "version": {"type": "string", "description": "which version made the embeddings"},
                        "embeddings": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
                        "k": {"type": "integer", "minimum": 1, "default": DEFAULT_K},
                        "strict": {"type": "boolean", "default": False},
                        "mode": MODE,
                        "explain": {"type": "boolean", "default": False},
                    },
                }
            },
        }
    }
}


Read = tuple[str | None, Encode, frozenset[str], int]
"""What tells one kind of query from another: version, encode, encoders and queries of a `Question`."""


@dataclass(frozen=True)
class Question:
    """A checked request: `version` None means the current one; `encode` embeds the queries by a version."""

    version: str | None
    encode: Encode
    encoders: frozenset[str]
    queries: int
    k: int
    strict: bool
    mode: str | None
    explain: bool


@router.post("/galleries/{name}/query", response_model=Answered, openapi_extra=QUERY_BODY)
async def query(name: str, request: Request, service: Service) -> Response:
    """The k best items for each query, over every version the gallery holds; `strict` refuses a degraded answer."""
    settings = service.settings
    if media_type(request, JSON, FORM) == JSON:
        raw = await request.body()
        return await service.hop(respond, service, name, lambda: by_json(service, raw))
    async with read_form(
        request,
        files="images",
        fields={"k", "strict", "mode", "explain"},
        max_files=settings.max_batch,
        max_field_bytes=1024,
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
        ModeUnavailable: the items cannot be ranked together in the mode asked for.
    """
    started = time.perf_counter()
    live = service.replica.find(name)
    question = read()
    service.replica.declare(live)
    check_k(question.k, sum(live.gallery.mix().values()))
    _check_size(question, service.settings.max_results)
    for _ in range(ATTEMPTS):
        found = live.search(
            question.version, question.encode, question.k, question.encoders, question.strict, question.mode
        )
        fetching = time.perf_counter()
        results, complete = _show(service, found)
        fetch_seconds = time.perf_counter() - fetching
        if complete:
            break
        service.replica.refresh(live.id)
    return {
        "version": found.version,
        "k": question.k,
        "mode": found.found.mode.value,
        "mix": found.found.mix,
        "degraded": [vars(degraded) for degraded in found.degraded],
        "results": results,
        **({"explain": explain(found.found, fetch_seconds)} if question.explain else {}),
        "took_ms": round((time.perf_counter() - started) * 1000, 3),
    }


def explain(found: Found, fetch_seconds: float) -> dict[str, Any]:
    """How an answer came about: for each shard its route, evidence, calibration and times, and where time went."""
    return {
        "shards": [
            {
                "version": shard.version,
                "origin": shard.origin,
                "items": shard.items,
                "route": [
                    {
                        "new": e.new,
                        "old": e.old,
                        "kind": e.kind.value,
                        "scores": {n: vars(s) for n, s in e.scores.items()},
                    }
                    for e in shard.route.edges
                ],
                "encoders": list(shard.route.encoders),
                "calibration": shard.calibration.as_json() if shard.calibration else None,
                "seconds": {"transform": shard.transform_seconds, "scan": shard.scan_seconds},
            }
            for shard in found.shards
        ],
        "seconds": {
            "encode": dict(found.encode_seconds),
            # Shards of one version share one transform.
            "transform": sum({shard.version: shard.transform_seconds for shard in found.shards}.values()),
            "scan": sum(shard.scan_seconds for shard in found.shards),
            "merge": found.merge_seconds,
            "fetch": fetch_seconds,
        },
    }


def by_json(service: Runtime, raw: bytes) -> Question:
    """A question in JSON: embeddings of a named version, or texts."""
    legal = {"k", "version", "embeddings", "texts", "strict", "mode", "explain"}
    body = take_object(parse_json(raw), legal, "")
    k, mode = body.get("k", DEFAULT_K), body.get("mode")
    if "texts" not in body and not isinstance(body.get("version"), str):
        raise InvalidBody("version must name the version that made the embeddings", pointer="/version")
    if not isinstance(k, int) or isinstance(k, bool):
        raise InvalidBody("k must be an integer", pointer="/k")
    flags = {name: body.get(name, False) for name in FLAGS}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidBody(f"{name} must be true or false", pointer=f"/{name}")
    _check_mode(mode)
    read = _read_texts if "texts" in body else _read_embeddings
    version, encode, encoders, queries = read(service, body)
    return Question(version, encode, encoders, queries, k, mode=mode, **flags)


def _read_embeddings(service: Runtime, body: dict[str, Any]) -> Read:
    """Embeddings: only the edges of the version that made them lead to other items."""
    registered = service.catalog.named(body["version"])
    _check_count(body.get("embeddings"), service.settings.max_batch, "/embeddings")
    space = space_from_json(registered.card.space)
    vectors = check_embeddings(body.get("embeddings"), registered.card.dim, space, "/embeddings")
    return registered.name, lambda _: vectors, frozenset(), len(vectors)


def _read_texts(service: Runtime, body: dict[str, Any]) -> Read:
    """Texts: embedded by the current version, and by older ones with a text entrance where a route needs them."""
    if other := sorted({"embeddings", "version"} & set(body)):
        why = "texts are embedded by the current version: send them without version and embeddings"
        raise InvalidBody(why, pointer=f"/{other[0]}")
    texts = body["texts"]
    _check_count(texts, service.settings.max_batch, "/texts")
    if not isinstance(texts, list) or not texts:
        raise InvalidBody("texts must be a list of at least one text", pointer="/texts")
    for number, text in enumerate(texts):
        with pointing(f"/texts/{number}"):
            check_text(text)
    return None, embed_texts(service.catalog, texts), service.catalog.text_encoders(), len(texts)


def by_images(service: Runtime, form: Form) -> Question:
    """A question in images: embedded by the gallery's current version, and by others where only `dual` leads on."""
    k, mode = form.fields.get("k", str(DEFAULT_K)), form.fields.get("mode")
    if not k.strip().isascii() or not k.strip().removeprefix("-").isdecimal():
        raise InvalidBody("k must be an integer", pointer="/k")
    flags = {name: form.fields.get(name, "false") for name in FLAGS}
    for name, value in flags.items():
        if value not in {"true", "false"}:
            raise InvalidBody(f"{name} must be true or false", pointer=f"/{name}")
    _check_mode(mode)
    if not form.files:
        raise InvalidBody("the form needs at least one file in the field 'images'", pointer="/images")
    encode = embed_images(service.catalog, form.files, service.settings.max_image_pixels)
    given = {name: value == "true" for name, value in flags.items()}
    return Question(None, encode, service.catalog.encoders(), len(form.files), int(k), mode=mode, **given)


def _check_mode(mode: object) -> None:
    if mode is not None and mode not in list(Mode):
        raise InvalidBody(f"mode must be one of {', '.join(Mode)}", pointer="/mode")


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
    shards = [(service.catalog.named(s.version).id, s.version, list(s.route.kinds)) for s in found.shards]
    with service.database.lookup() as connection:
        shown = describe(connection, np.unique(found.keys_QK[found.shards_QK >= 0]).tolist())
    results, complete = [], True
    ranked = (found.scores_QK, found.raw_QK, found.keys_QK, found.shards_QK)
    for row in zip(*(array_QK.tolist() for array_QK in ranked), strict=True):
        matches = []
        for score, raw_score, key, shard in zip(*row, strict=True):
            if shard < 0:
                break
            version_id, version, kinds = shards[shard]
            item = shown.get((key, version_id))
            if item is None:
                complete = False
                continue
            external_id, metadata, origin = item
            matches.append(
                {
                    "id": external_id,
                    "score": score,
                    "raw_score": raw_score,
                    "version": version,
                    "origin": origin,
                    "route": kinds,
                    "metadata": metadata,
                }
            )
        results.append({"matches": matches})
    return results, complete
