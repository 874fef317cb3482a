from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from index.edges.transform import TransformedItems, load_forward, load_transform
from index.encoders.encoder import Encoder
from index.errors import InvalidVector, InvalidVersionFolder
from index.version import Version
from service.backfills import chunks, sweeps, worker
from service.backfills.embedder import _embed
from service.backfills.planning import Planner
from service.backfills.worker import Worker
from service.settings import Settings
from service.store.rows import BackfillRow
from service.store.tables import backfill_chunk, embedding, item
from service.store.vectors.codec import from_bytes
from staging.inputs.builders import make_image
from staging.states.working import SteppedWorker
from staging.waiting import until

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> dict[str, Version]:
    """`sided` keeps side-information, and `fct` and `carrying` have item edges from it; `carrying` keeps some too."""
    sided = served.add("sided", 3, side_dim=4)
    fct = served.add("fct", 5, edges=[("v1", "forward"), ("sided", "forward")])
    carrying = served.add("carrying", 5, side_dim=2, edges=[("sided", "forward")])

    return {"sided": sided, "fct": fct, "carrying": carrying}


@pytest.fixture
def a_worker(served: Any) -> Iterator[SteppedWorker]:
    made = SteppedWorker(served.runtime.settings)
    yield made
    made.close()


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> Callable[..., str]:
    """A gallery of twenty items of one version with another one current, and a backfill of it started."""

    def fill(old: str = "v1", new: str = "v2", **fields: Any) -> str:
        path = served.filled(pictures, old, new)
        assert served.http.post(f"{path}/backfills", json=fields).status_code == 202
        return path

    return fill


def last_backfill(served: Any, path: str) -> dict[str, Any]:
    return served.http.get(f"{path}/backfills").json()["backfills"][-1]


@pytest.fixture
def while_encoding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has something done with each batch before it is encoded, or with the first one."""
    encode = Encoder.encode_arrays

    def have(act: Callable[[Any], object], *, once: bool = False) -> None:
        due = iter([True]) if once else itertools.repeat(True)
        monkeypatch.setattr(
            Encoder, "encode_arrays", lambda self, batch: (next(due, False) and act(batch), encode(self, batch))[1]
        )

    return have


def test_reencoded_items_hold_what_the_encoder_gives_and_its_side_information(
    served: Any, filled: Any, a_worker: SteppedWorker, more: dict[str, Version]
) -> None:
    path = filled("v1", "sided", chunk_size=7)

    a_worker.drain()

    expected, held = (
        Encoder(more["sided"]).encode([make_image(n % 5, n) for n in range(20)]),
        served.stored(path, "sided"),
    )
    for column, width, rows in (("vector", 3, expected.vectors), ("side", 4, expected.side)):
        assert rows is not None
        given = [getattr(held[f"i{n}"], column) for n in range(20)]
        np.testing.assert_allclose(from_bytes(given, width), rows, atol=1e-6)
    assert last_backfill(served, path)["state"] == "done"


@pytest.mark.parametrize("old", ["v1", "sided"])
def test_transformed_items_hold_what_the_edge_gives_from_what_was_stored(
    served: Any, filled: Any, a_worker: SteppedWorker, versions: dict[str, Version], more: dict[str, Version], old: str
) -> None:
    path = filled(old, "fct", kind="transform")
    source = {**versions, **more}[old]
    before = served.stored(path, old)
    edge = next(e for e in more["fct"].edges if e.old == old)

    a_worker.drain()

    side = from_bytes([row.side for row in before.values()], 4) if source.card.side_dim else None
    vectors = from_bytes([row.vector for row in before.values()], source.card.dim)
    expected = load_transform(edge, more["fct"].card, source.card)(vectors, side)
    held = served.stored(path, "fct")
    np.testing.assert_allclose(from_bytes([held[name].vector for name in before], 5), expected, atol=1e-6)


def test_a_transformed_item_holds_the_side_information_that_the_edge_gives(
    served: Any, filled: Any, a_worker: SteppedWorker, more: dict[str, Version]
) -> None:
    path = filled("sided", "carrying", kind="transform")
    before = served.stored(path, "sided")
    a_worker.drain()

    forward = load_forward(more["carrying"].edges[0], more["carrying"].card, more["sided"].card)
    given = [row.vector for row in before.values()], [row.side for row in before.values()]
    expected = forward.transform_items(from_bytes(given[0], 3), from_bytes(given[1], 4))
    held = served.stored(path, "carrying")
    assert expected.side_NS is not None
    np.testing.assert_array_equal(from_bytes([held[name].side for name in before], 2), expected.side_NS)


def test_an_item_without_the_side_information_its_edge_needs_fails_alone(
    served: Any, filled: Any, a_worker: SteppedWorker
) -> None:
    path = filled("sided", "fct", kind="transform")
    key = select(item.c.id).where(item.c.external_id == "i5").order_by(item.c.id.desc()).limit(1).scalar_subquery()
    with served.runtime.database.write() as connection:
        connection.execute(update(embedding).where(embedding.c.item_id == key).values(side=None))

    a_worker.drain()

    ended = last_backfill(served, path)
    assert (ended["state"], ended["done"], ended["failed"]) == ("done", 19, 1)
    (failure,) = served.http.get(f"/backfills/{ended['id']}/failures").json()["failures"]
    assert failure["item"] == "i5"
    assert "side-information" in failure["reason"]


def test_an_image_that_the_encoder_refuses_fails_alone(
    served: Any, filled: Any, a_worker: SteppedWorker, while_encoding: Any
) -> None:
    path = filled(attempts=1)
    bad = np.float32(np.asarray(make_image(13 % 5, 13))[0, 0]) / 255

    def refuse(batch: Any) -> None:
        if np.isclose((batch[:, 0, 0, 0] + 1) / 2, bad).any():
            raise InvalidVersionFolder("encoder.onnx gives numbers that are not finite")

    while_encoding(refuse)

    a_worker.drain()

    ended = last_backfill(served, path)
    failures = served.http.get(f"/backfills/{ended['id']}/failures").json()["failures"]
    assert "i13" in [f["item"] for f in failures]
    assert ended["done"] + ended["failed"] == 20
    assert ended["failed"] < 4


def test_several_workers_share_the_chunks_and_end_in_the_state_of_one(
    served: Any, filled: Any, pictures: list[bytes]
) -> None:
    alone, shared = filled(chunk_size=1), filled(chunk_size=1)
    workers = [SteppedWorker(served.runtime.settings) for _ in range(4)]
    threads = [threading.Thread(target=each.drain, daemon=True) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in workers:
        each.drain()
        each.close()

    ended = last_backfill(served, shared)
    assert (ended["state"], ended["done"], ended["skipped"], ended["failed"]) == ("done", 20, 0, 0)
    assert served.stored(alone, "v2") == served.stored(shared, "v2")


def test_a_long_chunk_keeps_its_lease(
    served: Any, filled: Any, while_encoding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder takes two and a half leases; another worker looks all the time and gets nothing."""
    path = filled(chunk_size=20)
    settings = served.runtime.settings.model_copy(update={"lease_seconds": 1.2})
    encoding = threading.Event()
    while_encoding(lambda batch: (encoding.set(), time.sleep(3.0)))
    monkeypatch.setattr(Encoder, "_run_probe", lambda *_: None)
    holder, other = SteppedWorker(settings), SteppedWorker(settings)
    thread = threading.Thread(target=holder.step, daemon=True)
    thread.start()
    assert encoding.wait(10)

    while thread.is_alive():
        assert not other.step()
        time.sleep(0.02)

    thread.join()
    holder.close()
    other.close()
    assert last_backfill(served, path)["done"] == 20


