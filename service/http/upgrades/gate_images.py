"""The images of a gate's page: thumbnails of the flips in its report, made on request."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, false, select

from index.encoders.decoding import Decoder
from index.errors import InvalidImage
from service.store.image_store.blobs import Blobs, StoreUnreachable
from service.store.image_store.keys import is_text
from service.store.tables import evaluation, evaluation_entry, item

SIDE = 96
"""Most pixels of a thumbnail's longer side; 24 thumbnails are below half a megabyte."""
QUALITY = 80
"""The quality of the JPEG, 1 to 95."""


End = tuple[str, str]
"""An end of a flip, query or wrong, and its id: an item's, or an entry's number."""


def flip_blobs(connection: Connection, gallery_id: int, report: Mapping[str, Any]) -> dict[End, str]:
    """The blob keys of the images of a report's flips.

    Deleted items and entries, and those without an image, are left out.
    """
    from_set = [] if report["evaluation"] is None else ["query", "wrong"]
    if report.get("relevant_missing") is not None:  # entries of the set were queries over items
        from_set = ["query"]
    ends = {(end, flip[end]["id"]) for flip in report["flips"] for end in ("query", "wrong")}
    blobs: dict[bool, dict[str, str | None]] = {False: {}, True: {}}
    if items := {name for end, name in ends if end not in from_set}:
        live = (item.c.gallery_id == gallery_id, item.c.deleted == false(), item.c.external_id.in_(items))
        blobs[False] = dict(tuple(r) for r in connection.execute(select(item.c.external_id, item.c.blob).where(*live)))
    if numbers := {int(name) for end, name in ends if end in from_set}:
        condition = (evaluation.c.id == report["evaluation"], evaluation.c.gallery_id == gallery_id)
        entries = evaluation_entry.join(evaluation, evaluation.c.id == evaluation_entry.c.evaluation_id)
        chosen = select(evaluation_entry.c.number, evaluation_entry.c.blob).select_from(entries)
        rows = connection.execute(chosen.where(*condition, evaluation_entry.c.number.in_(numbers)))
        blobs[True] = {str(number): blob for number, blob in rows}
    found = {(end, name): blobs[end in from_set].get(name) for end, name in ends}
    return {end: blob for end, blob in found.items() if blob is not None and not is_text(blob)}


def thumbnails(blobs: Blobs, decoder: Decoder, keys: Mapping[End, str]) -> dict[End, str]:
    """Thumbnails of images as data URIs, by the same ends, without missing and unreadable ones."""
    made = {}
    for end, key in keys.items():
        try:
            made[end] = _thumbnail(decoder, blobs.read(key))
        except (OSError, InvalidImage):
            continue
        except StoreUnreachable:
            break
    return made


def _thumbnail(decoder: Decoder, image: bytes) -> str:
    written = io.BytesIO()
    with decoder.decoded(image) as decoded:
        decoded.thumbnail((SIDE, SIDE))
        decoded.convert("RGB").save(written, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"
