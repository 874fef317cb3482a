"""Client methods for items and their embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regraft import inputs
from regraft.connection import Connection, Json, UnexpectedAnswer
from regraft.inputs import NPY, ArrowTable, InvalidInput
from regraft.models import DeleteResult, EmbeddingPage, IngestResult, ItemDetail, ItemPage, MetadataResult, MissingPage
from regraft.paths import MAX_PARAMS, change_params, flag, path_of
from regraft.routes.route import route

ARROW = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True)
class ImageItem:
    """An item to store: its id, the content of an image file, and metadata (any JSON object).

    `metadata` None: an existing item keeps its metadata.
    """

    id: str
    image: bytes
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TextItem:
    """An item to store: its id, its text, and metadata as in `ImageItem`."""

    id: str
    text: str
    metadata: Mapping[str, Any] | None = None


class ItemRoutes(Connection):
    """Methods of both clients."""

    @route
    async def ingest(
        self, gallery: str, items: Sequence[ImageItem | TextItem], *, atomic: bool = False, replace: bool | None = None
    ) -> IngestResult:
        """POST /v1/galleries/{gallery}/items with image files and texts.

        Items that could not be stored are listed in `errors` by index; with `atomic` an invalid item refuses all. An
        image replaces the content of an existing item with its id; with `replace` also its metadata; with
        `replace=False` an existing id is an error.
        """
        given = inputs.several(items)
        described, images = [_described(item, n) for n, item in enumerate(given)], []
        for n, i in enumerate(given):
            if isinstance(i, ImageItem):
                file = inputs.image(i.image, f"items[{n}].image")
                images.append(("images", (str(n), file, "application/octet-stream")))
        body: Json = {"data": {"items": inputs.as_json(described)}, "files": images}
        if not images:  # a form needs a file; an empty batch is sent, so that the service refuses it
            body = {"json": {"items": described}}
        return await self._ask(
            IngestResult, "POST", path_of("galleries", gallery, "items"), params=_ingest_params(atomic, replace), **body
        )

    @route
    async def ingest_texts(
        self, gallery: str, items: Sequence[TextItem], *, atomic: bool = False, replace: bool | None = None
    ) -> IngestResult:
        """POST /v1/galleries/{gallery}/items with texts, embedded by the current version; otherwise as `ingest`."""
        described = [_described(item, n) for n, item in enumerate(inputs.several(items))]
        path = path_of("galleries", gallery, "items")
        return await self._ask(
            IngestResult, "POST", path, params=_ingest_params(atomic, replace), json={"items": described}
        )

    @route
    async def ingest_embeddings(
        self,
        gallery: str,
        items: Sequence[Mapping[str, Any]] | ArrowTable,
        *,
        version: str | None = None,
        atomic: bool = False,
        replace: bool | None = None,
        origin: str | None = None,
    ) -> IngestResult:
        """POST /v1/galleries/{gallery}/items with embeddings: {id, metadata, embedding, text} each.

        `text`, optional: the embedded text; it is stored with the item, so that later versions can embed it.

        `version`: of the embeddings, by default the current one. An embedding is added to those of other versions that
        an existing item has; with `replace` it replaces everything; with `replace=False` an existing id is an error.
        Embeddings that are NumPy arrays of floats, all of one type, are sent as one array, several times as fast. A
        pyarrow table with the columns `id` and `embedding` (fixed-size lists) is sent unchanged; its other columns are
        metadata. `origin="transformed"`: a forward edge produced them, in another gallery.
        """
        params = _ingest_params(atomic, replace, origin)
        sent = _embedded(items, version, params)
        return await self._ask(IngestResult, "POST", path_of("galleries", gallery, "items"), params=params, **sent)

    @route
    async def put_embeddings(
        self,
        gallery: str,
        items: Sequence[Mapping[str, Any]] | ArrowTable,
        *,
        version: str | None = None,
        atomic: bool = False,
        origin: str | None = None,
    ) -> IngestResult:
        """PUT /v1/galleries/{gallery}/items:embeddings: {id, embedding} each, of `version`, for existing items.

        Unknown ids are listed in `errors`; with `atomic` they refuse all. Otherwise as `ingest_embeddings`, but nothing
        else of an item changes.
        """
        params = _ingest_params(atomic, None, origin)
        sent = _embedded(items, version, params)
        return await self._ask(
            IngestResult, "PUT", path_of("galleries", gallery, "items:embeddings"), params=params, **sent
        )

    @route
    async def embeddings(
        self,
        gallery: str,
        *,
        versions: Sequence[str] = (),
        ids: Sequence[str] | None = None,
        limit: int = 100,
        cursor: str | None = None,
        with_text: bool = False,
    ) -> EmbeddingPage:
        """GET /v1/galleries/{gallery}/items:embeddings: a page of items with their vectors; default: all versions.

        `ids`: only these items, without unknown ids; they are sent in the URL, so at most some dozens at a time.
        """
        params = _page_params(limit, cursor, with_text) | {"versions": ",".join(versions)}
        params |= {} if ids is None else {"ids": inputs.as_json(inputs.strings(ids, "ids"))}
        return await self._ask(EmbeddingPage, "GET", path_of("galleries", gallery, "items:embeddings"), params=params)

    @route
    async def embeddings_table(
        self,
        gallery: str,
        *,
        versions: Sequence[str] = (),
        limit: int = 1000,
        cursor: str | None = None,
        with_text: bool = False,
    ) -> bytes:
        """The same as a table in Arrow's stream format; `next` and `damaged` are in the metadata of its schema."""
        params = _page_params(limit, cursor, with_text) | {"versions": ",".join(versions)}
        path = path_of("galleries", gallery, "items:embeddings")
        return (await self._send("GET", path, params=params, headers={"accept": ARROW})).content

    @route
    async def missing_items(
        self, gallery: str, *, version: str, limit: int = 1000, cursor: str | None = None
    ) -> MissingPage:
        """GET /v1/galleries/{gallery}/items:missing: a page of ids of items without an embedding made by `version`."""
        asked = {"limit": str(limit), "version": version, **({"cursor": cursor} if cursor else {})}
        return await self._ask(MissingPage, "GET", path_of("galleries", gallery, "items:missing"), params=asked)

    @route
    async def items(
        self,
        gallery: str,
        *,
        limit: int = 100,
        cursor: str | None = None,
        with_text: bool = False,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - the parameter's name
    ) -> ItemPage:
        """GET /v1/galleries/{gallery}/items: one page; pass `next` as `cursor` for the next one, None is the end.

        `filter`: only items whose metadata pass it. A page may then have fewer than `limit` items, or none, before the
        end. A long filter is sent in a body, by POST /v1/galleries/{gallery}/items:list.
        """
        params = _page_params(limit, cursor, with_text) | ({} if filter is None else {"filter": inputs.as_json(filter)})
        if len(params.get("filter", "")) <= MAX_PARAMS:
            return await self._ask(ItemPage, "GET", path_of("galleries", gallery, "items"), params=params)
        body = {"filter": filter, "limit": limit, "cursor": cursor or "", "with_text": with_text}
        return await self._ask(ItemPage, "POST", path_of("galleries", gallery, "items:list"), quick=True, json=body)

    @route
    async def item(self, gallery: str, item: str) -> ItemDetail:
        """GET /v1/galleries/{gallery}/items/{item}: metadata, text, active version, embeddings without vectors.

        Raises:
            UnexpectedAnswer: it shows another item, as a proxy that merges slashes reads `a/b` instead of `a//b`.
        """
        shown = await self._ask(ItemDetail, "GET", path_of("galleries", gallery, "items", item))
        if shown.id != str(item):
            why = f"item {str(item)!r} was asked for, and the answer shows {shown.id!r}: a proxy changes the path"
            raise UnexpectedAnswer(why)
        return shown

    @route
    async def item_image(self, gallery: str, item: str) -> bytes:
        """GET /v1/galleries/{gallery}/items/{item}/image: the ingested bytes; `confirm`, as `delete_item`."""
        path = path_of("galleries", gallery, "items", item, "image")
        return (await self._send("GET", path, params={"confirm": item})).content

    @route
    async def update_metadata(
        self,
        gallery: str,
        items: Sequence[Mapping[str, Any]] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - the field's name
        metadata: Mapping[str, Any] | None = None,
        atomic: bool = False,
        dry_run: bool = False,
    ) -> MetadataResult:
        """PATCH /v1/galleries/{gallery}/items: {id, metadata} each, or `metadata` for all items that pass `filter`.

        JSON Merge Patch (RFC 7396): null removes a field, an object changes fields within; everything else is kept.
        Items that cannot be changed are listed in `errors`; with `atomic` one of them refuses all. Many items that pass
        a filter are changed in several transactions: without an answer, repeat the call.
        """
        body: Json = {} if items is None else {"items": inputs.patches(items, "items")}
        body |= {} if filter is None else {"filter": filter}
        body |= {} if metadata is None else {"metadata": inputs.metadata(metadata, "metadata")}
        params = {"atomic": flag(atomic), **change_params(dry_run)}
        path = path_of("galleries", gallery, "items")
        return await self._ask(MetadataResult, "PATCH", path, params=params, json=body)

    @route
    async def delete_item(self, gallery: str, item: str) -> None:
        """DELETE /v1/galleries/{gallery}/items/{item}; `confirm`, in case a proxy changes the path."""
        await self._delete(path_of("galleries", gallery, "items", item), params={"confirm": item})

    @route
    async def delete_items(
        self,
        gallery: str,
        items: Sequence[str] | None = None,
        *,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - the field's name
        dry_run: bool = False,
    ) -> DeleteResult:
        """POST /v1/galleries/{gallery}/items:delete: the items with these ids, or whose metadata pass `filter`.

        Many items that pass a filter are deleted in several transactions: without an answer, repeat the call.
        """
        body: Json = {} if items is None else {"ids": inputs.strings(items, "items")}
        body |= {} if filter is None else {"filter": filter}
        path = path_of("galleries", gallery, "items:delete")
        return await self._ask(DeleteResult, "POST", path, params=change_params(dry_run), json=body)


