"""Open a source by its name (`open_source`): a file by its suffix, a database as KIND:ADDRESS#COLLECTION."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from index.errors import InvalidArgument
from regraft.sources.arrays import OPEN, ArrayFile
from regraft.sources.base import Database, ItemSource, Wanted, display_address
from regraft.sources.database import DatabaseSource, readable_errors

TABLES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
INDEXES = (".faiss", ".index")
EXTRA = {
    "pgvector": "postgres",
    "qdrant": "from-qdrant",
    "chroma": "from-chroma",
    "lancedb": "from-lancedb",
    "milvus": "from-milvus",
    "weaviate": "",
    "opensearch": "",
}
"""Kind of database -> the extra that installs its client; empty if its REST API is used."""


LOCAL = {"qdrant": "meta.json", "chroma": "chroma.sqlite3", "lancedb": "", "milvus": ""}
"""Kinds of databases that may be a file or folder -> a file that is always in the folder."""


def kind_of(source: str) -> str:
    """The kind of a source: `pgvector`, `qdrant` ... of a database, or the suffix of a file.

    Raises:
        InvalidArgument: unknown.
    """
    kind = source.partition(":")[0]
    if kind in EXTRA:
        return kind
    if (ending := Path(source).suffix) in (*TABLES, *INDEXES, *OPEN):
        return ending
    databases = ", ".join(f"{name}:ADDRESS#COLLECTION" for name in EXTRA)
    named = display_address(source) if "://" in source else source
    raise InvalidArgument(f"{named} must be a file ({', '.join((*TABLES, *OPEN, *INDEXES))}) or {databases}")


def extra_of(source: str) -> str:
    """The extra that must be installed to read a source."""
    kind = kind_of(source)
    return EXTRA.get(kind, "index" if kind in INDEXES else "arrow")


def open_source(
    source: str,
    wanted: Wanted,
    *,
    ids: Path | None = None,
    key: str | None = None,
    space_of: Callable[[str | None], str] | None = None,
) -> ItemSource:
    """Open a source.

    `ids`: the file of ids of a file of vectors. `key`: the key of a database. `space_of`: version -> kind of its space,
    which the metric of a database must fit.

    Raises:
        InvalidArgument: it does not exist, or is of another kind than its name.
        ModuleNotFoundError: the package to read it is not installed.
    """
    kind = kind_of(source)
    if kind in (*OPEN, *INDEXES):
        _check_vectors_alone(source, wanted)
    if wanted.id is not None and kind in (*OPEN, *INDEXES, "chroma"):
        raise InvalidArgument(f"{source} has no column of ids, so --id cannot be used", pointer="/id")
    if ids is not None and kind not in OPEN:
        raise InvalidArgument(f"{source}: --ids can only be used with {', '.join(OPEN)} files", pointer="/ids")
    if kind in EXTRA:
        address, mark, collection = source.partition(":")[2].rpartition("#")
        if not mark or not address or not collection:
            raise InvalidArgument(f"a source that begins with {kind}: must be {kind}:ADDRESS#COLLECTION")
        # Other addresses than URLs and paths may have a secret, such as `host=... password=...`.
        place = display_address(address) if "://" in address or kind in LOCAL else "..."
        name = f"{kind}:{place}#{collection}"
        with readable_errors(name):
            _check_exists(kind, address)
            return DatabaseSource(name, _open_database(kind, address, collection, wanted, key), wanted, space_of)
    path = Path(source)
    if not path.is_file():
        raise InvalidArgument(f"the file {source} does not exist")
    if kind in OPEN:
        return ArrayFile(path, wanted, ids)
    if kind in INDEXES:
        from regraft.sources.faiss_index import FaissIndex

        index = FaissIndex(path, wanted)
        return DatabaseSource(path.name, index, wanted, space_of, index.note)
    from regraft.sources.table import TableFile

    return TableFile(path, wanted)


def _check_vectors_alone(source: str, wanted: Wanted) -> None:
    """Check that nothing is wanted of a file of vectors that it does not have. Raises InvalidArgument."""
    if wanted.text is not None:
        raise InvalidArgument(f"{source} has no column of texts, so --text cannot be used", pointer="/text")
    for option, names in (("metadata", wanted.metadata), ("flatten", wanted.flatten)):
        if names:
            why = f"{source} has no columns of metadata, so --{option} cannot be used"
            raise InvalidArgument(why, pointer=f"/{option}")


def _check_exists(kind: str, address: str) -> None:
    """Check that a local database exists: its client would create an empty one. Raises InvalidArgument."""
    if kind in LOCAL and "://" not in address and not Path(address, LOCAL[kind]).exists():
        why = "nothing exists" if not Path(address).exists() else f"there is no {LOCAL[kind]}"
        raise InvalidArgument(f"{why} at {address}; the address of a server must begin with http:// or https://")


def _open_database(kind: str, address: str, collection: str, wanted: Wanted, key: str | None) -> Database:
    if kind == "pgvector":
        from regraft.sources.pgvector import PgvectorTable

        return PgvectorTable(address, collection, wanted)
    if kind == "qdrant":
        from regraft.sources.qdrant import QdrantCollection

        return QdrantCollection(address, collection, wanted, key)
    if kind == "chroma":
        from regraft.sources.chroma import ChromaCollection

        return ChromaCollection(address, collection, wanted)
    if kind == "lancedb":
        from regraft.sources.lancedb import LanceTable

        return LanceTable(address, collection, wanted)
    if kind == "weaviate":
        from regraft.sources.weaviate import WeaviateCollection

        return WeaviateCollection(address, collection, wanted, key)
    if kind == "opensearch":
        from regraft.sources.opensearch import OpenSearchIndex

        return OpenSearchIndex(address, collection, wanted, key)
    from regraft.sources.milvus import MilvusCollection

    return MilvusCollection(address, collection, wanted, key)
