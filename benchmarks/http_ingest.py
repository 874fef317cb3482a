"""Ingest of embeddings over HTTP in each body format, against a floor: rows inserted into SQLite, committed to disk.

    python benchmarks/http_ingest.py --batches 6 --batch-size 10000

BATCHES of BATCH_SIZE x 128 with two metadata fields each, in turns: the floor, JSON, arrays (.npy), tables (Arrow).
Each writes to a separate table or gallery, which is loaded and only scanned. Compare the ratios. CPU is that of the
storing process per batch.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
from clustered_gallery import DIM, about, clustered, fill
from command_line import Count, run_main
from real_service import cpu_seconds, served

from regraft.inputs import arrow_stream
from regraft.routes.items import ARROW


def main(batches: Count = 6, batch_size: Count = 10_000) -> None:
    took: dict[str, list[float]] = defaultdict(list)
    spent: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as (url, service):
        vectors, _ = clustered(batch_size)
        fill(url, Path(scratch), vectors[:100], "exact")
        database = sqlite3.connect(Path(scratch) / "floor.db")
        database.execute("pragma journal_mode=wal")
        database.execute("pragma synchronous=full")
        database.execute("create table item (id text unique, metadata text, vector blob)")
        with httpx.Client(base_url=f"{url}/v1", timeout=120, trust_env=False) as http:
            for name in ("json", "npy", "arrow"):
                http.post("/galleries", json={"name": name, "index": {"kind": "exact"}}).raise_for_status()
                http.post(f"/galleries/{name}/deployments", json={"version": "plain"}).raise_for_status()
                ask = {"version": "plain", "embeddings": vectors[:1].tolist()}
                http.post(f"/galleries/{name}/query", json=ask).raise_for_status()
            for batch in range(batches):
                described = [{"id": f"b{batch}-{n}", "metadata": about(n)} for n in range(batch_size)]
                embedded = zip(described, vectors.tolist(), strict=True)
                body = json.dumps({"items": [{**item, "embedding": row} for item, row in embedded]})
                np.save(array := io.BytesIO(), vectors)
                form = {"data": {"items": json.dumps(described)}, "files": {"embeddings": ("e", array.getvalue())}}
                rows = zip(described, vectors, strict=True)
                plain = [(item["id"], json.dumps(item["metadata"]), row.tobytes()) for item, row in rows]
                before, started = time.process_time(), time.perf_counter()
                with database:
                    database.executemany("insert into item values (?, ?, ?)", plain)
                took["floor"].append(time.perf_counter() - started)
                spent["floor"].append(time.process_time() - before)
                as_json = {"content": body, "headers": {"content-type": "application/json"}}
                as_table = {"content": table(described, vectors), "headers": {"content-type": ARROW}}
                for name, request in (("json", as_json), ("npy", form), ("arrow", as_table)):
                    before, started = cpu_seconds(service), time.perf_counter()
                    http.post(f"/galleries/{name}/items", **request).raise_for_status()
                    took[name].append(time.perf_counter() - started)
                    spent[name].append(cpu_seconds(service) - before)
    print(f"{batches} batches of {batch_size} x {DIM}; load {os.getloadavg()[0]:.1f}")
    for name, seconds in took.items():
        rates = f"{batch_size / float(np.median(seconds)):,.0f}/s | {batch_size / min(seconds):,.0f}/s"
        print(f"| {name} | {rates} | CPU {1000 * float(np.median(spent[name])):.0f} ms |")


def table(described: Sequence[Mapping[str, Any]], vectors: Any) -> bytes:
    """Items with their metadata as columns, and their vectors."""
    rows = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    about = pa.Table.from_pylist([item["metadata"] for item in described])
    made = about.append_column("id", pa.array([item["id"] for item in described])).append_column("embedding", rows)
    return arrow_stream(made)


if __name__ == "__main__":
    run_main(main)
