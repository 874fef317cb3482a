"""Retirement: what it frees, what it waits for, and what there is no way back to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from service.store.galleries.embeddings import put_embeddings
from service.store.galleries.gallery import take_seq
from service.store.tables import deployment, gallery, item
from service.upgrades.deployments import retiring
from service.upgrades.deployments.transition import TransitionRequest
from staging.api.steps import at, deploy, detail, held, reencode, rollback

LATE = [{"id": "late", "embedding": [1, 0, 0, 0]}]


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures, about=lambda n: {"digit": n % 5})


def retire(served: Any, path: str, version: str = "v1", **options: Any) -> Any:
    return served.http.post(f"{path}/retire", json={"version": version, "reason": "done"}, **options)


def test_it_frees_embeddings_and_shards(served: Any, filled: str, pictures: list[bytes]) -> None:
    deploy(served, filled)
    reencode(served, filled)
    before = served.query(filled, pictures[0], k=20).json()["results"]

    rehearsed = retire(served, filled, params={"dry_run": "true"})
    assert held(served, filled, "v1") == 20
    done = retire(served, filled)

    assert done.json() == rehearsed.json()
    assert (done.json()["embeddings"], done.json()["bytes"]) == (20, 20 * 4 * 4)
    assert (held(served, filled, "v1"), held(served, filled, "v2")) == (0, 20)
    first = served.http.get(f"{filled}/deployments").json()["deployments"][0]
    assert first["state"] == "retired"
    assert detail(served, filled, first["id"])["transitions"][-1]["why"] == "done"
    assert served.query(filled, pictures[0], k=20).json()["results"] == before
    loaded = served.runtime.replica.find(filled.rpartition("/")[2])
    assert {version for version, _ in loaded.gallery._shards.serving()} == {"v2"}
    with served.runtime.database.lookup() as connection:
        assert connection.execute(select(deployment.c.to_free).where(deployment.c.to_free.is_not(None))).all() == []


@pytest.mark.parametrize(("meanwhile", "depending"), [("written", 1), ("deployed", 20)])
def test_what_comes_to_depend_on_it_after_every_item_was_looked_at_is_found(
    served: Any, filled: str, meanwhile: str, depending: int
) -> None:
    deploy(served, filled)
    reencode(served, filled)
    runtime, name = served.runtime, filled.rpartition("/")[2]
    version, gallery_id = runtime.registry.named("v1"), runtime.replica.find(name).id
    counted = retiring.precheck(runtime.database, runtime.registry, name, version, None)
    if meanwhile == "written":
        assert served.http.post(f"{filled}/items", json={"items": LATE, "version": "v1"}).status_code == 200
    else:
        served.add("beside", 4, edges=[("v1", "identity")])  # it reaches what v1 embedded, and nothing of v2
        assert deploy(served, filled, "beside").status_code == 201
    request = TransitionRequest("me", runtime.replica)

    with (
        runtime.database.write() as connection,
        pytest.raises(retiring.VersionInUse, match=f"{depending} items depend"),
    ):
        retiring.retire(connection, runtime.registry, gallery_id, version, request, counted)


def test_items_written_after_every_item_was_looked_at_are_counted_once(served: Any, filled: str) -> None:
    deploy(served, filled)
    reencode(served, filled)
    runtime, name = served.runtime, filled.rpartition("/")[2]
    version, gallery_id = runtime.registry.named("v1"), runtime.replica.find(name).id
    counted = retiring.precheck(runtime.database, runtime.registry, name, version, None)
    more = [{"id": f"i{n}", "embedding": [1, 0, 0, 0]} for n in (1, 2)]
    assert served.http.post(f"{filled}/items", json={"items": more, "version": "v1"}).status_code == 200
    assert served.http.delete(f"{filled}/items/i3").status_code == 204
    assert served.http.post(f"{filled}/items", json={"items": LATE, "version": "v1"}).status_code == 200
    hold_v2(served, filled)

    with runtime.database.write() as connection:
        request = TransitionRequest("me", runtime.replica)
        numbers = retiring.retire(connection, runtime.registry, gallery_id, version, request, counted)

    assert detail(served, filled, numbers[-1])["transitions"][-1]["evidence"]["embeddings"] == 20
    assert held(served, filled, "v1") == 20


def test_it_is_refused_while_items_depend_on_it_and_says_what_would_help(served: Any, filled: str) -> None:
    stuck = {"items": [{"id": "e", "embedding": [1, 0, 0, 0]}], "version": "v1"}
    assert served.http.post(f"{filled}/items", json=stuck).status_code == 200
    deploy(served, filled)

    refused = retire(served, filled)

    assert (refused.status_code, refused.json()["code"]) == (409, "version_in_use")
    assert "21 items depend on version 'v1'" in refused.json()["detail"]
    way_out = "1 can only be given embeddings by 'v2' made elsewhere, ingested again or deleted"
    assert f"a reencode backfill to 'v2' would move 20 of them; {way_out}" in refused.json()["detail"]
    assert held(served, filled, "v1") == 21


def test_a_current_or_coming_version_is_in_use_and_an_unknown_one_unknown(served: Any, filled: str) -> None:
    at(served, filled, "shadow")

    assert retire(served, filled, "v1").json()["code"] == "version_in_use"
    assert retire(served, filled, "v2").json()["code"] == "version_in_use"
    assert retire(served, filled, "plain").json()["code"] == "nothing_to_retire"
    assert retire(served, filled, "v9").status_code == 404


def test_there_is_no_way_back_to_a_retired_version_but_to_deploy_it_anew(served: Any, filled: str) -> None:
    deploy(served, filled)
    reencode(served, filled)
    retire(served, filled)

    refused = rollback(served, filled)
    assert (refused.status_code, refused.json()["code"]) == (409, "nothing_to_roll_back")
    assert "'v1' was retired" in refused.json()["detail"]
    assert deploy(served, filled, "v1").status_code == 201


def test_what_was_rolled_back_can_be_retired(served: Any, filled: str) -> None:
    deploy(served, filled)
    reencode(served, filled)
    rollback(served, filled)

    assert retire(served, filled, "v2").json()["embeddings"] == 20
    assert served.http.get(filled).json()["mix"] == {"v1": 20}
    assert rollback(served, filled).status_code == 409


def test_what_ended_without_an_embedding_can_be_retired(served: Any) -> None:
    path = served.gallery("v1")
    deploy(served, path)

    assert retire(served, path).json()["embeddings"] == 0
    assert retire(served, path).json()["code"] == "nothing_to_retire"


def test_what_a_backfill_gave_up_is_not_said_to_be_movable(served: Any, filled: str, pictures: list[bytes]) -> None:
    blobs = blobs_of(served, filled, ["i0", "i1", "i2"])
    served.runtime.blobs.remove(blobs)
    deploy(served, filled)
    reencode(served, filled)

    said = retire(served, filled).json()["detail"]
    assert "3 items depend on version 'v1'" in said
    assert "would move" not in said
    assert "a reencode backfill failed for 3 of them" in said
    assert "3 can only be given embeddings by 'v2' made elsewhere, ingested again or deleted" in said
    served.http.delete(f"{filled}/items/i1")
    assert served.ingest(filled, {"i0": pictures[0]}).status_code == 200
    supplied = {"version": "v2", "items": [{"id": "i2", "embedding": [1, 0, 0, 0, 0, 0]}]}
    assert served.http.put(f"{filled}/items:embeddings", json=supplied).json()["failed"] == 0
    assert retire(served, filled).json()["embeddings"] == 18  # 17 that moved, and i2, which got one beside it


def test_embeddings_that_came_with_items_after_it_can_be_freed_again(served: Any, filled: str) -> None:
    deploy(served, filled)
    reencode(served, filled)
    retire(served, filled)
    assert served.http.post(f"{filled}/items", json={"items": LATE, "version": "v1"}).status_code == 200
    assert retire(served, filled).json()["code"] == "version_in_use"
    hold_v2(served, filled)

    again = retire(served, filled)

    assert (again.status_code, again.json()["embeddings"]) == (200, 1)
    assert held(served, filled, "v1") == 0
    assert retire(served, filled).json()["code"] == "nothing_to_retire"
    assert detail(served, filled, again.json()["deployments"][0])["state"] == "retired"
    assert served.http.get(filled).json()["current"] == "v2"
    # No more than a record: it was never current, and is nothing to go back to.
    assert rollback(served, filled).json()["code"] == "nothing_to_roll_back"


def test_those_of_a_version_that_was_never_deployed_here_can_be_freed(served: Any, filled: str) -> None:
    deploy(served, filled)
    path = served.gallery("v2")
    assert served.http.post(f"{path}/items", json={"items": LATE, "version": "v1"}).status_code == 200
    hold_v2(served, path)

    rehearsed = retire(served, path, params={"dry_run": "true"})

    assert (rehearsed.json()["embeddings"], held(served, path, "v1")) == (1, 1)
    assert retire(served, path).json()["embeddings"] == 1
    assert held(served, path, "v1") == 0
    assert rollback(served, path).json()["code"] == "nothing_to_roll_back"


def blobs_of(served: Any, path: str, names: list[str]) -> list[str]:
    mine = (item.c.external_id.in_(names), gallery.c.name == path.rpartition("/")[2])
    with served.runtime.database.lookup() as connection:
        return list(connection.execute(select(item.c.blob).join(gallery).where(*mine)).scalars())


def hold_v2(served: Any, path: str) -> None:
    """Move the item `late` to v2 as a transform would: it keeps what it came with."""
    with served.runtime.database.write() as connection:
        late = select(item).join(gallery).where(item.c.external_id == "late", gallery.c.name == path.rpartition("/")[2])
        row = connection.execute(late).one()
        version_id = served.runtime.registry.named("v2").id
        put_embeddings(connection, row.gallery_id, version_id, "transformed", [row.id], np.eye(6, dtype=np.float32)[:1])
        seq = take_seq(connection, row.gallery_id, 1)
        connection.execute(update(item).where(item.c.id == row.id).values(seq=seq))
