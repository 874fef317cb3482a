"""Check images and texts: their store, rows whose blob is missing, and blobs that nothing refers to."""

from __future__ import annotations

from contextlib import closing

from service.doctor.findings import Context, Finding, remove_orphans, until_store_is_away
from service.doctor.on_disk import KeysOnDisk
from service.store.blob_references import references
from service.store.galleries.deletion import deleted_galleries


def check(context: Context, fix: bool) -> list[Finding]:
    """`orphan_blob`, `image_missing`, `evaluation_image_missing`, `store_unreachable`."""
    missing = {
        "item": Finding(
            "image_missing",
            "warning",
            "items whose image is missing: they can be found, but not re-encoded",
            "restore the images, or ingest the items again",
        ),
        "evaluation": Finding(
            "evaluation_image_missing",
            "warning",
            "entries of evaluation sets whose image is missing: gates leave them out",
            "restore the images, or add the evaluation set again",
        ),
    }
    orphan = Finding("orphan_blob", "info", "images that no row refers to", "--fix removes them", fixable=True)
    advice = "no row refers to any image of this store: check that it belongs to this database; --fix keeps them"
    findings = [orphan, *missing.values()]
    with until_store_is_away(findings), closing(KeysOnDisk()) as stored:
        context.blobs.check()
        # Listed before the rows are read: a listed blob has its row by then; one stored later is looked up.
        stored.put(context.blobs.all())
        with context.database.read() as connection:
            for reference in references(connection):
                if not stored.name(reference.key) and not context.blobs.exists(reference.key):
                    missing[reference.kind].add(reference.owner)
            for gallery_id in deleted_galleries(connection):
                stored.forget(f"{gallery_id}/")  # the blobs of a gallery that is being freed are removed with it
        remove_orphans(context, orphan, stored, advice, fix=fix)
    return findings