def _described(item: ImageItem | TextItem, number: int) -> Json:
    """An item as JSON; an image is referred to by its number, the name of its file in the form."""
    if not isinstance(item, ImageItem | TextItem):
        raise InvalidInput(f"items[{number}] must be an ImageItem or a TextItem, not {type(item).__name__}")
    described: Json = {"id": item.id}
    if isinstance(item, TextItem):
        described["text"] = inputs.strings([item.text], f"items[{number}].text")[0]
    else:
        described["image"] = str(number)
    if item.metadata is not None:
        described["metadata"] = inputs.metadata(item.metadata, f"items[{number}].metadata")
    return described


def _page_params(limit: int, cursor: str | None, with_text: bool) -> dict[str, str]:
    """The URL parameters of a page of items."""
    asked = {"limit": str(limit), **({"cursor": cursor} if cursor else {})}
    return asked | ({"with_text": flag(True)} if with_text else {})


def _ingest_params(atomic: bool, replace: bool | None, origin: str | None = None) -> dict[str, str]:
    """The URL parameters of an ingest."""
    more = {} if origin is None else {"origin": origin}
    return {"atomic": flag(atomic), **({} if replace is None else {"replace": flag(replace)}), **more}


def _embedded(items: Sequence[Mapping[str, Any]] | ArrowTable, version: str | None, params: dict[str, str]) -> Json:
    """The body of an ingest of embeddings: a table, an array and items, or JSON; adds a table's version to `params`."""
    if isinstance(items, ArrowTable):
        if version is not None:
            params["version"] = version
        return {"content": inputs.arrow_stream(items), "headers": {"content-type": ARROW}}
    given = inputs.several(items)
    if (array := inputs.stacked_embeddings(given)) is not None:
        described = [{name: value for name, value in item.items() if name != "embedding"} for item in given]
        for n, item in enumerate(described):
            if item.get("metadata") is not None:
                item["metadata"] = inputs.metadata(item["metadata"], f"items[{n}].metadata")
        data = {"items": inputs.as_json(described), **({} if version is None else {"version": version})}
        return {"data": data, "files": [("embeddings", ("embeddings.npy", array, NPY))]}
    return {"json": {"items": inputs.embedded_items(given), **({} if version is None else {"version": version})}}
