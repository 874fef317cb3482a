"""Requests to the routes of edges."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
from sqlalchemy import select

from index.version import Version
from service.runtime import Runtime
from staging.states.working import SteppedWorker


def moved_to(served: Any, worker: SteppedWorker, path: str, version: str) -> None:
    served.deploy(path, version)
    started = served.http.post(f"{path}/backfills", json={"kind": "reencode"})
    assert started.status_code == 202, started.text
    while served.http.get(f"/backfills/{started.json()['id']}").json()["state"] == "running":
        worker.drain()


def edges(served: Any, **where: str) -> list[dict[str, Any]]:
    return list(served.http.get("/edges", params=where).json()["edges"])


def key(edge: dict[str, Any]) -> tuple[str, str, str]:
    return edge["new"], edge["old"], edge["kind"]


def fit(served: Any, **body: Any) -> Any:
    return served.http.post("/edges:fit", json={"new": "other", "old": "v1", "kind": "procrustes", **body})


def fit_file(served: Any, arrays: dict[str, Any] | bytes, **fields: str) -> Any:
    """Request a fit on pairs in a file with these arrays, or with these bytes as its content."""
    raw = arrays if isinstance(arrays, bytes) else npz(**arrays)
    data = {"new": "other", "old": "v1", "kind": "ridge", **fields}
    return served.http.post("/edges:fit", data=data, files={"pairs": ("pairs.npz", raw)})


def npz(**arrays: Any) -> bytes:
    np.savez_compressed(stream := io.BytesIO(), **arrays)
    return stream.getvalue()


def add(served: Any, new: str, old: str, kind: str, **body: Any) -> Any:
    return served.http.post("/edges", json={"new": new, "old": old, "kind": kind, **body})


def send(served: Any, archive: bytes, **fields: str) -> Any:
    return served.http.post("/edges", data=fields, files={"archive": ("edge.zip", archive)})


def remove(served: Any, new: str, old: str, kind: str, **query: Any) -> Any:
    return served.remove(f"/edges/{new}/{old}/{kind}", **query)


def zipped(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def edge_archive(version: Version, old: str) -> bytes:
    """The archive of the edge to `old` that lies in a version's folder."""
    return zipped({path.name: path.read_bytes() for path in (version.folder / "edges" / old).iterdir()})


def bare_edge(weight: np.ndarray, **fields: Any) -> bytes:
    """The archive of a matrix edge between two versions of dimension 3."""
    stream = io.BytesIO()
    np.savez(stream, weight=weight.astype(np.float32))
    score = {"value": 0.8, "low": 0.7, "high": 0.9}
    return zipped({"edge.json": json.dumps({"kind": "matrix", "scores": {"cmc@1": score}, **fields}).encode(),
                   "edge.npz": stream.getvalue()})  # fmt: skip


def routes(served: Any, path: str, image: bytes, **fields: Any) -> set[tuple[str, ...]]:
    """The routes to the items that a query finds."""
    answer = served.query(path, image, **fields).json()
    return {tuple(match["route"]) for match in answer["results"][0]["matches"]}


def hold(served: Any, version: str, vectors: np.ndarray, path: str | None = None) -> None:
    """Add embeddings of a second version to the items of the newest gallery, or of `path`."""
    from sqlalchemy import insert

    from service.store.tables import embedding, gallery, item

    runtime: Runtime = served.runtime
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("<f4")
    with runtime.database.write() as connection:
        newest = select(gallery.c.id).order_by(gallery.c.id.desc()).limit(1)
        named = select(gallery.c.id).where(gallery.c.name == (path or "").rpartition("/")[2])
        chosen = connection.execute(named if path else newest).scalar_one()
        rows = connection.execute(select(item.c.id, item.c.external_id).where(item.c.gallery_id == chosen)).all()
        same = {"version_id": runtime.registry.named(version).id, "origin": "supplied", "side": None}
        connection.execute(
            insert(embedding),
            [{**same, "item_id": row.id, "vector": unit[int(row.external_id)].tobytes()} for row in rows],
        )


EYE = np.eye(3)
