"""Export a gallery to a Parquet file, page by page; see `export_gallery`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from index.durable import whole_file
from index.errors import InvalidArgument
from regraft.client import Client

PAGE = 1000


@dataclass(frozen=True)
class ExportResult:
    """The result of an export. `changed`: the gallery was written to during it, so the file is not one snapshot.

    `damaged`: number of embeddings left out because the service cannot read them.
    """

    changed: bool
    damaged: int


def export_gallery(
    client: Client, gallery: str, path: Path, on_batch: Callable[[int], object] | None = None
) -> ExportResult:
    """Write all items with their vectors to a Parquet file, whole or not at all. Needs pyarrow.

    Raises:
        Unwritable: the disk is full, or the like; what was there stays.
        InvalidArgument: the path is not UTF-8, which Arrow requires.
    """
    import pyarrow.parquet as pq

    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8, which Arrow requires of a path", pointer="/out") from error
    before = client.gallery(gallery)
    pages = _pages(client, gallery)
    first, damaged = next(pages)
    about = {"gallery": gallery, "current": before.current, "seq": before.seq, "items": before.items}
    schema = first.schema.with_metadata({"regraft": json.dumps(about)})
    with whole_file(path) as part, pq.ParquetWriter(part, schema) as writer:
        for page, lost in chain([(first, 0)], pages):
            damaged += lost
            writer.write_table(page.cast(schema))
            if on_batch is not None:
                on_batch(page.num_rows)
    return ExportResult(client.gallery(gallery).seq != before.seq, damaged)


def _pages(client: Client, gallery: str) -> Iterator[tuple[Any, int]]:
    """The items of a gallery as tables with equal columns, each with the number of damaged embeddings left out.

    Vectors are variable-size lists, which every reader of Parquet supports.
    """
    import pyarrow as pa

    versions: Sequence[str] = ()
    cursor: str | None = None
    while True:
        raw = client.embeddings_table(gallery, versions=versions, limit=PAGE, cursor=cursor, with_text=True)
        page = pa.ipc.open_stream(io.BytesIO(raw)).read_all()
        metadata: Mapping[bytes, bytes] = page.schema.metadata or {}
        # The first page fixes the columns; versions added later are not exported.
        versions = [name.removeprefix("vector:") for name in page.column_names if name.startswith("vector:")]
        lists = [pa.field(f.name, pa.list_(pa.float32())) if f.name.startswith("vector:") else f for f in page.schema]
        yield page.cast(pa.schema(lists)), len(json.loads(metadata.get(b"damaged", b"[]")))
        cursor = metadata.get(b"next", b"").decode()
        if not cursor:
            return
