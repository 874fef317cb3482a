"""The speed of a backfill, and its cost to queries that run meanwhile.

    python benchmarks/backfill.py small        # worker against plain loops, re-encoding with a small encoder
    python benchmarks/backfill.py resnet50     # with a ResNet-50-sized one
    python benchmarks/backfill.py transform    # over a stored item edge, in the order of storage and in random order
    python benchmarks/backfill.py fct          # over one of 5.7 million parameters
    python benchmarks/backfill.py queries      # p50 and p99 of queries: no backfill, rate-limited, full speed

The script makes everything itself: a ResNet-50-sized encoder with random weights, a small one, an item edge, random
images. The plain loops do the work of a script without any bookkeeping: `compute` only computes (images decoded, no
database access); `script` also reads its inputs and writes its results, one block per transaction. Rounds of worker and
loops take turns, so that a busy machine slows all of them.
"""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import numpy as np
import real_service
import typer
from command_line import Count, Seconds, run_main
from random_versions import FCT_EDGE, SMALL_EDGE, Net, picture, resnet50, small, write_version
from real_service import client, data_of, upload
from sqlalchemy import create_engine, delete, select, text, update

from index.edges.transform import load_forward
from index.encoders.encoder import BATCH, Encoder
from index.encoders.image import decode_image, preprocess
from index.evaluation.macs import encoder_macs, forward_macs
from index.version import Version
from service.backfills.worker import Worker
from service.settings import Settings
from service.store.blob_references import open_blobs
from service.store.database.connections import Database
from service.store.tables import backfill, embedding, item
from service.store.vectors.codec import from_bytes, to_bytes

TRANSFORM_BLOCK = 2048
"""Vectors a plain loop takes at a time, as many as a chunk of the worker holds."""
RNG = np.random.default_rng(0)

Loops = dict[str, Callable[[], float]]
"""Name -> a loop, which returns its items a second."""


def main(
    what: Literal["resnet50", "small", "transform", "fct", "queries"],
    images: Annotated[int | None, typer.Option(min=1, help="512; for resnet50, 64.")] = None,
    vectors: Count = 100_000,
    rounds: Count = 3,
    seconds: Seconds = 10.0,
    rate: Annotated[float, typer.Option(min=1, help="Items a second of the rate-limited backfill.")] = 500.0,
) -> None:
    match what:
        case "resnet50":
            reencode("ResNet-50-sized", resnet50, images or 64, rounds)
        case "small":
            reencode("small", small, images or 512, rounds)
        case "transform":
            transform("128 -> 512 -> 256", SMALL_EDGE, vectors, rounds)
        case "fct":
            transform("128 -> 2200 -> 2200 -> 256", FCT_EDGE, vectors, rounds)
        case "queries":
            queries(vectors, seconds, rate)


class Server(NamedTuple):
    """A client of a real service in a process of its own, and the settings of both."""

    http: httpx.Client
    settings: Settings

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()


@contextmanager
def serving(scratch: Path, database_url: str = "") -> Iterator[Server]:
    """A service with what is in `scratch`; `database_url`: of a database elsewhere."""
    data = data_of(scratch)
    settings = Settings(data=data, database_url=database_url) if database_url else Settings(data=data)
    with real_service.served(scratch, database_url=database_url) as (url, _), client(url) as http:
        yield Server(http, settings)


def fill(server: Server, name: str, old: str, new: str, images: int, vectors: int, dim: int) -> None:
    server.post("/galleries", name=name)
    server.post(f"/galleries/{name}/deployments", version=old)
    for start in range(0, images, 200):
        block = range(start, min(start + 200, images))
        listed = [{"id": f"p{n}", "metadata": {}, "image": str(n)} for n in block]
        files = [("images", (str(n), picture(n))) for n in block]
        answer = server.http.post(f"/galleries/{name}/items", data={"items": json.dumps(listed)}, files=files)
        assert answer.is_success, answer.text
    for start in range(0, vectors, 5000):
        rows = RNG.normal(size=(min(5000, vectors - start), dim)).astype(np.float32)
        np.save(array := io.BytesIO(), rows)
        form = {"items": json.dumps([{"id": f"v{start + n}"} for n in range(len(rows))]), "version": old}
        sent = {"embeddings": ("e", array.getvalue())}
        answer = server.http.post(f"/galleries/{name}/items", data=form, files=sent)
        assert answer.is_success, answer.text
    server.post(f"/galleries/{name}/deployments", version=new)


def back(settings: Settings, new: str) -> None:
    """Undo a backfill, so that the next round finds what this one found."""
    engine = create_engine(settings.database_url)
    with engine.begin() as connection:
        ids = dict(tuple(r) for r in connection.execute(text("select name, id from version")))
        connection.execute(delete(embedding).where(embedding.c.version_id == ids[new]))
        connection.execute(update(backfill).where(backfill.c.state == "running").values(state="cancelled"))
    engine.dispose()


