"""The description of the API: it is fresh, and what it promises is what a real server answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from service.http.openapi import codes_by_status
from service.http.openapi_file import written


def test_the_committed_description_is_fresh() -> None:
    committed = Path(__file__).parents[2] / "docs" / "openapi.json"

    assert committed.read_text() == written(), "run `make openapi`"


def test_every_operation_has_a_name_of_its_own_and_says_how_it_fails() -> None:
    document = json.loads(written())
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]

    assert "galleries_create" in names
    assert len(names) == len(set(names))
    assert all(re.fullmatch("[a-z]+(_[a-z]+)+", name) for name in names)
    for operation in operations:
        assert {"401", "422", "503"} <= set(operation["responses"])
    assert document["security"] == [{"bearer": []}]
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["paths"]["/v1/health"]["get"]["security"] == []


def test_every_status_of_an_error_is_described() -> None:
    described = json.loads(written())["components"]["responses"]

    for status, codes in codes_by_status().items():
        if status != 405:  # answers what is no operation
            assert all(code in described[f"Problem{status}"]["description"] for code in codes)
