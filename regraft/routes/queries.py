"""Client methods for queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack
from urllib.parse import quote

from regraft import inputs
from regraft.connection import Connection, Json, is_header_value
from regraft.inputs import NPY, Vectors
from regraft.models import SearchResponse
from regraft.paths import MAX_PARAMS, path_of
from regraft.routes.route import route

DEFAULT_K = 10


class QueryOptions(TypedDict, total=False):
    """Options of a query besides `k`, see `index.query.search_params`.

    strict: refuse an answer that leaves out items. mode: calibrated, raw or rank; by default the measured one, else one
    by the edges. threshold: the worst score of a match, on the scale of the mode. filter: only items whose metadata
    pass it, such as {"field": "city", "eq": "Bern"}. cursor: `next` of the answer to the same query. fields: the
    metadata fields of matches, such as ["city", "shop.name"]; []: none. with_text: return the texts of matches. exact:
    compare every item. recall: the recall aim of approximate indexes, by default the gallery's. explain: add a trace.
    """

    strict: bool
    mode: str
    threshold: float
    filter: Mapping[str, Any]
    cursor: str
    fields: Sequence[str]
    with_text: bool
    exact: bool
    recall: float
    explain: bool


class QueryRoutes(Connection):
    """Methods of both clients."""

    @route
    async def query(
        self,
        gallery: str,
        images: Sequence[bytes] = (),
        k: int = DEFAULT_K,
        *,
        texts: Sequence[str] = (),
        items: Sequence[str] = (),
        query_key: str | None = None,
        **options: Unpack[QueryOptions],
    ) -> SearchResponse:
        """POST /v1/galleries/{gallery}/query with image files, texts and ids of stored items ("more like these").

        Returns one result per query: images first, then texts, then items. `query_key`: queries with the same key, such
        as a user's id, are answered by the same version during a canary; any text.
        """
        pictures = inputs.images(images)
        lists = {name: inputs.strings(asked, name) for name, asked in (("texts", texts), ("items", items))}
        inputs.check_not_empty(images=pictures, **lists)
        lists = {name: asked for name, asked in lists.items() if asked}
        path = path_of("galleries", gallery, "query")
        headers = {} if query_key is None else {"X-Query-Key": _header_of(query_key)}
        fields: Json = {**lists, "k": k, **options}
        if not pictures:
            return await self._ask(SearchResponse, "POST", path, quick=True, headers=headers, json=fields)
        files = [("images", (str(n), picture, "application/octet-stream")) for n, picture in enumerate(pictures)]
        data = {name: value if isinstance(value, str) else inputs.as_json(value) for name, value in fields.items()}
        return await self._ask(SearchResponse, "POST", path, quick=True, headers=headers, data=data, files=files)

    @route
    async def query_embeddings(
        self,
        gallery: str,
        embeddings: Vectors,
        version: str,
        k: int = DEFAULT_K,
        **options: Unpack[QueryOptions],
    ) -> SearchResponse:
        """POST /v1/galleries/{gallery}/query with embeddings (Q, D) of `version`, lists or an array.

        Otherwise as `query`. A NumPy array of floats is sent in binary.
        """
        path = path_of("galleries", gallery, "query")
        asked: Json = {"version": version, "k": k, **options}
        params = {name: value if isinstance(value, str) else inputs.as_json(value) for name, value in asked.items()}
        short = sum(map(len, params.values())) <= MAX_PARAMS
        if short and (array := inputs.npy(embeddings)) is not None:
            return await self._ask(
                SearchResponse, "POST", path, quick=True, params=params, content=array, headers={"content-type": NPY}
            )
        rows = inputs.vectors(embeddings)
        inputs.check_not_empty(embeddings=rows)
        body = {"embeddings": rows, "version": version, "k": k, **options}
        return await self._ask(SearchResponse, "POST", path, quick=True, json=body)


def _header_of(key: str) -> str:
    """A header that stands for this key: percent-encoded where no header can hold the key itself."""
    return key if is_header_value(key) else quote(key, safe="", errors="surrogatepass")
