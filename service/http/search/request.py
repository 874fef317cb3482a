"""A search request (`SearchRequest`): its checked options, and its queries as `QueryBatch`es, each embedded in one way.

A request may mix image files, embeddings, texts and ids of items. Results are in this order, each with the JSON pointer
of its query: /images/0, /embeddings/0, /texts/0, /items/0.

The options are those of `index.query.search_params.SearchParams`: a new one needs no change here.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import orjson
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from index.encoders.decoding import PixelBudget
from index.encoders.text import check_text
from index.errors import InvalidArgument
from index.query.query_plan import Encode
from index.query.search_params import SearchParams, foreign_cursor
from index.space import Vectors
from service.errors import BodyTooLarge, InvalidBody
from service.http.bodies.arrow import read_queries
from service.http.bodies.forms import Form
from service.http.bodies.npy import read_npy
from service.http.bodies.strict_json import parse_json
from service.http.requests.cursors import MAX_CURSOR
from service.http.search.similar import embed_items
from service.registry.embedding import embed_images, embed_texts, errors_at
from service.registry.image_losses import ImageLosses
from service.replica.loaded import LoadedGallery
from service.runtime import Runtime
from service.schemas import check_embeddings, take_object
from service.upgrades.trials.content import ImageContent, TextContent
from service.upgrades.trials.monitor import Content

OPTIONS = tuple(SearchParams.model_fields)
TEXTUAL = {"mode", "cursor"}
"""Options that are plain text in a form, not JSON."""
CACHED_OPTIONS = {"k", "mode", "strict", "exact", "explain"}
CACHED_TYPES = {int, str, bool}
"""Options of these types are validated once and cached, together with their types, by which 1 and true differ."""
FINGERPRINT_BYTES = 8
HASHED_BLOCK = 1 << 20
OUT_OF_RANGE = {"greater_than_equal", "less_than_equal"}
LISTS = ("texts", "items")
NAMED = ("version", *LISTS)
"""The fields whose values identify queries; embeddings and images are compared by their content."""
QUERIES = {*NAMED, "embeddings"}
LEGAL = {*OPTIONS, *QUERIES}
NO_ENCODERS: frozenset[str] = frozenset()
KINDS = ("images", "embeddings", *LISTS)
"""The kinds of queries, in the order of their results."""


class QueryBatch(NamedTuple):
    """Queries that are embedded in the same way.

    Attributes:
        pointers: the JSON pointer of each query in the request.
        version: the version that embeds them; None: the current one.
        encode: embeds them by a version.
        encoders: versions that can embed them, besides `version`.
        exclude_keys: for each query, the key of an item that it must not find; -1: none.
        stored: for queries that are items: key -> feed number of the write that was read.
        content: the queries' images or texts, if a trial may embed them by another version; None: it cannot.
        image_losses: collects losses of images in preprocessing; None: there are no images.
        vectors: embeddings that were sent (N, D); None: the queries are of another kind.
    """

    pointers: Sequence[str]
    version: str | None
    encode: Encode
    encoders: frozenset[str]
    exclude_keys: Sequence[int]
    stored: Mapping[int, int] = MappingProxyType({})
    content: Content | None = None
    image_losses: ImageLosses | None = None
    vectors: Vectors | None = None


class SearchRequest(NamedTuple):
    """A checked request.

    Attributes:
        parts: its queries.
        params: its options.
        offset: how many of the best matches earlier pages have shown.
        fingerprint: a hash of what must not change from page to page.
    """

    parts: Sequence[QueryBatch]
    params: SearchParams
    offset: int
    fingerprint: str

    @property
    def end(self) -> int:
        """How many of the best matches this page and earlier ones show."""
        return self.offset + self.params.k

    def cursor(self) -> str:
        """The cursor of the page after this one."""
        return base64.urlsafe_b64encode(orjson.dumps([self.end, self.fingerprint])).decode().rstrip("=")


def fields_of(raw: bytes) -> Mapping[str, Any]:
    """The fields of a search request in JSON."""
    return take_object(parse_json(raw), LEGAL, "")


def fields_of_npy(options: Mapping[str, str], raw: bytes) -> Mapping[str, Any]:
    """The fields of a request with an array of embeddings; `options` are texts: JSON, except the plain ones."""
    return {**_options(options), "embeddings": read_npy(raw, "/embeddings")}


def fields_of_arrow(options: Mapping[str, str], max_queries: int, raw: bytes) -> Mapping[str, Any]:
    """The fields of a request with a table of at most `max_queries` embeddings."""
    return {**_options(options), "embeddings": read_queries(raw, max_queries)}


def _options(texts: Mapping[str, str]) -> dict[str, Any]:
    textual = {*TEXTUAL, "version"}
    return {name: text if name in textual else _read_field(name, text) for name, text in texts.items()}


def from_fields(service: Runtime, loaded: LoadedGallery, body: Mapping[str, Any]) -> SearchRequest:
    """A search request without files: embeddings by a named version, texts, ids of items."""
    return _request_of(service, loaded, body, ())


def from_form(service: Runtime, loaded: LoadedGallery, form: Form) -> SearchRequest:
    """A search request with image files; other fields are JSON, but `mode` and `cursor` plain text."""
    body = {name: text if name in TEXTUAL else _read_field(name, text) for name, text in form.fields.items()}
    if not form.files:
        raise InvalidBody("the form must have at least one file in the field 'images'", pointer="/images")
    return _request_of(service, loaded, body, form.files)


def _request_of(
    service: Runtime, loaded: LoadedGallery, body: Mapping[str, Any], files: Sequence[UploadFile]
) -> SearchRequest:
    params, ranking = _params({name: value for name, value in body.items() if name not in QUERIES})
    parts = _parts(service, loaded, body, files)
    fingerprint = _fingerprint(loaded.id, ranking, body, parts, files)
    offset = 0 if params.cursor is None else _read_cursor(params.cursor, fingerprint)
    _check_size(sum([len(part.pointers) for part in parts]), offset, params.k, service.settings.max_results)
    return SearchRequest(parts, params, offset, fingerprint)


@lru_cache(maxsize=256)
def _validated_once(options: tuple[tuple[str, type, Any], ...]) -> tuple[SearchParams, str]:
    return _validated({name: value for name, _, value in options})


def _validated(options: Mapping[str, Any]) -> tuple[SearchParams, str]:
    params = SearchParams.model_validate(options)
    return params, params.ranking()


def _params(options: Mapping[str, Any]) -> tuple[SearchParams, str]:
    """The options, and those that decide the ranking as text."""
    try:
        types = tuple(map(type, options.values()))
        if options.keys() <= CACHED_OPTIONS and CACHED_TYPES.issuperset(types):
            return _validated_once(tuple(zip(options, types, options.values(), strict=True)))
        return _validated(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = first["loc"][0]
        kind = InvalidArgument if first["type"] in OUT_OF_RANGE else InvalidBody
        raise kind(f"{name}: {first['msg']}", pointer=f"/{name}") from error


def _parts(
    service: Runtime, loaded: LoadedGallery, body: Mapping[str, Any], files: Sequence[UploadFile]
) -> list[QueryBatch]:
    if "version" in body and "embeddings" not in body:
        raise InvalidBody("version is only legal with embeddings", pointer="/version")
    if not files and not any(name in body for name in ("embeddings", "texts", "items")):
        raise InvalidBody("the query is empty: give at least one of embeddings, texts and items, or images in a form")
    parts = [_images(service, files)] if files else []
    if "embeddings" in body:
        parts.append(_embeddings(service, body))
    if "texts" in body:
        parts.append(_texts(service, body["texts"]))
    if "items" in body:
        ids = _strings(service, body["items"], "items")
        parts += [QueryBatch(*similar) for similar in embed_items(service, loaded, ids)]
    return parts


def _images(service: Runtime, files: Sequence[UploadFile]) -> QueryBatch:
    """Images, embedded by the current version, and by others for shards that only `dual` or `slerp` reaches."""
    images, image_losses = [file.file for file in files], ImageLosses()
    content = ImageContent(service.registry, images, service.decoder)
    encode = embed_images(
        service.registry, images, service.decoder, image_losses, PixelBudget(service.settings.max_request_pixels)
    )
    pointers = _pointers("images", len(files))
    return QueryBatch(
        pointers, None, encode, content.encoders, [-1] * len(files), content=content, image_losses=image_losses
    )


def _embeddings(service: Runtime, body: Mapping[str, Any]) -> QueryBatch:
    """Embeddings, which reach items of other versions only by edges of their own version."""
    values, version = body.get("embeddings"), body.get("version")
    if not isinstance(version, str):
        raise InvalidBody("version must be the version of the embeddings", pointer="/version")
    registered = service.registry.named(version)
    _check_count(service, values, "/embeddings")
    vectors = check_embeddings(values, registered.card.dim, registered.space, "/embeddings", registered.name)
    pointers = _pointers("embeddings", len(vectors))
    return QueryBatch(pointers, registered.name, lambda _: vectors, NO_ENCODERS, [-1] * len(vectors), vectors=vectors)


def _texts(service: Runtime, values: object) -> QueryBatch:
    """Texts, embedded by the current version, and by others with a text entrance if a route needs them."""
    texts = _strings(service, values, "texts")
    for number, text in enumerate(texts):
        with errors_at(f"/texts/{number}"):
            check_text(text)
    encode = embed_texts(service.registry, texts)
    content = TextContent(service.registry, texts)
    return QueryBatch(
        _pointers("texts", len(texts)), None, encode, content.encoders, [-1] * len(texts), content=content
    )


def _strings(service: Runtime, values: object, name: str) -> list[str]:
    _check_count(service, values, f"/{name}")
    if not isinstance(values, list) or not values:
        raise InvalidBody(f"{name} must be a list of at least one string", pointer=f"/{name}")
    for number, value in enumerate(values):
        if not isinstance(value, str):
            raise InvalidBody(f"{name} must be strings", pointer=f"/{name}/{number}")
    return values


def _pointers(name: str, count: int) -> list[str]:
    return [f"/{name}/0"] if count == 1 else [f"/{name}/{number}" for number in range(count)]


def _read_field(name: str, text: str) -> Any:
    """The JSON value in a field of a form."""
    try:
        return parse_json(text.strip())
    except InvalidBody as error:
        raise InvalidBody(f'field {name} must be JSON, like 10, 0.5, true or ["a"]', pointer=f"/{name}") from error


def _read_cursor(cursor: str, made_for: str) -> int:
    """The offset in a cursor that `SearchRequest.cursor` made for the same request."""
    try:
        # A longer cursor was not made here, and might be nested too deeply to be parsed.
        text = cursor[:MAX_CURSOR]
        offset, fingerprint = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if isinstance(offset, int) and 0 < offset < 1 << 53 and fingerprint == made_for:
            return offset
    except (ValueError, TypeError):
        pass
    raise foreign_cursor()


def _fingerprint(
    gallery_id: int, ranking: str, body: Mapping[str, Any], parts: Sequence[QueryBatch], files: Sequence[UploadFile]
) -> str:
    """A hash of the gallery, the options that decide the ranking, and the queries as they were sent.

    Stored items by their ids: their embeddings may change from page to page, as those of the items that they find.
    """
    named = {name: body[name] for name in NAMED if name in body}
    digest = hashlib.blake2b(orjson.dumps([gallery_id, ranking, named]), digest_size=FINGERPRINT_BYTES)
    for part in parts:
        if part.vectors is not None:
            digest.update(part.vectors.data)
    for file in files:
        content = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
        file.file.seek(0)
        for block in iter(partial(file.file.read, HASHED_BLOCK), b""):
            content.update(block)
        file.file.seek(0)
        digest.update(content.digest())
    return digest.hexdigest()


def _check_count(service: Runtime, queries: object, pointer: str) -> None:
    limit = service.settings.max_batch
    if isinstance(queries, (list, np.ndarray)) and len(queries) > limit:
        raise BodyTooLarge(f"{len(queries)} queries; at most {limit} per request", pointer=pointer)


def _check_size(queries: int, offset: int, k: int, limit: int) -> None:
    if queries * (offset + k) > limit:
        legal = f"a response has at most {limit} matches, so k can be at most {max(limit // queries - offset, 0)}"
        raise InvalidArgument(f"k is {k} for {queries} queries at offset {offset}; {legal}", pointer="/k")
