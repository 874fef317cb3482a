"""A thin synchronous client: one method a route, answers as the models of `regraft.models` (docs/http-api.md).

with Client("http://127.0.0.1:8080") as client:
    client.create_gallery("shoes")
    client.register_version(Path("examples/v1"))
    client.deploy("shoes", "v1")
    client.ingest("shoes", [ImageItem("a", Path("a.png").read_bytes(), {"label": "boot"})])
    client.query("shoes", [Path("b.png").read_bytes()], k=1).results[0].matches[0].id
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from index.archive import pack_version
from regraft import given
from regraft.backfill_routes import BackfillRoutes
from regraft.connection import DEFAULT_URL, Json, Problem, TimedOut, UnexpectedAnswer, Unreachable
from regraft.edge_routes import EdgeRoutes
from regraft.given import InvalidInput, Vectors
from regraft.item_routes import ImageItem, ItemRoutes, TextItem
from regraft.models import (
    AuditPage,
    AuditRecord,
    GalleryInfo,
    GalleryList,
    Health,
    Readiness,
    SearchResponse,
    VersionInfo,
    VersionList,
)
from regraft.paths import change_params, delete_params, path_of
from regraft.upgrade_routes import UpgradeRoutes
from regraft.work_routes import WorkRoutes

__all__ = [
    "DEFAULT_URL",
    "Client",
    "ImageItem",
    "InvalidInput",
    "Json",
    "Problem",
    "QueryOptions",
    "TextItem",
    "TimedOut",
    "UnexpectedAnswer",
    "Unreachable",
]


DEFAULT_K = 10
NPY = "application/x-npy"
MAX_PARAMS = 4096
"""Characters of options that travel in an address; longer filters travel in a body."""


class QueryOptions(TypedDict, total=False):
    """Options of a query besides `k`, those of `index.search_params`.

    strict: refuse an answer that leaves out items. mode: calibrated, raw or rank, by default what was measured, else a
    rule. threshold: the worst score of a match, on the scale of the mode. filter: only items whose metadata pass it,
    such as {"field": "city", "eq": "Bern"}. cursor: `next` of the answer to the same query. fields: the metadata that
    matches show, such as ["city", "shop.name"]; []: none. with_text: show the texts that matches are. exact: compare
    every item. recall: the aim of an approximate index, by default the gallery's. explain: add how the answer came
    about.
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


