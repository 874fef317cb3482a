"""kill -9 of the real service while a backfill is measured: the curve goes on, and no mark is measured twice."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import insert, select, update

from service.store.tables import backfill_point
from staging.api.streams import events
from staging.waiting import until

MARKS = 12


def test_the_curve_goes_on_where_it_was(site: Any) -> None:
    server, worker = site.server(), site.worker()
    body = {"chunk_size": 2, "rate": 20, "curve": {"label": "label", "metric": "mAP@1.0", "marks": MARKS}}
    number = site.http.post("/galleries/g/backfills", json=body).json()["id"]
    until(lambda: len(measured(site, number)) >= 4, worker)
    seen = point_events(site, number, until=3)

    server.kill()
    server.wait()
    before = measured(site, number)
    with site.database.write() as connection:
        # What it was measuring when it died, at a mark that the backfill leaves behind meanwhile.
        dead = {"backfill_id": number, "owner": "dead", "claimed": 0.0}
        mine = (backfill_point.c.backfill_id == number, backfill_point.c.event.is_(None))
        connection.execute(update(backfill_point).where(*mine).values(claimed=0.0))  # so that nobody waits for it
        for mark in set(range(MARKS)) - {point.mark for point in claimed(connection, number)}:
            connection.execute(insert(backfill_point).values(mark=mark, **dead))
    server = site.server()
    until(lambda: shown(site, number)["curve"]["state"] != "measuring", worker)

    curve, after = shown(site, number)["curve"], measured(site, number)
    assert curve["state"] == "complete"
    assert after[: len(before)] == before
    assert len({point.mark for point in after}) == len(after) == len(curve["points"])
    shares = [point["share"] for point in curve["points"]]
    assert shares == sorted(set(shares))
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert {point["queries"] for point in curve["points"]} == {48}
    with site.database.lookup() as connection:
        assert all(point.event is not None for point in claimed(connection, number)), "claims of the dead are left"
    rest = point_events(site, number, last=seen[-1][0])
    assert [json.loads(data) for _, data in [*seen, *rest]] == curve["points"]


def measured(site: Any, number: int) -> list[Any]:
    with site.database.lookup() as connection:
        return [point for point in claimed(connection, number) if point.event is not None]


def claimed(connection: Any, number: int) -> list[Any]:
    mine = select(backfill_point).where(backfill_point.c.backfill_id == number)
    return list(connection.execute(mine.order_by(backfill_point.c.mark)).all())


def shown(site: Any, number: int) -> Any:
    return site.http.get(f"/backfills/{number}").json()


def point_events(site: Any, number: int, last: str = "", until: int | None = None) -> list[tuple[str, str]]:
    """(id, data) of the points behind an event, all of them or the first few."""
    headers = {"last-event-id": last} if last else {}
    found: list[tuple[str, str]] = []
    with site.http.stream("GET", f"/backfills/{number}/events", headers=headers) as response:
        for name, event, data in events(response.iter_text()):
            if name == "point":
                found.append((event, data))
            if len(found) == until:
                break
    return found
