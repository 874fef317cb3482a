"""Change only the metadata of existing items, by JSON Merge Patch (RFC 7396)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from index.errors import RegraftError
from regraft.models import ItemError, MetadataResult
from service.errors import InvalidItem, UnknownItem
from service.items.batch import read_batch
from service.items.by_filter import change_passing
from service.items.stored_json import storage_problem
from service.runtime import Runtime
from service.store.audit import ChangeContext
from service.store.galleries.gallery import gallery_named, take_seq
from service.store.galleries.items import rows_of, set_metadata
from service.store.rows import ItemRow

Patch = Mapping[str, Any]

MAX_ERRORS = 100
"""Most errors that are listed for items selected by a filter, which may be the whole gallery."""


def merge_patch(target: object, patch: Patch) -> dict[str, Any]:
    """A patched JSON value (RFC 7396, section 2): null removes a field, an object is merged into the field's own."""
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value) if isinstance(value, dict) else value
    return merged


def patch_named(
    service: Runtime, name: str, listed: list[Any], context: ChangeContext, *, atomic: bool
) -> MetadataResult:
    """Patch the metadata of items by id, each with its own patch: `listed` holds {id, metadata} objects.

    Raises:
        UnknownGallery: there is none of this name.
        InvalidBody, BodyTooLarge: see `read_batch`.
        ItemsRefused: no item can be patched, or, with `atomic`, one cannot.
    """
    batch = read_batch(listed, "", service.settings)
    for draft in batch.drafts:
        if draft.metadata is None:
            batch.refuse(draft.index, draft.id, InvalidItem("metadata is missing", pointer="/metadata"))
    patches = {draft.id: draft.metadata for draft in batch.drafts if draft.metadata is not None}
    with service.database.write(dry_run=context.dry_run) as connection:
        gallery_id = gallery_named(connection, name).id
        take_seq(connection, gallery_id, 0)
        refused = _patch(connection, gallery_id, patches, service.settings.max_metadata_bytes)
        for draft in batch.drafts:
            if draft.id in refused:
                batch.refuse(draft.index, draft.id, refused[draft.id])
        batch.settle(atomic)
    if not context.dry_run:
        service.replica.refresh(gallery_id)
    errors = [ItemError(**error) for error in batch.errors]
    return MetadataResult(updated=batch.size - len(errors), failed=len(errors), errors=errors)


def patch_passing(
    service: Runtime, name: str, where: dict[str, Any], patch: Patch, context: ChangeContext
) -> MetadataResult:
    """Patch the metadata of all items that pass a filter with one patch; a dry run counts the items that pass.

    Raises:
        InvalidItem: the patch cannot be stored in any metadata.
        InvalidFilter, ShuttingDown: see `change_passing`.
    """
    max_bytes, failed, errors = service.settings.max_metadata_bytes, 0, list[ItemError]()
    if why := storage_problem(patch, max_bytes):
        raise InvalidItem(f"metadata {why}", pointer="/metadata")

    def change(connection: Connection, gallery_id: int, ids: list[str]) -> tuple[int, Sequence[str]]:
        nonlocal failed
        refused = _patch(connection, gallery_id, dict.fromkeys(ids, patch), max_bytes)
        failed += len(refused)
        for external_id, error in list(refused.items())[: MAX_ERRORS - len(errors)]:
            problem = {"code": error.code, "detail": error.message, "pointer": error.pointer}
            errors.append(ItemError(index=0, id=external_id, **problem))
        return len(ids) - len(refused), ()

    updated = change_passing(service, name, where, change, "updated", dry_run=context.dry_run)
    return MetadataResult(updated=updated, failed=failed, errors=errors)


def _patch(
    connection: Connection, gallery_id: int, patches: Mapping[str, Patch], max_bytes: int
) -> dict[str, RegraftError]:
    """Patch the metadata of items by id; the caller holds the gallery's lock. Returns errors by id."""
    refused: dict[str, RegraftError] = {}
    rows = {row.external_id: row for row in rows_of(connection, gallery_id, list(patches)) if not row.deleted}
    merged: list[tuple[ItemRow, dict[str, Any]]] = []
    for external_id, patch in patches.items():
        if (row := rows.get(external_id)) is None:
            refused[external_id] = UnknownItem("the gallery has no item of this id", pointer="/id")
        elif why := storage_problem(patched := merge_patch(row.metadata, patch), max_bytes):
            refused[external_id] = InvalidItem(f"metadata {why}", pointer="/metadata")
        else:
            merged.append((row, patched))
    set_metadata(connection, merged, take_seq(connection, gallery_id, len(merged)))
    return refused
