"""Folders on disk: those of versions and edges that changed since they were accepted, and remains of uploads."""

from __future__ import annotations

import shutil

from service.doctor.findings import Context, Finding
from service.registry.incoming import remains


def look(patient: Context, fix: bool) -> list[Finding]:
    """`version_changed`, `edge_changed`, `upload_left`."""
    return [_versions(patient), _edges(patient), _left(patient, fix)]


def _versions(patient: Context) -> Finding:
    changed = Finding(
        "version_changed",
        "error",
        "version folders are no longer what was registered: they are set aside",
        "register the same archive again, or restore the folder and start the service again; workers then go on",
    )
    for registered in patient.registry.all():
        if registered.problem:
            changed.add(f"{registered.name}: {registered.problem}")
    return changed


def _edges(patient: Context) -> Finding:
    changed = Finding(
        "edge_changed",
        "error",
        "edges whose files are no longer what was accepted: they are not used",
        "add or fit the edge again with --replace, or restore its folder and start the service again",
    )
    for declared in patient.registry.edges():
        if declared.problem:
            new, old, kind = declared.edge.key
            changed.add(f"{kind} from {new} to {old}: {declared.problem}")
    return changed


def _left(patient: Context, fix: bool) -> Finding:
    left = Finding("upload_left", "info", "remains of uploads that were killed", "removed at start", fixable=True)
    for accepted in (patient.settings.versions, patient.settings.edges):
        for folder in remains(accepted):
            left.add(folder.name)
            if fix:
                shutil.rmtree(folder, ignore_errors=True)
                left.fixed += 1
    return left
