"""Images as items, with texts beside them, embedded by the gallery's current version."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import BinaryIO

from index.encoders.decoding import PixelBudget
from index.encoders.encoder import BATCH
from index.encoders.image import Pixels
from index.errors import RegraftError, TooManyPixels
from service.items.batch import IngestBatch, ItemDraft
from service.items.texts import encode_texts
from service.items.transaction import Destination, Ingested, refuse_existing, store_contents
from service.registry.embedding import errors_at, read_pixels
from service.store.galleries.items import NewItem
from service.store.image_store.keys import TEXT


def ingest_images(to: Destination, batch: IngestBatch, files: Mapping[str, BinaryIO]) -> Ingested:
    """Store the items of `batch` that name one of the `files`, or have a text.

    Raises:
        NoEncoder, NoTextEntrance: the current version does not embed images, or texts.
        ItemsRefused: no item is valid, or the batch is atomic and one is invalid.
        TooManyPixels: the images have too many in total; names the first that was not decoded.
        CurrentChanged: another version is current by now.
    """
    refuse_existing(to, batch)
    images = _encode_images(to, batch, files)
    texts, text_contents = _encode_texts(to, batch)
    batch.settle(to.options.atomic)
    contents = chain((_read(files[draft.content]) for draft, _ in images), text_contents)
    kinds = chain(repeat("", len(images)), repeat(TEXT))
    return store_contents(to, to.current, [*images, *texts], contents, kinds, batch)


def _encode_images(
    to: Destination, batch: IngestBatch, files: Mapping[str, BinaryIO]
) -> list[tuple[ItemDraft, NewItem]]:
    """Decode and embed images in blocks, so that memory holds only one block of encoder inputs."""
    images = [draft for draft in batch.drafts if draft.text is None]
    budget = PixelBudget(to.service.settings.max_request_pixels)
    blocks = (images[start : start + BATCH] for start in range(0, len(images), BATCH))
    return [item for block in blocks for item in _encode_block(to, batch, block, files, budget)]


def _encode_block(
    to: Destination,
    batch: IngestBatch,
    block: Sequence[ItemDraft],
    files: Mapping[str, BinaryIO],
    budget: PixelBudget,
) -> list[tuple[ItemDraft, NewItem]]:
    images = to.current.images()
    spec = images.encoder.spec
    readable: list[tuple[ItemDraft, Pixels]] = []
    for draft in block:
        try:
            with errors_at("/image"):
                note = functools.partial(batch.image_losses.note, to.current.name, spec, f"/items/{draft.index}/image")
                readable.append((draft, read_pixels(files[draft.content], spec, to.service.decoder, note, budget)))
        except TooManyPixels as error:
            error.pointer = f"/items/{draft.index}/image"
            raise
        except RegraftError as error:
            batch.refuse(draft.index, draft.id, error)
    if not readable:
        return []
    rows = images.items(lambda: [pixels for _, pixels in readable])
    return [
        (draft, NewItem(draft.id, draft.metadata, "encoded", vector, side))
        for (draft, _), (vector, side) in zip(readable, rows, strict=True)
    ]


def _encode_texts(to: Destination, batch: IngestBatch) -> tuple[list[tuple[ItemDraft, NewItem]], list[bytes]]:
    """Embed the items that are texts; returns the items and their texts."""
    drafts = [replace(draft, content=draft.text) for draft in batch.drafts if draft.text is not None]
    if not drafts:
        return [], []
    to.service.registry.check_reads_texts(to.current, f"/items/{drafts[0].index}/text")
    return encode_texts(to, batch, drafts)


def _read(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()
