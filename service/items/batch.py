"""A batch of items while it is checked: the valid items so far, and the errors of the others; see `read_batch`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, count, repeat
from typing import Any

from index.errors import RegraftError
from index.item_id import LEGAL_ID, MAX_ID, are_plain_ids, is_item_id
from service.errors import BodyTooLarge, DuplicateId, InvalidBody, InvalidItem, ItemsRefused
from service.items.stored_json import are_plain, storage_problem
from service.registry.image_losses import ImageLosses
from service.schemas import take_object
from service.settings import Settings


@dataclass(slots=True)
class ItemDraft:
    """An item of a request: `content` is its image's file name, its embedding or its text, unchecked.

    `metadata` None: not given. `text`: the unchecked text of an embedding, None: not given.
    """

    index: int
    id: str
    metadata: dict[str, Any] | None
    content: Any
    text: Any = None


@dataclass
class IngestBatch:
    """A batch while it is checked: valid items so far, errors of the others, and losses of images in preprocessing."""

    size: int
    drafts: list[ItemDraft] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    image_losses: ImageLosses = field(default_factory=ImageLosses)

    def refuse(self, index: int, item_id: object, error: RegraftError) -> None:
        """Add the error of an item that cannot be stored."""
        shown_id = _without_halves(item_id[:MAX_ID]) if isinstance(item_id, str) else None
        pointer = f"/items/{index}{_without_halves(error.pointer)}"
        self.errors.append(
            {"index": index, "id": shown_id, "code": error.code, "detail": error.message, "pointer": pointer}
        )

    def settle(self, atomic: bool) -> None:
        """Raise ItemsRefused if no item is valid, or, with `atomic`, if one is invalid."""
        if not self.errors:
            return
        self.errors.sort(key=lambda error: error["index"])
        first = f"{self.errors[0]['pointer']}: {self.errors[0]['detail']}"
        if len(self.errors) == self.size:
            raise ItemsRefused(f"all of the {self.size} items are refused; {first}", self.errors)
        if atomic:
            counts = f"{len(self.errors)} of {self.size} items"
            raise ItemsRefused(f"{counts} are refused, and the batch is atomic; {first}", self.errors)


def read_batch(
    listed: object, content: str, settings: Settings, beside: str = "", *, either: bool = False
) -> IngestBatch:
    """Check the fields of a batch's items; invalid items become errors.

    Args:
        listed: the items.
        content: the field that each item must have; "": none.
        settings: the limits.
        beside: the field of a text that an item may also have; "": none.
        either: an item may have this text only instead of the content.

    Raises:
        InvalidBody: not a list, or an empty one.
        BodyTooLarge: more than `settings.max_batch` items.
    """
    max_batch = settings.max_batch
    if not isinstance(listed, list) or not listed:
        raise InvalidBody("items must be a JSON list of at least one item", pointer="/items")
    if len(listed) > max_batch:
        raise BodyTooLarge(f"items has {len(listed)} items; at most {max_batch} per request", pointer="/items")
    batch = IngestBatch(len(listed))
    plain = "" if either else beside
    if (drafts := _plain_drafts(listed, content, plain, settings.max_metadata_bytes)) is not None:
        batch.drafts = drafts
        return batch
    ids: set[str] = set()
    for index, value in enumerate(listed):
        try:
            draft = _draft(index, value, content, beside, settings.max_metadata_bytes, either=either)
            if draft.id in ids:
                raise DuplicateId(f"an earlier item of the batch has the same id {draft.id!r}", pointer="/id")
        except RegraftError as error:
            batch.refuse(index, value.get("id") if isinstance(value, dict) else None, error)
        else:
            batch.drafts.append(draft)
            ids.add(draft.id)
    return batch


def _plain_drafts(listed: list[Any], content: str, beside: str, max_metadata: int) -> list[ItemDraft] | None:
    """All items, checked at once, which is faster; None: one may be invalid, so check them one by one."""
    if set(map(type, listed)) != {dict} or not ({"id", "metadata", content, beside} - {""}).issuperset(
        chain.from_iterable(listed)
    ):
        return None
    ids, metadata = [item.get("id") for item in listed], [item["metadata"] for item in listed if "metadata" in item]
    contents = [item[content] for item in listed if content in item] if content else [None] * len(listed)
    if len(contents) < len(listed) or not are_plain_ids(ids) or len(set(ids)) < len(ids):
        return None
    if not {dict}.issuperset(map(type, metadata)) or not are_plain(metadata, max_metadata):
        return None
    texts = [item.get(beside) for item in listed] if beside else repeat(None)
    return list(map(ItemDraft, count(), ids, (item.get("metadata") for item in listed), contents, texts))


def _draft(index: int, value: object, content: str, beside: str, max_metadata: int, *, either: bool) -> ItemDraft:
    fields = take_object(value, {"id", "metadata", content, beside} - {""}, "")
    item_id = fields.get("id")
    if not is_item_id(item_id):
        raise InvalidItem(f"id must be {LEGAL_ID}", pointer="/id")
    is_text = either and fields.get(beside) is not None
    if is_text and content in fields:
        raise InvalidItem(f"an item must have either {content} or {beside}, not both", pointer=f"/{beside}")
    if content and content not in fields and not is_text:
        raise InvalidItem(f"{content} is missing", pointer=f"/{content}")
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict):
        raise InvalidItem("metadata must be a JSON object", pointer="/metadata")
    if why := storage_problem(metadata, max_metadata):
        raise InvalidItem(f"metadata {why}", pointer="/metadata")
    return ItemDraft(index, item_id, fields.get("metadata"), fields.get(content), fields.get(beside))


def _without_halves(text: str) -> str:
    """The text with `?` for each half of a surrogate pair, which strict JSON parsers refuse."""
    return text.encode(errors="replace").decode()
