"""Texts as items, embedded by the current version's text entrance.

A text is stored unchanged, in UTF-8. Like an image, it replaces the content and embeddings of an existing item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from index.encoders.text import check_text
from index.errors import InvalidText, RegraftError
from service.errors import InvalidBody
from service.items.batch import IngestBatch, ItemDraft, read_batch
from service.items.transaction import Destination, Ingested, refuse_existing, store_contents
from service.registry.embedding import errors_at
from service.store.galleries.items import NewItem
from service.store.image_store.keys import TEXT


def are_texts(listed: object) -> bool:
    """Whether items in JSON are texts: at least one has a text, and none has an embedding."""
    if not isinstance(listed, list):
        return False
    fields = {name for entry in listed if isinstance(entry, dict) for name in ("text", "embedding") if name in entry}
    return fields == {"text"}


def ingest_texts(to: Destination, body: Mapping[str, Any]) -> Ingested:
    """Store texts, embedded by the current version as items.

    Raises:
        InvalidBody: a version is named, or there is no list of items.
        NoTextEntrance: the current version does not embed texts; names those that do.
        ItemsRefused: no item is valid, or the batch is atomic and one is invalid.
        CurrentChanged: another version is current by now.
    """
    if "version" in body:
        why = "version is only legal with embeddings: the current version embeds texts"
        raise InvalidBody(why, pointer="/version")
    to.service.registry.check_reads_texts(to.current, "/items/0/text")
    batch = read_batch(body.get("items"), "text", to.service.settings)
    refuse_existing(to, batch)
    items, contents = encode_texts(to, batch, batch.drafts)
    batch.settle(to.options.atomic)
    return store_contents(to, to.current, items, contents, repeat(TEXT), batch)


def read_text(value: object, max_bytes: int) -> bytes:
    """An item's text in UTF-8. Raises InvalidText at `/text` if it is not a text, or larger than `max_bytes`."""
    with errors_at("/text"):
        content = check_text(value, None).encode()
        if len(content) > max_bytes:
            raise InvalidText(f"the text has {len(content)} bytes in UTF-8; at most {max_bytes} are legal")
        return content


def encode_texts(
    to: Destination, batch: IngestBatch, drafts: Sequence[ItemDraft]
) -> tuple[list[tuple[ItemDraft, NewItem]], list[bytes]]:
    """Embed the valid texts in batches of the entrance; returns the items and the texts in UTF-8."""
    entrance, max_bytes = to.current.texts(), to.service.settings.max_text_bytes
    readable: list[tuple[ItemDraft, bytes, Any]] = []
    for draft in drafts:
        try:
            content = read_text(draft.content, max_bytes)
            with errors_at("/text"):
                readable.append((draft, content, entrance.encoder.prepare(draft.content, "item")))
        except RegraftError as error:
            batch.refuse(draft.index, draft.id, error)
    items: list[tuple[ItemDraft, NewItem]] = []
    for start in range(0, len(readable), entrance.encoder.batch):
        block = readable[start : start + entrance.encoder.batch]
        vectors = entrance.items(partial(list, (prepared for _, _, prepared in block)))
        items += [
            (draft, NewItem(draft.id, draft.metadata, "encoded", vector))
            for (draft, _, _), vector in zip(block, vectors, strict=True)
        ]
    return items, [content for _, content, _ in readable]