def run_worker(server: Server, gallery: str, kind: str, order: str) -> float:
    """Items a second of a worker, from its first claim to its last commit; loading the models is left out."""
    started = server.post(f"/galleries/{gallery}/backfills", kind=kind, order=order)
    total: int = server.http.get(f"/backfills/{started['id']}").json()["total"]  # planned since it was started
    stop = threading.Event()
    worker = Worker(server.settings, stop)
    if kind == "reencode":
        worker._registry.by_id(2).encoder()  # noqa: SLF001 - loading is not what is measured
    thread = threading.Thread(target=worker.work)
    begin = time.perf_counter()
    thread.start()
    engine = create_engine(server.settings.database_url)
    done = select(backfill.c.done, backfill.c.state).where(backfill.c.id == started["id"])
    while True:
        with engine.connect() as connection:
            row = connection.execute(done).one()
        if row.done == total:
            break
        assert row.state == "running", row
        time.sleep(0.005)
    seconds = time.perf_counter() - begin
    stop.set()
    thread.join()
    worker.close()
    engine.dispose()
    return total / seconds


def plain_reencode(server: Server, encoder: Encoder, write: bool) -> float:
    engine = create_engine(server.settings.database_url)
    with closing(Database(server.settings.database_url)) as database:
        blobs = open_blobs(database, server.settings.blobs_url)
        blobs.check()  # reads the store's marker from the database
    with engine.connect() as connection:
        rows = connection.execute(select(item.c.id, item.c.blob).where(item.c.blob.is_not(None))).all()
    begin = time.perf_counter()
    for start in range(0, len(rows), BATCH):
        block = rows[start : start + BATCH]
        images = [decode_image(blobs.read(row.blob)) for row in block]
        made = encoder.encode_arrays(np.stack([preprocess(image, encoder.spec) for image in images]))
        if write:
            put(engine, [row.id for row in block], made.vectors, "encoded")
    seconds = time.perf_counter() - begin
    engine.dispose()
    return len(rows) / seconds


def plain_transform(server: Server, transform: Any, dim: int, order: str, write: bool) -> float:
    engine = create_engine(server.settings.database_url)
    with engine.connect() as connection:
        ids = list(connection.execute(select(item.c.id).order_by(item.c.id)).scalars())
    if order == "random":
        RNG.shuffle(ids)
    begin = time.perf_counter()
    for start in range(0, len(ids), TRANSFORM_BLOCK):
        block = ids[start : start + TRANSFORM_BLOCK]
        with engine.connect() as connection:
            stored = connection.execute(
                select(embedding.c.item_id, embedding.c.vector).where(embedding.c.item_id.in_(block))
            ).all()
        made = transform.transform_items(from_bytes([row.vector for row in stored], dim))
        if write:
            put(engine, [row.item_id for row in stored], made.vectors_ND, "transformed")
    seconds = time.perf_counter() - begin
    engine.dispose()
    return len(ids) / seconds


def compute_only(run: Callable[[], Any], size: int, seconds: float = 1.5) -> float:
    run()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        run()
        count += size
    return count / (time.perf_counter() - begin)


def put(engine: Any, ids: list[int], vectors: np.ndarray, origin: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("PRAGMA synchronous=FULL"))
        rows = [
            {"item_id": key, "version_id": 2, "origin": origin, "vector": to_bytes(vector)}
            for key, vector in zip(ids, vectors, strict=True)
        ]
        connection.execute(embedding.insert(), rows)
        place = update(item).where(item.c.id == text(":key")).values(seq=text(":key"))
        connection.execute(place, [{"key": key} for key in ids])


