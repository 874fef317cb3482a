"""Fake clients of other databases with ten rows, which answer the calls of the sources as the real ones do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)
IDS = [str(n) for n in range(10)]


class FakeQdrant:
    points: ClassVar = [SimpleNamespace(id=n, vector=ROWS[n].tolist(), payload={"n": n}) for n in range(10)]
    vectors: Any = SimpleNamespace(size=4, distance=SimpleNamespace(value="Cosine"))

    def __init__(self, path: str) -> None:
        pass

    def get_collection(self, name: str) -> Any:
        if name == "gone":
            raise ValueError("Collection gone not found")
        return SimpleNamespace(config=SimpleNamespace(params=SimpleNamespace(vectors=self.vectors)))

    def count(self, _: str) -> Any:
        return SimpleNamespace(count=10)

    def scroll(self, _: str, *, limit: int, offset: Any, **__: Any) -> Any:
        at = offset or 0
        return self.points[at : at + limit], at + limit if at + limit < len(self.points) else None


class FakeChroma:
    metadata: Any = None
    configuration_json: ClassVar[Any] = {"hnsw": {"space": "l2"}, "spann": None}

    def __init__(self, path: str) -> None:
        pass

    def get_collection(self, _: str) -> FakeChroma:
        return self

    def count(self) -> int:
        return 10

    def get(self, limit: int, offset: int, include: Any) -> Any:
        part = slice(offset, offset + limit)
        told = [{"n": n} for n in range(10)[part]]
        return {"ids": IDS[part], "embeddings": ROWS[part], "metadatas": told, "documents": None}


class FakeLance:
    schema = pa.schema({"id": pa.int64(), "vector": pa.list_(pa.float32(), 4), "n": pa.int64()})

    def open_table(self, _: str) -> FakeLance:
        return self

    search = open_table

    def __getattribute__(self, name: str) -> Any:
        return (lambda: self) if name == "search" else object.__getattribute__(self, name)

    def count_rows(self) -> int:
        return 10

    def limit(self, many: int) -> FakeLance:
        self.many = many
        return self

    def offset(self, at: int) -> FakeLance:
        self.at = at
        return self

    def to_list(self) -> Any:
        return [{"id": n, "vector": ROWS[n].tolist(), "n": n} for n in range(10)[self.at : self.at + self.many]]


class FakeMilvus:
    about: ClassVar[dict[str, Any]] = {"enable_dynamic_field": False}
    fields: ClassVar = {"id": "INT64", "vector": "FLOAT_VECTOR", "n": "INT64"}

    def __init__(self, uri: str, token: str) -> None:
        pass

    def describe_collection(self, _: str) -> Any:
        fields = [{"name": name, "type": SimpleNamespace(name=kind)} for name, kind in self.fields.items()]
        return {"fields": [{**field, "is_primary": field["name"] == "id"} for field in fields], **self.about}

    def load_collection(self, _: str) -> None: ...

    def list_indexes(self, _: str, field_name: str) -> Any:
        return [field_name]

    def describe_index(self, _: str, name: str) -> Any:
        return {"index_type": "AUTOINDEX", "metric_type": "IP"}

    def get_collection_stats(self, _: str) -> Any:
        return {"row_count": 10}

    def query_iterator(self, _: str, batch_size: int, filter: str, output_fields: Any) -> Any:  # noqa: A002
        at = int(filter.rpartition(">")[2]) + 1 if filter else 0
        rows = [{"id": n, "vector": ROWS[n].tolist(), "n": n} for n in range(at, 10)]
        pages = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        return SimpleNamespace(next=lambda: pages.pop(0) if pages else [], close=lambda: None)


FAKES = {
    "qdrant": ("qdrant_client", SimpleNamespace(QdrantClient=FakeQdrant)),
    "chroma": ("chromadb", SimpleNamespace(PersistentClient=FakeChroma)),
    "lancedb": ("lancedb", SimpleNamespace(connect=lambda _: FakeLance())),
    "milvus": ("pymilvus", SimpleNamespace(MilvusClient=FakeMilvus)),
}
