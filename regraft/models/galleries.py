"""Galleries, the health of the service, and the audit log."""

from __future__ import annotations

from typing import Any

from regraft.models.base import ApiModel


class GalleryIndex(ApiModel):
    """The index of large sealed segments, its storage of vectors, and its recall aim at k = 10."""

    kind: str
    storage: str
    recall: float


class CollectionInfo(ApiModel):
    """The state of one version's embeddings of one origin in an external engine."""

    version: str
    origin: str
    lag: int
    """numbers of the gallery's change feed that the engine does not cover yet, as far as this process knows"""
    here: int
    """embeddings in this process's memory, because the engine does not have them yet"""


class LoadingGallery(ApiModel):
    """A gallery that is being loaded into memory."""

    gallery: str
    done: int
    """items in memory"""
    total: int
    """number of items; 0 until they are counted"""


class GalleryInfo(ApiModel):
    """A gallery, as of this process's position in its change feed."""

    name: str
    current: str | None
    items: int
    mix: dict[str, int]
    seq: int
    created: float
    index: GalleryIndex
    indexed: int
    """items in an approximate index; the others are compared exhaustively"""
    loaded: bool
    """whether it is in memory; if not, the next query loads it, and `indexed` is 0"""
    bytes: int
    """approximate memory; 0 if it is not loaded"""
    loading: LoadingGallery | None
    """the progress of its load, if it is being loaded; queries wait for the end, writes do not"""
    collections: list[CollectionInfo]
    """its collections in an external engine, existing or planned; empty without an engine, or if it is not loaded"""


class GalleryList(ApiModel):
    """Every gallery."""

    galleries: list[GalleryInfo]


class Readiness(ApiModel):
    """`status` is `ready`, or `degraded` if some parts cannot be used; `problems` lists them with the reasons."""

    status: str
    problems: list[str]
    galleries_loaded: int
    """galleries in memory; `problems` covers only these"""
    galleries_bytes: int
    """their approximate memory"""
    loading: list[LoadingGallery]
    """galleries that are being loaded into memory; their queries wait"""


class AuditRecord(ApiModel):
    """A change of `subject`; `evidence` is its effect."""

    id: int
    at: float
    who: str
    action: str
    subject: str
    why: str
    evidence: dict[str, Any]


class AuditPage(ApiModel):
    """Changes, newest first."""

    audit: list[AuditRecord]


class Health(ApiModel):
    """The process is alive."""

    status: str
    version: str
