"""`Documents`: the documents of one gallery with vectors of one version, the common part of the frameworks' stores.

A document is stored as a text item with its own metadata, so that filters can test them and a backfill to a version
with a text entrance can move it. Otherwise the text is in a metadata field: in items imported from other databases, and
for blank texts, which cannot be embedded.

Shapes: N documents, D numbers of a vector.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from index.errors import InvalidArgument
from index.space import space_from_json
from regraft.client import Client, Problem, QueryOptions
from regraft.ingest_batch import TOO_LARGE, change_metadata
from regraft.integrations.conditions import anything
from regraft.models import EmbeddedItem, ItemInfo, Match

Vector = Sequence[float]
One = TypeVar("One")
WRITE_BATCH, READ_BATCH, PAGE = 500, 50, 1000
"""Documents per request: to write, to read by ids, and to list."""
MAX_ADDRESS_IDS = 6000
"""Characters of ids in one URL: proxies limit URLs to 8 KiB."""


class DegradedAnswer(UserWarning):
    """Some documents cannot be reached by queries of a version."""


class Documents:
    """A gallery as documents. With `create`, missing parts are created on first use.

    These are the gallery, the version (without an encoder, of dimension `dim` or that of the first vector), and, if the
    gallery has no current version, a deployment of this one. Another current version is kept: a newer version takes
    over by an edge and a deployment.

    Args:
        gallery: name of the gallery.
        version: the version of the vectors.
        client: a client of the service.
        text_key: the metadata field with the text of an item that is not a text.
        create: create missing parts.
        dim, space: of a version to create; `space` as in a card.
    """

    def __init__(
        self,
        gallery: str,
        version: str,
        client: Client,
        *,
        text_key: str,
        create: bool = True,
        dim: int | None = None,
        space: Mapping[str, Any] | None = None,
    ) -> None:
        self.gallery, self.version, self.client, self.text_key = gallery, version, client, text_key
        self._create, self._space = create, dict(space or {"kind": "cosine"})
        self._dim, self._prepared = dim, not create
        self._higher_is_better: dict[str, bool] = {}

    def prepare(self, dim: int | None = None) -> None:
        """Create missing parts; without a known `dim` the version is created later. Raises Problem."""
        if self._prepared:
            return
        if self.gallery not in {gallery.name for gallery in self.client.galleries()}:
            self._create_gallery()
        dim = self._dim or dim
        if self.version not in {version.name for version in self.client.versions()}:
            if dim is None:
                return
            self._register(dim)
        if self.client.gallery(self.gallery).current is None:
            self._deploy()
        self._prepared = True

    def put(self, ids: Sequence[str], texts: Sequence[str], about: Sequence[Mapping[str, Any]], vectors: Any) -> None:
        """Store N documents, replacing those with the same ids; of repeated ids the last. `vectors` is (N, D).

        Raises:
            InvalidArgument: `vectors` is not (N, D).
            Problem: the service refuses; each batch of 500 is stored completely or not at all, or each half of one that
                is too large for a request.
        """
        if not ids:
            return
        rows = np.asarray(vectors, np.float32)
        if rows.ndim != 2 or len(rows) != len(ids):
            raise InvalidArgument(
                f"{len(ids)} documents require as many vectors of one length, not an array {rows.shape}"
            )
        items = {}
        for key, text, metadata, row in zip(ids, texts, about, rows, strict=True):
            kept = (
                {"metadata": metadata, "text": text}
                if text.strip()
                else {"metadata": {**metadata, self.text_key: text}}
            )
            items[key] = {"id": key, "embedding": row, **kept}
        self.prepare(rows.shape[1])
        for batch in _batches(list(items.values()), WRITE_BATCH):
            self._store(batch)

    def search(self, vector: Vector, k: int, **options: Any) -> list[Match]:
        """The k documents nearest to a vector of the version; `options`: those of `QueryOptions`.

        Scores are the service's, higher is better; distances d are converted to 1 / (1 + d).

        Warns of documents that the query cannot reach (DegradedAnswer).

        Raises:
            Problem: the service refuses.
        """
        row = np.asarray(vector, np.float32)
        self.prepare(len(row))
        named = {name: value for name, value in options.items() if value is not None}
        asked = cast(QueryOptions, {**named, "with_text": True})
        found = self.client.query_embeddings(self.gallery, row[None], self.version, k, **asked)
        for missing in found.degraded:
            said = f"{missing.items} documents of {missing.version} were not searched by {self.version}"
            warnings.warn(DegradedAnswer(f"{said}: {missing.reason}"), stacklevel=2)
        result = found.results[0]
        if result.mode != "raw" or self.higher_is_better(self.version):
            return result.matches
        return [match.model_copy(update={"score": _similarity(match.score)}) for match in result.matches]

    def higher_is_better(self, version: str) -> bool:
        """Whether the scores of a version's space are similarities, not distances."""
        if version not in self._higher_is_better:
            space = space_from_json(dict(self.client.version(version).space))
            self._higher_is_better[version] = space.higher_is_better
        return self._higher_is_better[version]

    def relevance(self, match: Match, mode: str | None = None) -> float:
        """The relevance of a match, from 0 to 1, by its raw score: an upgrade may change the scale of `score`.

        `mode`: the one asked for, if any; for `calibrated` the relevance is the probability.
        """
        if mode == "calibrated":
            return match.score
        if not self.higher_is_better(match.version):
            return _similarity(match.raw_score)
        return min(1.0, max(0.0, (match.raw_score + 1.0) / 2.0))

    def filtered(self, condition: Mapping[str, Any] | None) -> Iterator[ItemInfo]:
        """All documents that pass a filter, page by page, including those that queries of the version cannot reach."""
        self.prepare()
        cursor: str | None = None
        while True:
            page = self.client.items(self.gallery, limit=PAGE, cursor=cursor, with_text=True, filter=condition or None)
            yield from page.items
            cursor = page.next
            if cursor is None:
                return

    def get(self, ids: Sequence[str]) -> dict[str, EmbeddedItem]:
        """Id -> item with its vectors, for existing ids."""
        self.prepare()
        batches = _addressable(dict.fromkeys(ids))
        pages = (self.client.embeddings(self.gallery, ids=one, limit=READ_BATCH, with_text=True) for one in batches)
        return {item.id: item for page in pages for item in page.items}

    def delete(self, ids: Sequence[str]) -> int:
        """Delete documents; unknown ids are ignored. Returns the number deleted."""
        self.prepare()
        return sum(self.client.delete_items(self.gallery, batch).deleted for batch in _batches(ids, WRITE_BATCH))

    def delete_matching(self, condition: Mapping[str, Any] | None) -> int:
        """Delete all documents that pass a filter (None: all). Returns the number deleted."""
        self.prepare()
        return self.client.delete_items(self.gallery, filter=condition or anything()).deleted

    def reembed(
        self,
        embed: Callable[[list[str]], Any],
        limit: int | None = None,
        read: Callable[[EmbeddedItem], str | None] | None = None,
        leave_out: Callable[[EmbeddedItem], bool] | None = None,
    ) -> int:
        """Embed the stored texts of documents that have no vector of this version, at most `limit`.

        A few thousand suffice to fit an edge from a newer version; all of them complete the move to it. Other vectors
        are kept, so a rollback loses nothing. A repeated call continues. `read`: item -> text, by default `text_of`;
        `leave_out`: whether an item is not to be embedded.

        Returns:
            The number of documents embedded.

        Raises:
            InvalidArgument: an item has no text.
        """
        self.prepare()
        done, cursor, more = 0, None, True
        while more and (limit is None or done < limit):
            size = WRITE_BATCH if limit is None else min(WRITE_BATCH, limit - done)
            page = self.client.missing_items(self.gallery, version=self.version, limit=size, cursor=cursor)
            cursor, more = page.next, page.next is not None
            wanted = [item for item in self.get(page.ids).values() if leave_out is None or not leave_out(item)]
            if not wanted:
                continue
            texts = self._texts(wanted, read or self.text_of)
            rows = np.asarray(embed(list(texts.values())), np.float32)
            items = [{"id": key, "embedding": row} for key, row in zip(texts, rows, strict=True)]
            self.client.put_embeddings(self.gallery, items, version=self.version, atomic=True)
            done += len(items)
        return done

    def count(self) -> int:
        """The number of documents."""
        self.prepare()
        return self.client.gallery(self.gallery).items

    def patch_metadata(self, patches: Mapping[str, Mapping[str, Any]]) -> int:
        """Apply JSON Merge Patches to the metadata of documents, by id. Returns how many still existed.

        Raises:
            InvalidArgument: a document's metadata would become too large.
        """
        updated = 0
        for batch in _batches([{"id": key, "metadata": patch} for key, patch in patches.items()], WRITE_BATCH):
            result = change_metadata(partial(self.client.update_metadata, self.gallery), batch)
            if refused := [error for error in result.errors if error.code != "unknown_item"]:
                raise InvalidArgument(f"{refused[0].id}: {refused[0].detail}")
            updated += result.updated
        return updated

    def _texts(self, items: Iterable[EmbeddedItem], read: Callable[[EmbeddedItem], str | None]) -> dict[str, str]:
        texts = {}
        for item in items:
            if (text := read(item)) is None:
                raise InvalidArgument(f"{item.id!r} is not a text, and its metadata has no field {self.text_key!r}")
            texts[item.id] = text
        return texts

    def text_of(self, item: Match | ItemInfo) -> str | None:
        """The text of a document; None: it has none."""
        if item.text is not None:
            return item.text
        return str(item.metadata[self.text_key]) if self.text_key in item.metadata else None

    def text_and_metadata(self, item: Match | ItemInfo) -> tuple[str, dict[str, Any]]:
        """The text of a document, and its metadata without the field of the text."""
        own = dict(item.metadata)
        if item.text is None:
            own.pop(self.text_key, None)
        return self.text_of(item) or "", own

    def max_marginal_relevance(self, matches: Sequence[Match], k: int, weight: float) -> list[Match]:
        """K of the matches by maximal marginal relevance: similar to the query, dissimilar to those chosen before.

        `weight` 1: only similarity to the query, 0: only dissimilarity. Two documents are compared by their vectors of
        a common version; without one their similarity is 0.
        """
        alike = self._similarities([match.id for match in matches])
        raw = [(match.raw_score, self.higher_is_better(match.version)) for match in matches]
        near = np.array([score if higher else _similarity(score) for score, higher in raw])
        chosen: list[int] = []
        while len(chosen) < min(k, len(matches)):
            redundant = alike[:, chosen].max(axis=1) if chosen else np.zeros(len(matches))
            worth = weight * near - (1 - weight) * redundant
            worth[chosen] = -np.inf
            chosen.append(int(worth.argmax()))
        return [matches[n] for n in chosen]

    def _similarities(self, ids: Sequence[str]) -> NDArray[np.float32]:
        """Cosine similarities (N, N)."""
        held = self.get(ids)
        vectors: dict[str, dict[int, Vector]] = {}
        for n, key in enumerate(ids):
            for one in held[key].embeddings if key in held else ():
                vectors.setdefault(one.version, {})[n] = one.embedding
        alike = np.zeros((len(ids), len(ids)), np.float32)
        for mine in vectors.values():
            rows = np.array(list(mine.values()), np.float32)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            alike[np.ix_(list(mine), list(mine))] = rows @ rows.T
        return alike

    def dim(self) -> int:
        """The dimension D. Raises Problem if it was not given and the version does not exist."""
        return self._dim or self.client.version(self.version).dim

    def _store(self, batch: Sequence[Mapping[str, Any]]) -> None:
        try:
            self.client.ingest_embeddings(self.gallery, batch, version=self.version, atomic=True, replace=True)
        except Problem as problem:
            if problem.status != TOO_LARGE or len(batch) == 1:
                raise
            for half in _batches(batch, (len(batch) + 1) // 2):
                self._store(half)

    def _create_gallery(self) -> None:
        try:
            self.client.create_gallery(self.gallery)
        except Problem as problem:
            if problem.code != "gallery_exists":  # another process has created it
                raise

    def _deploy(self) -> None:
        try:
            self.client.deploy(self.gallery, self.version, reason="the first version of its documents")
        except Problem as problem:
            # Another process has deployed, which this one's view of the gallery may not show yet.
            if problem.code != "already_current" and self.client.gallery(self.gallery).current is None:
                raise

    def _register(self, dim: int) -> None:
        from index.creation.supplied import Supplied
        from regraft.version import Version

        with tempfile.TemporaryDirectory() as scratch:
            self.client.register_version(
                Version.create(Path(scratch) / self.version, Supplied(dim, self._space)).folder
            )


def _similarity(distance: float) -> float:
    """Convert a distance to a similarity: 1 for equal vectors, 0 at infinity."""
    return 1.0 / (1.0 + distance)


def _addressable(ids: Iterable[str]) -> Iterator[list[str]]:
    """Split ids into batches that fit into a URL."""
    batch: list[str] = []
    length = 0
    for key in ids:
        long = len(quote(json.dumps(key)))
        if batch and (len(batch) == READ_BATCH or length + long > MAX_ADDRESS_IDS):
            yield batch
            batch, length = [], 0
        batch.append(key)
        length += long
    if batch:
        yield batch


def _batches(all_of_them: Sequence[One], size: int) -> Iterator[Sequence[One]]:
    return (all_of_them[at : at + size] for at in range(0, len(all_of_them), size))
