"""The index configuration of a gallery."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class IndexKind(StrEnum):
    """The index over large sealed segments."""

    AUTO = "auto"
    EXACT = "exact"
    HNSW = "hnsw"
    IVF = "ivf"
    PGVECTOR = "pgvector"
    MILVUS = "milvus"

    @property
    def is_remote(self) -> bool:
        """Whether vectors are stored in a remote engine."""
        return self in {IndexKind.PGVECTOR, IndexKind.MILVUS}


class Storage(StrEnum):
    """How an approximate index stores its vectors; candidates are always scored by the float32 rows."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"


class IndexConfig(BaseModel):
    """The index of a gallery."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: IndexKind = IndexKind.AUTO
    """what searches sealed segments; `auto`: lists or a graph, whichever reaches the recall for less; or a scan"""
    storage: Storage = Storage.FLOAT32
    """how an approximate index keeps vectors"""
    recall: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """share of the exact ten best that approximate search is to find, measured when a segment is sealed"""