def test_a_locked_database_is_waited_for(
    served: Any, filled: Any, a_worker: SteppedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled()
    real, failures = chunks.commit, iter(range(3))

    def locked(*args: Any) -> Any:
        if next(failures, None) is not None:
            raise OperationalError("commit", {}, Exception("database is locked"))
        return real(*args)

    monkeypatch.setattr(chunks, "commit", locked)

    a_worker.drain()

    assert next(failures, None) is None
    assert (last_backfill(served, path)["done"], last_backfill(served, path)["skipped"]) == (20, 0)


def test_blobs_out_of_reach_fail_no_item_but_wait_for_the_next_lease(
    served: Any, filled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled()
    number = last_backfill(served, path)["id"]
    settings = served.runtime.settings.model_copy(update={"lease_seconds": 0.05})
    a_worker = SteppedWorker(settings)
    with monkeypatch.context() as patch:
        patch.setattr("service.store.image_store.blobs.Blobs._read", _unreachable)
        assert not a_worker.step()
    assert "action=step_failed" in caplog.text
    assert last_backfill(served, path)["failed"] == 0
    with served.runtime.database.lookup() as connection:
        # Nobody's: a worker that lives has nothing against the items.
        owners = select(backfill_chunk.c.lease_owner).where(backfill_chunk.c.backfill_id == number)
        assert connection.execute(owners).scalars().all() == [None]
    time.sleep(0.06)

    a_worker.drain()

    a_worker.close()
    assert (last_backfill(served, path)["done"], last_backfill(served, path)["failed"]) == (20, 0)


def _unreachable(*_: Any) -> bytes:
    raise ConnectionError("no route to host")


def test_pausing_while_a_chunk_is_computed_writes_nothing_and_frees_the_chunk(
    served: Any, filled: Any, a_worker: SteppedWorker, while_encoding: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = filled(chunk_size=20)
    number = last_backfill(served, path)["id"]
    while_encoding(lambda batch: served.http.post(f"/backfills/{number}/pause"), once=True)

    a_worker.step()

    assert "action=chunk_lost" in caplog.text
    assert served.http.get(path).json()["mix"] == {"v1": 20}
    with served.runtime.database.lookup() as connection:
        states = select(backfill_chunk.c.state).where(backfill_chunk.c.backfill_id == number)
        assert connection.execute(states).scalars().all() == ["todo"]
    served.http.post(f"/backfills/{number}/resume")
    a_worker.drain()
    assert last_backfill(served, path)["done"] == 20


def test_a_rollback_while_a_chunk_is_computed_wins(
    served: Any, filled: Any, a_worker: SteppedWorker, while_encoding: Any
) -> None:
    path = filled(chunk_size=20)
    while_encoding(lambda batch: served.http.post(f"{path}/rollback"), once=True)

    a_worker.drain()

    assert last_backfill(served, path)["state"] == "cancelled"
    assert served.stored(path, "v2") == {}
    shown = served.http.get(path).json()
    assert (shown["current"], shown["mix"]) == ("v1", {"v1": 20})


def test_what_is_deleted_or_replaced_while_its_chunk_is_computed_stays_so(
    served: Any, filled: Any, a_worker: SteppedWorker, while_encoding: Any
) -> None:
    path = filled(chunk_size=20)

    def change(batch: Any) -> None:
        served.http.delete(f"{path}/items/i1")
        new = {"version": "v1", "items": [{"id": "i2", "metadata": {}, "embedding": [0, 0, 0, 1]}]}
        assert served.http.post(f"{path}/items?replace=true", json=new).status_code == 200

    while_encoding(change, once=True)
    a_worker.drain()

    ended = last_backfill(served, path)
    assert (ended["state"], ended["done"], ended["skipped"], ended["failed"]) == ("done", 18, 2, 0)
    assert served.http.get(f"{path}/items/i1").status_code == 404
    assert [e["origin"] for e in served.http.get(f"{path}/items/i2").json()["embeddings"]] == ["supplied"]
    served.runtime.replica.refresh(served.runtime.replica.find(path.rpartition("/")[2]).id)
    assert served.http.get(path).json()["mix"] == {"v1": 1, "v2": 18}


def test_told_to_stop_it_finishes_the_chunk_in_hand_and_no_other(served: Any, filled: Any, while_encoding: Any) -> None:
    path = filled(chunk_size=5)
    stop = threading.Event()
    while_encoding(lambda batch: len(batch) == 5 and stop.set())

    worker.run(served.runtime.settings, stop)

    assert last_backfill(served, path)["done"] == 5


def test_told_to_stop_it_plans_no_further(served: Any, filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(self: Planner, job: BackfillRow) -> None:
        with served.runtime.database.write() as connection:
            sweeps.release_sweep(connection, job)

    stop = threading.Event()
    write = sweeps._Sweep._write
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "plan", leave)
        patch.setattr(sweeps, "CHUNKS", 1)
        patch.setattr(sweeps._Sweep, "_write", lambda *given: (write(*given), stop.set())[0])
        path = filled(chunk_size=5)

        worker.run(served.runtime.settings, stop)

        left = last_backfill(served, path)
        assert (left["planning"], left["total"]) == (True, 5)

    def is_done() -> bool:
        served.work()
        return bool(last_backfill(served, path)["done"] == 20)

    # The service's own planner may hold the sweep at the moment when the worker looks.
    until(is_done)


def test_a_new_data_folder_is_made_ready_and_said_to_be_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker may be started before its service, or in the wrong folder, where it would wait without a word."""
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(Settings(data=tmp_path / "data"), stop), daemon=True)

    thread.start()
    stop.set()
    thread.join(20)

    assert (tmp_path / "data" / "regraft.db").exists()
    assert f"action=database_was_empty database=sqlite:///{tmp_path}/data/regraft.db" in caplog.text
    caplog.clear()
    worker.run(Settings(data=tmp_path / "data"), stop)
    assert "database_was_empty" not in caplog.text


def test_waiting_for_a_database_that_stays_away_ends_with_the_stop(tmp_path: Path) -> None:
    stop = threading.Event()
    settings = Settings(data=tmp_path, database_url=f"sqlite:///{tmp_path}/nowhere/regraft.db")
    away = Worker(settings, stop)
    thread = threading.Thread(target=away.work, daemon=True)

    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    stop.set()
    thread.join(5)

    assert not thread.is_alive()
    away.close()


def test_one_bad_input_never_costs_the_others_theirs() -> None:
    def picky(xs: Any) -> TransformedItems:
        if -1 in xs:
            raise InvalidVector("below zero")
        return TransformedItems(np.float32([[x] for x in xs]), None, np.float32(xs) / 10)

    inputs = [(SimpleNamespace(id=n, seq=10 + n), -1 if n in {2, 5} else n) for n in range(7)]
    moved, failed = _embed(inputs, picky)

    assert [row for m in moved for row in zip(m.item_ids, m.seqs, m.vectors[:, 0].tolist(), strict=True)] == [
        (n, 10 + n, n) for n in (0, 1, 3, 4, 6)
    ]
    assert [u for m in moved for u in (m.uncertainty if m.uncertainty is not None else ())] == pytest.approx(
        [0, 0.1, 0.3, 0.4, 0.6]
    )
    assert [(f.item_id, f.seq, f.reason) for f in failed] == [(2, 12, "below zero"), (5, 15, "below zero")]
