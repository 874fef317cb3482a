"""The bodies of evaluation sets: images in a form, texts or embeddings in JSON, each entry checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from index.encoders.decoding import PixelBudget
from index.errors import RegraftError
from index.item_id import is_item_id
from index.space import Vectors, space_from_json
from service.errors import BodyTooLarge, InvalidBody
from service.http.bodies.forms import NO_SUCH_FILE, Form
from service.http.bodies.schemas import EMBEDDING, FILE, FILE_NAME, fields, many, reads
from service.http.bodies.strict_json import parse_json
from service.items.stored_json import storage_problem
from service.items.texts import read_text
from service.registry.embedding import errors_at
from service.runtime import Runtime
from service.schemas import ID, check_embeddings, take_object
from service.settings import Settings

MAX_NAME = 128
MAX_RELEVANT = 1_000
"""Most relevant items of an entry."""

LABEL: dict[str, Any] = {"description": "any JSON value; entries with equal labels belong together"}
RELEVANT = {**many(ID), "maxItems": MAX_RELEVANT, "description": "ids of the relevant items of the gallery"}
ENTRY = {"label": LABEL, "metadata": {"type": "object"}, "relevant": RELEVANT}
TEXT = {"type": "string", "minLength": 1, "description": "the text of the entry, if the set has no embeddings"}
SET_NAME = {
    "type": "string",
    "maxLength": MAX_NAME,
    "pattern": r"^[^\x00-\x1f\x7f-\x9f]*$",
    "description": "printable characters",
}
EVALUATION_BODY = reads(
    form=fields(
        {
            "name": SET_NAME,
            "entries": many(fields({**ENTRY, "image": FILE_NAME}, required=("image",)), least=2),
            "images": many(FILE),
        },
        required=("entries", "images"),
    ),
    json=fields(
        {
            "name": SET_NAME,
            "entries": many(fields({**ENTRY, "text": TEXT}), least=2),
            "embeddings": {
                "type": "object",
                "description": "version name -> one embedding for each entry",
                "minProperties": 1,
                "additionalProperties": many(EMBEDDING, least=2),
            },
        },
        required=("entries",),
    ),
)


@dataclass(frozen=True)
class EvaluationDraft:
    """A checked evaluation set: its kind and entries, with their images or texts (`contents`), or embeddings."""

    name: str
    kind: str
    entries: Sequence[Mapping[str, Any]]
    contents: Sequence[bytes] = ()
    embeddings: Mapping[str, Vectors] = field(default_factory=dict)


def by_images(service: Runtime, form: Form) -> EvaluationDraft:
    """Read a set of images from a form. Raises InvalidBody, BodyTooLarge, InvalidImage or TooManyPixels."""
    if "entries" not in form.fields:
        raise InvalidBody("the form must have the field 'entries', a JSON list", pointer="/entries")
    entries = _entries(parse_json(form.fields["entries"], "/entries"), {*ENTRY, "image"}, service.settings)
    files, images, budget = form.files_by_name(), dict[str, bytes](), PixelBudget(service.settings.max_request_pixels)
    for number, entry in enumerate(entries):
        name = entry.get("image")
        if not isinstance(name, str) or name not in files:
            raise InvalidBody(NO_SUCH_FILE, pointer=f"/entries/{number}/image")
        if name in images:  # in memory once, however many entries name it
            continue
        file = files[name].file
        file.seek(0)
        images[name] = file.read()
        with errors_at(f"/entries/{number}/image"), service.decoder.decoded(images[name], budget):
            pass
    contents = [images[entry["image"]] for entry in entries]
    return EvaluationDraft(_name(form.fields.get("name", "")), "images", entries, contents)


def by_json(service: Runtime, raw: bytes) -> EvaluationDraft:
    """Read a set of embeddings or texts. Raises InvalidBody, BodyTooLarge, InvalidVector, InvalidText."""
    body = take_object(parse_json(raw), {"name", "entries", "embeddings"}, "")
    entries, texts = _entries(body.get("entries"), {*ENTRY, "text"}, service.settings), []
    if "embeddings" in body or not any("text" in entry for entry in entries):
        return _by_embeddings(service, body, entries)
    for number, entry in enumerate(entries):
        if "text" not in entry:
            why = "the body has no embeddings, so each entry must have a text"
            raise InvalidBody(why, pointer=f"/entries/{number}/text")
        try:
            texts.append(read_text(entry["text"], service.settings.max_text_bytes))
        except RegraftError as error:
            error.pointer = f"/entries/{number}/text"
            raise
    return EvaluationDraft(_name(body.get("name", "")), "texts", entries, texts)


def _by_embeddings(service: Runtime, body: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> EvaluationDraft:
    for number, entry in enumerate(entries):
        take_object(entry, set(ENTRY), f"/entries/{number}")
    by_version = body.get("embeddings")
    if not isinstance(by_version, dict) or not by_version:
        raise InvalidBody("embeddings must be an object: version -> embeddings", pointer="/embeddings")
    embeddings = {}
    for version, rows in by_version.items():
        with errors_at("/embeddings"):
            card = service.registry.named(version).card
        if not isinstance(rows, list) or len(rows) != len(entries):
            why = f"must have one embedding for each of the {len(entries)} entries"
            raise InvalidBody(why, pointer=f"/embeddings/{version}")
        pointer = f"/embeddings/{version}"
        embeddings[version] = check_embeddings(rows, card.dim, space_from_json(card.space), pointer, version)
    return EvaluationDraft(_name(body.get("name", "")), "embeddings", entries, embeddings=embeddings)


def _entries(entries: object, legal: set[str], settings: Settings) -> list[dict[str, Any]]:
    limit = settings.max_batch
    if not isinstance(entries, list) or len(entries) < 2:
        raise InvalidBody("entries must be a JSON list of at least two entries", pointer="/entries")
    if len(entries) > limit:
        raise BodyTooLarge(f"entries has {len(entries)} entries; at most {limit} are legal", pointer="/entries")
    for number, entry in enumerate(entries):
        take_object(entry, legal, f"/entries/{number}")
        if not isinstance(entry.get("metadata", {}), dict):
            raise InvalidBody("metadata must be a JSON object", pointer=f"/entries/{number}/metadata")
        for field_name in ("label", "metadata"):
            if why := storage_problem(entry.get(field_name), settings.max_metadata_bytes):
                raise InvalidBody(f"{field_name} {why}", pointer=f"/entries/{number}/{field_name}")
        _check_relevant(entry, number, expected="relevant" in entries[0])
    return entries


def _check_relevant(entry: Mapping[str, Any], number: int, *, expected: bool) -> None:
    """Raise InvalidBody unless the entry has valid relevant items, or, with `expected` false, none."""
    relevant, pointer = entry.get("relevant"), f"/entries/{number}/relevant"
    if ("relevant" in entry) is not expected:
        raise InvalidBody("either all entries must have relevant items, or none", pointer=pointer)
    if not expected:
        return
    if not isinstance(relevant, list) or not 1 <= len(relevant) <= MAX_RELEVANT or not all(map(is_item_id, relevant)):
        raise InvalidBody(f"relevant must be a list of 1 to {MAX_RELEVANT} ids of items", pointer=pointer)
    if entry.get("label") is not None:
        raise InvalidBody(
            "an entry must have either a label or relevant items, not both", pointer=f"/entries/{number}/label"
        )


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME or not (value.isprintable() or not value):
        raise InvalidBody(f"name must be up to {MAX_NAME} printable characters", pointer="/name")
    return value
