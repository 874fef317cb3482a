"""A row's fields are its table's columns, in their order: that is how `rows` reads them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from service.store import rows, tables


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (rows.VersionRow, tables.version),
        (rows.EdgeRow, tables.edge),
        (rows.GalleryRow, tables.gallery),
        (rows.ItemRow, tables.item),
        (rows.GateRow, tables.gate_report),
        (rows.DeploymentRow, tables.deployment),
        (rows.TransitionRow, tables.deployment_transition),
        (rows.EvaluationRow, tables.evaluation),
        (rows.BackfillRow, tables.backfill),
    ],
)
def test_a_row_has_its_tables_columns(kind, table):
    named = getattr(kind, "_fields", None) or tuple(field.name for field in fields(kind))
    assert named == tuple(table.columns.keys())
