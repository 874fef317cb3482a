"""Checks images: the store itself, rows whose image is gone, and images that nothing refers to."""

from __future__ import annotations

from contextlib import closing

from service.doctor.findings import Context, Finding, remove_orphans
from service.doctor.on_disk import KeysOnDisk
from service.store.blob_references import references
from service.store.blobs import StoreUnreachable
from service.store.deletion import deleted_galleries


def check(context: Context, fix: bool) -> list[Finding]:
    """`store_unreachable`, or else `orphan_blob`, `image_missing`, `evaluation_image_missing`."""
    try:
        context.blobs.check()
    except StoreUnreachable as error:
        away = Finding("store_unreachable", "error", "image stores cannot be looked into", "bring it back")
        away.add(error.message)
        return [away]
    missing = {
        "item": Finding(
            "image_missing",
            "warning",
            "items whose image is gone: they can be found, but not re-encoded",
            "restore the images, or ingest the items again",
        ),
        "evaluation": Finding(
            "evaluation_image_missing",
            "warning",
            "entries of evaluation sets whose image is gone: gates leave them out",
            "restore the images, or add the evaluation set again",
        ),
    }
    with closing(KeysOnDisk()) as stored:
        # What is stored is listed first: a row that comes meanwhile is not taken for one without its image.
        stored.put(context.blobs.all())
        with context.database.read() as connection:
            for reference in references(connection):
                if not stored.name(reference.key) and not context.blobs.exists(reference.key):
                    missing[reference.kind].add(reference.owner)
            for gallery_id in deleted_galleries(connection):
                stored.forget(f"{gallery_id}/")  # what lies in the folder of a gallery that is being freed goes with it
        orphan = Finding("orphan_blob", "info", "images that nothing refers to", "--fix removes them", fixable=True)
        advice = "nothing refers to any image here: is it the store of this database? --fix leaves them"
        return [remove_orphans(context, orphan, stored, advice, fix=fix), *missing.values()]
