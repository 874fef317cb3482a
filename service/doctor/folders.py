"""Check folders on disk: versions and edges that changed since they were accepted, and remains of uploads."""

from __future__ import annotations

import shutil

from index.incoming import abandoned_folders
from service.doctor.findings import Context, Finding


def check(context: Context, fix: bool) -> list[Finding]:
    """`version_changed`, `edge_changed`, `upload_left`."""
    return [_versions(context), _edges(context), _left(context, fix)]


def _versions(context: Context) -> Finding:
    changed = Finding(
        "version_changed",
        "error",
        "version folders changed after registration: they are quarantined",
        "register the same archive again, or restore the folder and restart the service; workers then continue",
    )
    for registered in context.registry.all():
        if registered.problem:
            changed.add(f"{registered.name}: {registered.problem}")
    return changed


def _edges(context: Context) -> Finding:
    changed = Finding(
        "edge_changed",
        "error",
        "edges whose files changed after they were accepted: they are not used",
        "add or fit the edge again with --replace, or restore its folder and restart the service",
    )
    for declared in context.registry.edges():
        if declared.problem:
            new, old, kind = declared.edge.key
            changed.add(f"{kind} from {new} to {old}: {declared.problem}")
    return changed


def _left(context: Context, fix: bool) -> Finding:
    advice = "the next start removes them, and --fix"
    left = Finding("upload_left", "info", "remains of interrupted uploads", advice, fixable=True)
    for accepted in (context.settings.versions, context.settings.edges):
        for folder in abandoned_folders(accepted):
            left.add(folder.name)
            if fix:
                shutil.rmtree(folder, ignore_errors=True)
                left.fixed += not folder.exists()
    return left