@contextmanager
def served(
    body: Callable[[Net], tuple[str, int]],
    images: int,
    vectors: int,
    hidden: tuple[int, ...] = SMALL_EDGE,
    database_url: str = "",
) -> Iterator[tuple[Server, Version, Version]]:
    """A service with one gallery `g` of v1, v2 current; v2 has the encoder `body`."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        v1 = write_version(root / "v1", "v1", 128, small, None)
        v2 = write_version(root / "v2", "v2", 256, body, v1, hidden)
        with serving(root, database_url) as server:
            for version in (v1, v2):
                upload(server.http, version)
            fill(server, "g", "v1", "v2", images, vectors, 128)
            yield server, v1, v2


def reencode(title: str, body: Callable[[Net], tuple[str, int]], images: int, rounds: int) -> None:
    with served(body, images, 0, FCT_EDGE) as (server, v1, v2):
        encoder = Encoder(v2)
        edge = load_forward(v2.edges[0], v2.card, v1.card)
        batch = RNG.normal(size=(TRANSFORM_BLOCK, 128)).astype(np.float32)
        loops: Loops = {
            "script": lambda: plain_reencode(server, encoder, True),
            "compute": lambda: plain_reencode(server, encoder, False),
            "transform instead": lambda: compute_only(lambda: edge.transform_items(batch), TRANSFORM_BLOCK),
        }
        show(title, "reencode", server, rounds, loops)
        transforming = forward_macs(v2.edges[0], v1.card)
        print(f"  {encoder_macs(v2):.3g} multiply-accumulates an image, {transforming:.3g} a transform", flush=True)


def transform(title: str, hidden: tuple[int, ...], vectors: int, rounds: int) -> None:
    with served(small, 0, vectors, hidden) as (server, v1, v2):
        edge = load_forward(v2.edges[0], v2.card, v1.card)
        batch = RNG.normal(size=(TRANSFORM_BLOCK, 128)).astype(np.float32)
        for order in ("oldest", "random"):
            loops: Loops = {
                "script": partial(plain_transform, server, edge, 128, order, True),
                "read and compute": partial(plain_transform, server, edge, 128, order, False),
                "compute": lambda: compute_only(lambda: edge.transform_items(batch), TRANSFORM_BLOCK),
            }
            show(title, "transform", server, rounds, loops, order)
        print(f"  {forward_macs(v2.edges[0], v1.card):.3g} multiply-accumulates an item", flush=True)


def show(title: str, kind: str, server: Server, rounds: int, loops: Loops, order: str = "oldest") -> None:
    found: dict[str, list[float]] = {name: [] for name in ("worker", *loops)}
    for _ in range(rounds):
        found["worker"].append(run_worker(server, "g", kind, order))
        back(server.settings, "v2")
        for name, loop in loops.items():
            found[name].append(loop())
            back(server.settings, "v2")
    worker = statistics.median(found["worker"])
    print(f"{title}, {kind}, {order} first: worker {worker:.1f} items/s", flush=True)
    for name in loops:
        ratios = [w / other for w, other in zip(found["worker"], found[name], strict=True)]
        speed = statistics.median(found[name])
        print(f"  {name}: {speed:.1f} items/s, worker / {name} = {statistics.median(ratios):.2g}", flush=True)


def queries(vectors: int, seconds: float, limit: float) -> None:
    with served(small, 0, vectors) as (server, _, _):
        # A way back, so that every item answers before and after it moved.
        server.post("/edges", new="v2", old="v1", kind="truncate")
        for title, rate in (("none", None), (f"rate {limit:g} items/s", limit), ("full speed", 0.0)):
            measure_queries(server, title, rate, seconds)
            restart_backfills(server)
            back(server.settings, "v2")


def restart_backfills(server: Server) -> None:
    for each in server.http.get("/galleries/g/backfills").json()["backfills"]:
        if each["state"] in {"running", "paused"}:
            server.http.post(f"/backfills/{each['id']}/cancel")


def measure_queries(server: Server, title: str, rate: float | None, seconds: float) -> None:
    """Ask for a while, but no longer than the backfill runs: queries beside one that has ended say nothing of it."""
    worker, number = None, 0
    if rate is not None:
        number = server.post("/galleries/g/backfills", kind="transform", **({"rate": rate} if rate else {}))["id"]
        command = [sys.executable, "-m", "regraft", "worker", "--data", str(server.settings.data)]
        worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while done_of(server, number)[0] == 0:
            time.sleep(0.02)
    asked = [{"version": "v2", "embeddings": [row.tolist()], "k": 10} for row in RNG.normal(size=(50, 256)).round(4)]
    before = done_of(server, number)[0] if worker else 0
    took: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for body in asked:
            start = time.perf_counter()
            answer = server.http.post("/galleries/g/query", json=body)
            took.append(1000 * (time.perf_counter() - start))
            assert answer.status_code == 200, answer.text
            assert answer.json()["degraded"] == []
        if worker and done_of(server, number)[1] != "running":
            break
    passed = time.perf_counter() - begin
    moved = (done_of(server, number)[0] - before) / passed if worker else 0.0
    if worker:
        worker.terminate()
        worker.wait()
    p50, p99 = np.percentile(took, [50, 99])
    print(
        f"backfill {title}: {moved:.0f} items/s moved over {passed:.1f} s, query p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
        f"n {len(took)}",
        flush=True,
    )


def done_of(server: Server, number: int) -> tuple[int, str]:
    shown = server.http.get(f"/backfills/{number}").json()
    return shown["done"], shown["state"]


if __name__ == "__main__":
    run_main(main)
