"""`regraft import` of files against only reading the same file: rows per second of each, in one run.

    python benchmarks/imports.py --items 50000

ITEMS x 128 in each format: Parquet with two columns of metadata, .npy with ids in a text file, .fvecs, and a flat FAISS
index. `alone`: the library of the format reads all vectors (and columns) into memory piece by piece. `source`:
`regraft.sources` reads the batches, and nothing uses them. `import`: the client imports into a gallery of a service on
this machine, committed to disk; each import has a separate gallery that is only scanned. CPU is the command's and the
service's, per thousand rows.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from clustered_gallery import DIM, about, clustered, fill
from command_line import Count, run_main
from real_service import cpu_seconds, served

from regraft import Client
from regraft.sources.base import Wanted
from regraft.sources.opening import open_source
from regraft.transfer.imports import PAGE, import_gallery


def main(items: Count = 50_000) -> None:
    vectors, _ = clustered(items)
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as (url, service):
        fill(url, Path(scratch), vectors[:100], "exact")
        print(f"{items} rows of {DIM} numbers; load {os.getloadavg()[0]:.1f}")
        columns = ("file", "MiB", *(f"{what}, rows/s" for what in ("alone", "source", "import")), "import / alone")
        print(f"| {' | '.join((*columns, 'command, ms', 'service, ms'))} |")
        print(f"|{' --- |' * 8}")
        for name, (write, alone) in FORMS.items():
            file = Path(scratch) / name
            write(file, vectors)
            ids = Path(f"{file}.txt") if file.suffix == ".npy" else None
            rates = [len(vectors) / seconds(partial(alone, file))]
            rates.append(len(vectors) / seconds(partial(rows_read, file, ids)))
            with Client(url) as client:
                gallery = file.suffix[1:]
                client.create_gallery(gallery, index={"kind": "exact"})
                client.deploy(gallery, "plain")
                before, mine, started = cpu_seconds(service), time.process_time(), time.perf_counter()
                done = import_gallery(client, gallery, opened(file, ids), Path(f"{file}.state"))
                rates.append(len(vectors) / (time.perf_counter() - started))
                spent = [time.process_time() - mine, cpu_seconds(service) - before]
            assert (done.stored, done.skipped) == (len(vectors), {})
            shown = " | ".join(f"{rate:,.0f}" for rate in rates)
            size = file.stat().st_size / 2**20
            cpu = " | ".join(f"{1e6 * one / len(vectors):.0f}" for one in spent)
            print(f"| {file.suffix} | {size:.1f} | {shown} | {rates[2] / rates[0]:.4f} | {cpu} |", flush=True)


def opened(file: Path, ids: Path | None) -> Any:
    vectors = {"embedding": "plain"} if file.suffix == ".parquet" else {}
    return open_source(str(file), Wanted(vectors=vectors, version="plain"), ids=ids)


def rows_read(file: Path, ids: Path | None) -> int:
    return sum(len(batch.ids) for batch in opened(file, ids).batches(PAGE))


def seconds(run: Callable[[], object], rounds: int = 3) -> float:
    """The median; the file lies in the page cache for all."""
    took = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        took.append(time.perf_counter() - started)
    return float(np.median(took))


def write_parquet(file: Path, vectors: Any) -> None:
    told = [about(n) for n in range(len(vectors))]
    columns = {field: [one[field] for one in told] for field in told[0]}
    ids = [f"i{n}" for n in range(len(vectors))]
    pq.write_table(pa.table({"id": ids, **columns, "embedding": list(vectors)}), file)


def read_parquet(file: Path) -> None:
    for batch in pq.ParquetFile(file).iter_batches(PAGE):
        for column in batch.schema.names:
            found = batch.column(column)
            (found.flatten() if pa.types.is_list(found.type) else found).to_numpy(zero_copy_only=False)


def write_npy(file: Path, vectors: Any) -> None:
    np.save(file, vectors)
    Path(f"{file}.txt").write_text("\n".join(f"i{n}" for n in range(len(vectors))))


def read_npy(file: Path) -> None:
    np.load(file)
    Path(f"{file}.txt").read_text().splitlines()


def write_fvecs(file: Path, vectors: Any) -> None:
    widths = np.full((len(vectors), 1), vectors.shape[1], "<i4")
    file.write_bytes(np.hstack([widths, vectors.view("<i4")]).tobytes())


def read_fvecs(file: Path) -> None:
    np.ascontiguousarray(np.fromfile(file, "<f4").reshape(-1, DIM + 1)[:, 1:])


def write_faiss(file: Path, vectors: Any) -> None:
    index = faiss.IndexFlatIP(DIM)
    index.add(vectors)
    faiss.write_index(index, str(file))


def read_faiss(file: Path) -> None:
    index = faiss.read_index(str(file))
    index.reconstruct_n(0, index.ntotal)


FORMS: dict[str, tuple[Callable[[Path, Any], None], Callable[[Path], None]]] = {
    "a.parquet": (write_parquet, read_parquet),
    "a.npy": (write_npy, read_npy),
    "a.fvecs": (write_fvecs, read_fvecs),
    "a.faiss": (write_faiss, read_faiss),
}

if __name__ == "__main__":
    run_main(main)
