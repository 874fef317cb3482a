"""The schema: SQL is the source of truth, everything else is derived from it (docs/design.md, section 4).

It works on SQLite and PostgreSQL: plain `JSON`, `String` with a named CHECK instead of an enum type, and integer keys,
which are rowids on SQLite. Vectors are little-endian float32 bytes. Times are UTC seconds since the epoch.
"""

from __future__ import annotations

from service.store.tables.audit_log import audit
from service.store.tables.backfills import backfill, backfill_chunk, backfill_curve, backfill_failure, backfill_point
from service.store.tables.deployments import deployment, deployment_transition, trial_report
from service.store.tables.galleries import embedding, gallery, gallery_snapshot, item, item_traffic
from service.store.tables.gates import calibration, evaluation, evaluation_embedding, evaluation_entry, gate_report
from service.store.tables.image_store import image_store
from service.store.tables.schema import Id, metadata
from service.store.tables.versions import edge, version

__all__ = [
    "Id",
    "audit",
    "backfill",
    "backfill_chunk",
    "backfill_curve",
    "backfill_failure",
    "backfill_point",
    "calibration",
    "deployment",
    "deployment_transition",
    "edge",
    "embedding",
    "evaluation",
    "evaluation_embedding",
    "evaluation_entry",
    "gallery",
    "gallery_snapshot",
    "gate_report",
    "image_store",
    "item",
    "item_traffic",
    "metadata",
    "trial_report",
    "version",
]