class Client(ItemRoutes, UpgradeRoutes, EdgeRoutes, BackfillRoutes, WorkRoutes):
    """Speaks to one service: the routes named here, and those of its bases. See `Connection` for errors and threads.

    Items and queries are checked before they are sent: InvalidInput says what is wrong with them, and what to give.
    """

    # health

    def health(self) -> Health:
        """GET /v1/health: the process answers."""
        return self._ask(Health, "GET", "health")

    def ready(self) -> Readiness:
        """GET /v1/health/ready: `status` is ready or degraded; `problems` lists what is damaged and not used."""
        return self._ask(Readiness, "GET", "health/ready")

    def audit(self, *, limit: int = 100, before: int | None = None) -> list[AuditRecord]:
        """GET /v1/audit: who changed what, newest first; `before` is the id of the last row seen."""
        params = {"limit": limit} if before is None else {"limit": limit, "before": before}
        return self._ask(AuditPage, "GET", "audit", params=params).audit

    # galleries

    def create_gallery(self, name: str, *, index: Mapping[str, Any] | None = None) -> GalleryInfo:
        """POST /v1/galleries; `index`: the fields of `IndexConfig` that are not to be the default."""
        return self._ask(GalleryInfo, "POST", "galleries", json={"name": name, "index": dict(index or {})})

    def change_gallery(self, name: str, *, index: Mapping[str, Any], dry_run: bool = False) -> GalleryInfo:
        """PATCH /v1/galleries/{gallery}: index it otherwise from now on, while it serves."""
        body = {"index": dict(index)}
        return self._ask(GalleryInfo, "PATCH", path_of("galleries", name), json=body, params=change_params(dry_run))

    def galleries(self) -> list[GalleryInfo]:
        """GET /v1/galleries."""
        return self._ask(GalleryList, "GET", "galleries").galleries

    def gallery(self, name: str) -> GalleryInfo:
        """GET /v1/galleries/{gallery}: current version, number of items, and how many each version holds."""
        return self._ask(GalleryInfo, "GET", path_of("galleries", name))

    def delete_gallery(self, name: str, *, dry_run: bool = False) -> None:
        """DELETE /v1/galleries/{gallery}, with everything in it."""
        self._send("DELETE", path_of("galleries", name), params=delete_params(name, dry_run))

    # versions

    def register_version(self, folder: Path, *, dry_run: bool = False) -> VersionInfo:
        """POST /v1/versions: a version folder, packed here, or a .zip of one; `dry_run` only verifies it there."""
        with tempfile.TemporaryDirectory() as scratch:
            archive = folder
            if folder.is_dir():
                archive = Path(scratch) / "version.zip"
                pack_version(folder, archive)
            with archive.open("rb") as stream:
                files = {"archive": (archive.name, stream, "application/zip")}
                return self._ask(VersionInfo, "POST", "versions", params=change_params(dry_run), files=files)

    def versions(self) -> list[VersionInfo]:
        """GET /v1/versions."""
        return self._ask(VersionList, "GET", "versions").versions

    def version(self, name: str) -> VersionInfo:
        """GET /v1/versions/{version}."""
        return self._ask(VersionInfo, "GET", path_of("versions", name))

    def delete_version(self, name: str, *, dry_run: bool = False) -> None:
        """DELETE /v1/versions/{version}, which nothing uses any more, with the edges from it."""
        self._send("DELETE", path_of("versions", name), params=delete_params(name, dry_run))

    # queries

    def query(
        self,
        gallery: str,
        images: Sequence[bytes] = (),
        k: int = DEFAULT_K,
        *,
        texts: Sequence[str] = (),
        items: Sequence[str] = (),
        **options: Unpack[QueryOptions],
    ) -> SearchResponse:
        """POST /v1/galleries/{gallery}/query with image files, texts and ids of stored items ("more like these").

        There is one result a query: first those of images, then of texts, then of items.
        """
        pictures = given.images(images)
        lists = {name: given.names(asked, name) for name, asked in (("texts", texts), ("items", items))}
        given.queries(images=pictures, **lists)
        lists = {name: asked for name, asked in lists.items() if asked}
        path = path_of("galleries", gallery, "query")
        if not pictures:
            return self._ask(SearchResponse, "POST", path, quick=True, json={**lists, "k": k, **options})
        files = [("images", (str(n), picture, "application/octet-stream")) for n, picture in enumerate(pictures)]
        fields: Json = {**lists, "k": k, **options}
        data = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
        return self._ask(SearchResponse, "POST", path, quick=True, data=data, files=files)

    def query_embeddings(
        self,
        gallery: str,
        embeddings: Vectors,
        version: str,
        k: int = DEFAULT_K,
        **options: Unpack[QueryOptions],
    ) -> SearchResponse:
        """POST /v1/galleries/{gallery}/query with embeddings (Q, D) that `version` made, lists or an array.

        The rest as in `query`. A numpy array of floats travels as it is.
        """
        path = path_of("galleries", gallery, "query")
        asked: Json = {"version": version, "k": k, **options}
        params = {name: value if isinstance(value, str) else json.dumps(value) for name, value in asked.items()}
        short = sum(map(len, params.values())) <= MAX_PARAMS
        if short and (array := given.npy(embeddings)) is not None:
            return self._ask(
                SearchResponse, "POST", path, quick=True, params=params, content=array, headers={"content-type": NPY}
            )
        rows = given.vectors(embeddings)
        given.queries(embeddings=rows)
        body = {"embeddings": rows, "version": version, "k": k, **options}
        return self._ask(SearchResponse, "POST", path, quick=True, json=body)
