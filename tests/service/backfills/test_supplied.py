"""A backfill that waits for embeddings from outside: it counts what is missing through every kind of write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sqlalchemy import update

from service.backfills import supplied
from service.backfills.planning import Planner
from service.backfills.states import BackfillState
from service.doctor.examination import Doctor
from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import gallery_named
from service.store.galleries.items import rows_of
from service.store.tables import embedding
from staging.api.served import problem
from staging.waiting import until

pytestmark = pytest.mark.usefixtures("alone")


def put(served: Any, path: str, *names: str, version: str = "v2") -> Any:
    dim = {"v1": 4, "v2": 6}[version]
    items = [{"id": name, "embedding": np.eye(dim)[0].tolist()} for name in names]
    return served.http.put(f"{path}/items:embeddings", json={"version": version, "items": items})


def post(served: Any, path: str, *names: str, version: str, **params: Any) -> None:
    dim = {"v1": 4, "v2": 6}[version]
    items = [{"id": name, "embedding": np.eye(dim)[1].tolist()} for name in names]
    body = {"version": version, "items": items}
    assert served.http.post(f"{path}/items", json=body, params=params).status_code == 200


def counted(served: Any, number: int) -> tuple[str, int, int, int, int]:
    shown = served.http.get(f"/backfills/{number}").json()
    return shown["state"], shown["total"], shown["done"], shown["skipped"], shown["remaining"]


@pytest.fixture
def path(served: Any) -> str:
    """Items a to e by v1, v2 current; a holds v2 too, b what a transform made of it."""
    path: str = served.gallery()
    post(served, path, *"abcde", version="v1")
    served.deploy(path, "v2")
    put(served, path, "a")
    with served.runtime.database.write() as connection:
        rows = rows_of(connection, gallery_named(connection, path.rpartition("/")[2]).id, ["b"])
        vectors = np.ones((1, 6), np.float32)
        v2 = served.runtime.registry.named("v2").id
        put_embeddings(connection, rows[0].gallery_id, v2, "transformed", [rows[0].id], vectors)
    return path


def test_it_counts_what_comes_goes_and_is_added_and_is_done_with_the_last(served: Any, path: str) -> None:
    number = served.backfill(path, kind="supplied")
    assert counted(served, number) == ("running", 4, 0, 0, 4)

    served.work()  # a worker has nothing to do with it
    put(served, path, "b", "a", "nobody")
    assert counted(served, number) == ("running", 4, 1, 0, 3)
    post(served, path, "f", version="v1")
    assert counted(served, number) == ("running", 5, 1, 0, 4)
    served.http.delete(f"{path}/items/c")
    assert counted(served, number) == ("running", 5, 1, 1, 3)
    post(served, path, "d", "g", version="v2")
    assert counted(served, number) == ("running", 5, 2, 1, 2)
    post(served, path, "a", version="v1", replace=True)  # it held one, and holds it no more
    assert counted(served, number) == ("running", 6, 2, 1, 3)
    put(served, path, "a", "e")
    put(served, path, "f")

    assert counted(served, number) == ("done", 6, 5, 1, 0)
    assert served.http.get(f"{path}/items:missing", params={"version": "v2"}).json()["ids"] == []
    assert served.http.post(f"{path}/retire", json={"version": "v1", "reason": "moved"}).status_code == 200


@pytest.mark.parametrize("small", [True, False])
def test_how_many_are_missing_is_counted_beside_writes(
    served: Any, path: str, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    writing, count_missing, counts = served.runtime.database._write_lock, supplied.count_missing, []

    def beside(*about: Any) -> int:
        found = count_missing(*about)
        counts.append((found, writing.locked()))
        put(served, path, "b", "c")
        post(served, path, "f", version="v1")
        served.http.delete(f"{path}/items/d")
        return found

    monkeypatch.setattr(supplied, "count_missing", beside)
    monkeypatch.setattr(Planner, "_is_small", lambda *_: small)
    number = served.backfill(path, kind="supplied")

    until(lambda: not served.http.get(f"/backfills/{number}").json()["planning"])
    assert counts == [(4, False)]
    assert counted(served, number) == ("running", 5, 2, 1, 2)
    put(served, path, "e", "f")
    assert counted(served, number) == ("done", 5, 4, 1, 0)


def test_of_two_processes_that_count_one_says_how_many_there_are(
    served: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(Planner, "plan", lambda _, job: begun.append(job))
    number = served.backfill(path, kind="supplied")

    assert [supplied.count(served.runtime.database, begun[0]) for _ in range(2)] == [BackfillState.RUNNING, None]

    assert counted(served, number) == ("running", 4, 0, 0, 4)


def test_the_last_missing_item_may_be_deleted_and_a_pause_ends_nothing(served: Any, path: str) -> None:
    number = served.backfill(path, kind="supplied")
    put(served, path, *"bcd")
    served.http.post(f"/backfills/{number}/pause")
    served.http.post(f"{path}/items:delete", json={"ids": ["e", "x"]})
    assert counted(served, number) == ("paused", 4, 3, 1, 0)

    resumed = served.http.post(f"/backfills/{number}/resume").json()

    assert (resumed["state"], resumed["remaining"]) == ("done", 0)
    assert counted(served, served.backfill(path, kind="supplied")) == ("done", 0, 0, 0, 0)


def test_what_the_doctor_removes_is_waited_for_again(served: Any, path: str) -> None:
    number = served.backfill(path, kind="supplied")
    with served.runtime.database.write() as connection:
        (a,) = rows_of(connection, gallery_named(connection, path.rpartition("/")[2]).id, ["a"])
        mine = (embedding.c.item_id == a.id, embedding.c.version_id == served.runtime.registry.named("v2").id)
        connection.execute(update(embedding).where(*mine).values(vector=b"1234"))

    Doctor(served.runtime.settings, served.runtime.database).examine(fix=True)

    assert counted(served, number) == ("running", 5, 0, 0, 5)


def test_an_estimate_counts_and_options_that_bound_it_are_refused(served: Any, path: str) -> None:
    dry = served.http.post(f"{path}/backfills", json={"kind": "supplied"}, params={"dry_run": True}).json()
    assert (dry["items"], dry["seconds"], dry["bytes_after"] - dry["bytes_now"]) == (4, None, 3 * 6 * 4)
    for option in ({"share": 0.5}, {"limit": 1}, {"order": "newest"}):
        refused = served.http.post(f"{path}/backfills", json={"kind": "supplied", **option})
        problem(refused, 422, "invalid_argument")
        assert refused.json()["errors"][0]["pointer"] == f"/{next(iter(option))}"
