"""Images: the store itself, rows whose image is gone, and images that nothing refers to."""

from __future__ import annotations

from service.doctor.findings import Context, Finding, remove_orphans
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
    # What is stored is listed first: a row that comes meanwhile is not taken for one without its image.
    stored = dict(context.blobs.all())
    referred: set[str] = set()
    with context.database.read() as connection:
        for reference in references(connection):
            referred.add(reference.key)
            if reference.key not in stored and not context.blobs.exists(reference.key):
                missing[reference.of].add(reference.owner)
        freed = {str(gallery_id) for gallery_id in deleted_galleries(connection)}
    # What lies in the folder of a gallery that is being freed goes with it.
    stored = {key: age for key, age in stored.items() if key.partition("/")[0] not in freed}
    orphan = Finding("orphan_blob", "info", "images that nothing refers to", "--fix removes them", fixable=True)
    advice = "nothing refers to any image here: is it the store of this database? --fix leaves them"
    return [remove_orphans(context, orphan, stored, referred, advice, fix=fix), *missing.values()]
