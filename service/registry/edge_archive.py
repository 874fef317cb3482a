"""An edge for a remote worker: a .zip of its folder, identified by one sha256 over all its content."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

from index.errors import InvalidVersionFolder
from index.version import EDGE, Edge
from index.version_folder.archive import unpack_version
from index.version_folder.artifacts import read_expected
from index.version_folder.folder import files_of, load_edge


def fingerprint(edge: Edge) -> str:
    """The sha256 of an edge's content: its two versions, its evidence, and the hashes of its files."""
    files = {name: sha for name, sha in edge.hashes.items() if name != EDGE}
    content = {"new": edge.new, "old": edge.old, "edge": edge.as_json(), "files": files}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def pack(edge: Edge, archive: Path) -> None:
    """Write an edge as a .zip. Raises ChangedOnDisk if a file is not the accepted one."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr(EDGE, json.dumps(edge.as_json(), indent=2) + "\n")
        for name in sorted(set(edge.hashes) - {EDGE}):
            assert edge.folder is not None
            out.writestr(name, read_expected(edge.folder / name, f"edges/{edge.old}/{name}", edge.hashes[name]))


def unpack(archive: Path, into: Path, new: str, old: str, expected: str) -> Edge:
    """Unpack an edge into the empty folder `into`. Raises InvalidVersionFolder if its fingerprint is not `expected`."""
    unpack_version(archive, into, EDGE)
    return load(into, new, old, expected)


def load(folder: Path, new: str, old: str, expected: str) -> Edge:
    """Load an unpacked edge and check its fingerprint. Raises InvalidVersionFolder."""
    edge = load_edge(folder, new, old)
    hashed = replace(edge, hashes=files_of(folder))
    if fingerprint(hashed) != expected:
        raise InvalidVersionFolder(f"the edge from {new!r} to {old!r} differs from the one that the service expects")
    return hashed
