"""Galleries, how the service is, and the audit."""

from __future__ import annotations

from typing import Any

from regraft.models.base import ApiModel


class GalleryIndex(ApiModel):
    """What large sealed segments are searched by, how it keeps vectors, and the recall it is to reach at k = 10."""

    kind: str
    storage: str
    recall: float


class CollectionInfo(ApiModel):
    """What an engine elsewhere has of a version's embeddings of one origin."""

    version: str
    origin: str
    lag: int
    """numbers of the gallery's change feed that it does not cover yet, as far as this process has seen"""
    here: int
    """embeddings that lie in this process's memory as long as the engine does not have them"""


class LoadingGallery(ApiModel):
    """A gallery that is on its way into memory."""

    gallery: str
    done: int
    """items that are in memory"""
    total: int
    """items there are; 0 as long as they are not counted"""


class GalleryInfo(ApiModel):
    """A gallery, as far as this process has followed its feed."""

    name: str
    current: str | None
    items: int
    mix: dict[str, int]
    seq: int
    created: float
    index: GalleryIndex
    indexed: int
    """items that an approximate index answers for; the others are compared one by one"""
    loaded: bool
    """whether it is in memory; one that is not is loaded by the next query, and tells no `indexed`"""
    bytes: int
    """what it takes of memory, roughly; 0 where it is not loaded"""
    loading: LoadingGallery | None
    """how far its load is, where one is under way; queries wait for its end, writes do not"""
    collections: list[CollectionInfo]
    """what lies in an engine elsewhere, or is to; empty where the gallery lies in memory, or is not loaded"""


class GalleryList(ApiModel):
    """Every gallery."""

    galleries: list[GalleryInfo]


class Readiness(ApiModel):
    """`status` is `ready`, or `degraded` when some things cannot be used; `problems` says which, and why."""

    status: str
    problems: list[str]
    galleries_loaded: int
    """galleries in memory; only of these are problems told"""
    galleries_bytes: int
    """what they take of memory, roughly"""
    loading: list[LoadingGallery]
    """galleries that are on their way into memory: queries of these wait"""


class AuditRecord(ApiModel):
    """A change: `subject` is what was changed, `evidence` what it did."""

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
    """The process answers."""

    status: str
    version: str
