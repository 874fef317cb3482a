"""Check files of vectors: missing or damaged ones, and those that the database does not name."""

from __future__ import annotations

import hashlib
from contextlib import closing

from service.doctor.findings import Context, Finding, remove_orphans, until_store_is_away
from service.doctor.on_disk import KeysOnDisk
from service.store.vectors.files import files


def check(context: Context, fix: bool) -> list[Finding]:
    """`vector_file_missing`, `vector_file_damaged`, `vector_file_unknown`, `store_unreachable`."""
    again = (
        "restore them from a backup of the image store and restart the API processes; else ingest the items again, or "
        "backfill from their images"
    )
    missing = Finding("vector_file_missing", "error", "files of vectors are missing", again)
    damaged = Finding("vector_file_damaged", "error", "files of vectors changed after they were written", again)
    what = "files of vectors that no row names"
    unknown = Finding("vector_file_unknown", "info", what, "--fix removes them", fixable=True)
    advice = "no row names any file of this store: check that it belongs to this database; --fix keeps them"
    findings = [missing, damaged, unknown]
    with until_store_is_away(findings), closing(KeysOnDisk()) as stored:
        context.blobs.check()
        # Listed before the rows are read: every listed file has its row by then.
        stored.put(context.blobs.all_vector_files())
        with context.database.lookup() as connection:
            known = files(connection)
        for file in known:
            stored.name(file.key)
            if file.state == "kept":
                content = context.blobs.read_part(file.key, 0, file.bytes + 1)
                if content is None:
                    missing.add(file.key)
                elif hashlib.sha256(content).hexdigest() != file.sha256:
                    damaged.add(file.key)
        remove_orphans(context, unknown, stored, advice, fix=fix)
    return findings
