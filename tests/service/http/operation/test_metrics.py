"""What Prometheus reads of a service."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from service.store.database.connections import Database

QUERY = "/v1/galleries/{name}/query"


def told(served: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = served.http.get(str(served.http.base_url).replace("/v1/", "/metrics"))
    assert answer.status_code == 200, answer.text
    families = text_string_to_metric_families(answer.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def of(samples: Any, name: str, **labels: str) -> float:
    return float(
        sum(value for (n, held), value in samples.items() if n == name and labels.items() <= dict(held).items())
    )


def test_what_readiness_lists_is_counted(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(told(served), "regraft_problems")

    monkeypatch.setattr(served.runtime.space, "problem", lambda: "the disk is full")

    assert of(told(served), "regraft_problems") == before + 1
    assert len(served.http.get("/health/ready").json()["problems"]) == before + 1


@pytest.mark.usefixtures("alone")
def test_requests_items_and_what_backfills_have_still_to_move_are_told(served: Any, pictures: list[bytes]) -> None:
    before = told(served)
    path = served.filled(pictures[:6], "v1", "v2")
    name = path.rpartition("/")[2]
    for body in ({"items": ["i0"], "k": 1}, {"version": "v1", "embeddings": [[1, 0, 0, 0]]}, {"items": ["none"]}):
        served.http.post(f"{path}/query", json=body)
    served.query(path, pictures[0], k=1)
    served.http.get("/nowhere")
    number = served.backfill(path, chunk_size=2)

    now = told(served)

    assert (
        of(now, "regraft_requests_total", route=QUERY, status="200")
        - of(before, "regraft_requests_total", route=QUERY, status="200")
        == 3
    )
    assert of(now, "regraft_requests_total", route=QUERY, status="404") == 1
    assert of(now, "regraft_requests_total", route="/v1/galleries/{name}/items", method="POST") >= 1
    assert of(now, "regraft_request_seconds_count", route=QUERY) >= 4
    assert not [labels for _, labels in now if name in dict(labels).get("route", "")]
    assert of(now, "regraft_items", gallery=name, version="v1") == 6
    assert of(now, "regraft_feed_lag", gallery=name) == 0
    assert of(now, "regraft_ready") == 1
    assert of(now, "regraft_backfill_items_waiting") == 6
    served.work()
    assert of(told(served), "regraft_backfill_items_waiting") == 0
    assert served.http.get(f"/backfills/{number}").json()["state"] == "done"


def test_routes_are_named_as_they_are_asked_for(served: Any) -> None:
    root = served.url
    for path in ("/console", "/docs", "/v1/versions", "/nowhere"):
        served.http.get(root + path)

    told_of = {str(dict(labels).get("route")) for name, labels in told(served) if name == "regraft_requests_total"}

    assert {"/console", "/docs", "/v1/versions", "other"} <= told_of
    assert not {"/v1/console", "/v1/docs"} & told_of


@pytest.mark.usefixtures("alone")
def test_what_the_process_itself_knows_is_told_while_the_database_is_away(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.gallery()

    def away(_: Database) -> Connection:
        raise OperationalError("select 1", None, Exception("connection refused"))

    monkeypatch.setattr(Database, "lookup", away)
    now = told(served)

    assert of(now, "regraft_ready") == 0
    assert of(now, "regraft_requests_total") > 0
    assert not [name for name, _ in now if name == "regraft_backfill_items_waiting"]
