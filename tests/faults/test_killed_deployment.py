"""kill -9 of the service between and inside the steps of a deployment: each step happened as a whole, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from service.store.tables import deployment, embedding, gallery, item
from staging.inputs.builders import image_bytes, make_image
from staging.waiting import until

V1, V2 = 1, 2
WAY = ("registered", "verified", "shadow", "canary", "current")


def doomed(site: Any, point: str, number: int) -> Any:
    process = site.launch("tests/faults/doomed_server.py", str(site.port), point, str(number))
    until(site.answers, process)
    return process


def dies(site: Any, process: Any, call: Callable[[], Any]) -> None:
    """The call kills the server; nobody knows from its answer what became of it."""
    with pytest.raises(httpx.TransportError):
        call()
    process.wait(timeout=30)


def deployments(site: Any) -> list[dict[str, Any]]:
    return list(site.http.get("/galleries/g/deployments").json()["deployments"])


def record(site: Any, number: int) -> list[str]:
    return [s["after"] for s in site.http.get(f"/galleries/g/deployments/{number}").json()["transitions"]]


def check_whole(site: Any) -> None:
    """Exactly one deployment is current, and it is the gallery's; every record ends in its deployment's state."""
    listed = deployments(site)
    (current,) = [d for d in listed if d["state"] == "current"]
    shown = site.http.get("/galleries/g").json()
    assert shown["current"] == current["version"]
    assert sum(shown["mix"].values()) == shown["items"] == 48
    assert len([d for d in listed if d["state"] in WAY[:-1]]) <= 1
    for one in listed:
        steps = record(site, one["id"])
        assert not steps or steps[-1] == one["state"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("number", [pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
def test_a_deployment_killed_inside_its_steps_has_not_happened(site: Any, number: int) -> None:
    process = doomed(site, "stepped", number)
    before = deployments(site)

    dies(site, process, lambda: site.http.post("/galleries/g/deployments", json={"version": "v1"}))
    site.server()

    assert deployments(site) == before
    check_whole(site)
    assert site.http.post("/galleries/g/deployments", json={"version": "v1"}).status_code == 201
    check_whole(site)


@pytest.mark.slow
@pytest.mark.parametrize("until", WAY)
def test_a_step_that_was_committed_stands_and_the_next_one_goes_on(site: Any, until: str) -> None:
    process = doomed(site, "committed", 1)

    dies(site, process, lambda: site.http.post("/galleries/g/deployments", json={"version": "v1", "until": until}))
    site.server()

    newest = deployments(site)[-1]
    assert (newest["version"], newest["state"]) == ("v1", until)
    check_whole(site)
    for step in WAY[WAY.index(until) + 1 :]:
        taken = site.http.post(f"/galleries/g/deployments/{newest['id']}/advance", json={"to": step})
        assert taken.json()["state"] == step
    check_whole(site)
    assert site.http.post("/galleries/g/rollback").json()["version"] == "v2"
    check_whole(site)


@pytest.mark.parametrize(
    ("point", "number"),
    [pytest.param("retired", 1, marks=SLOW), pytest.param("freeing", 1, marks=SLOW), ("freeing", 3)],
)
def test_a_retirement_goes_on_at_the_next_start(site: Any, point: str, number: int) -> None:
    site.start_backfill()
    site.work()
    process = doomed(site, point, number)
    answer = site.state()

    dies(site, process, lambda: site.http.post("/galleries/g/retire", json={"version": "v1"}))
    assert held(site, "g", V1) > 0
    site.server()

    assert held(site, "g", V1) == 0
    assert {name: active for name, (active, _) in site.state().items()} == dict.fromkeys(answer, V2)
    assert [d["state"] for d in deployments(site)] == ["retired", "current"]
    assert held(site, "h", V1) == 48  # another gallery keeps its own
    check_whole(site)
    with site.database.lookup() as connection:
        assert connection.execute(select(deployment.c.to_free).where(deployment.c.to_free.is_not(None))).all() == []


def test_what_a_deleted_gallery_held_is_freed_after_the_next_start(site: Any) -> None:
    process = doomed(site, "deleting", 3)

    with suppress(httpx.TransportError):  # the answer may come before the thread has freed so much
        site.http.delete("/galleries/g", params={"confirm": "g"})
    process.wait(timeout=30)
    with site.database.lookup() as connection:
        assert connection.execute(select(func.count()).select_from(item)).scalar_one() == 4 * 48 - 30
    server = site.server()

    assert [one["name"] for one in site.http.get("/galleries").json()["galleries"]] == ["h", "s", "t"]
    assert site.http.get("/galleries/g").status_code == 404

    def freed() -> bool:
        with site.database.lookup() as connection:
            return list(connection.execute(select(gallery.c.name)).scalars()) == ["h", "s", "t"]

    until(freed, server)
    assert held(site, "h", V1) == 48
    with site.database.lookup() as connection:
        assert connection.execute(select(func.count()).select_from(item)).scalar_one() == 3 * 48


def held(site: Any, name: str, version: int) -> int:
    with site.database.lookup() as connection:
        joined = embedding.join(item, item.c.id == embedding.c.item_id).join(gallery)
        mine = (gallery.c.name == name, embedding.c.version_id == version)
        return int(connection.execute(select(func.count()).select_from(joined).where(*mine)).scalar_one())


@pytest.mark.slow
def test_a_canary_killed_while_it_rolls_itself_back_does_so_after_the_next_start(site: Any) -> None:
    process = doomed(site, "rolled_back", 1)
    limits = {"share": 1.0, "max_p99_ms": 0.001, "min_queries": 1}
    body = {"version": "v1", "until": "canary", "canary": limits}
    number = site.http.post("/galleries/g/deployments", json=body).json()["id"]
    files = [("images", ("q", image_bytes(make_image(3, 9))))]

    def ask() -> int:
        return int(site.http.post("/galleries/g/query", data={"k": "3"}, files=files).status_code)

    assert ask() == 200
    process.wait(timeout=60)
    site.server()
    assert deployments(site)[-1]["state"] == "canary"
    check_whole(site)
    assert ask() == 200
    deadline = time.monotonic() + 60
    while deployments(site)[-1]["state"] == "canary":
        assert time.monotonic() < deadline
        time.sleep(0.02)

    shown = site.http.get(f"/galleries/g/deployments/{number}").json()
    assert (shown["state"], shown["transitions"][-1]["who"]) == ("rolled_back", "canary")
    check_whole(site)
