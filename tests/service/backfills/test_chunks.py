"""Planning and chunks against a database without versions on disk: planned, claimed, committed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sqlalchemy import event, select, update
from sqlalchemy.dialects import postgresql

from service.backfills import chunks, leasing
from service.backfills.chunks import ChunkLost
from service.backfills.outcome import EmbeddedItems
from service.backfills.states import BackfillState, Kind
from service.errors import UnknownGallery
from service.store.galleries.deletion import delete_gallery, forget_gallery, free_items
from service.store.galleries.items import delete_items
from service.store.tables import backfill, embedding
from staging.states.plans import LEASE, V1, V2, V3, Clock, Planning, flat


class TestPlan:
    def test_items_are_cut_into_chunks_in_the_order_asked_for(self, stage: Planning) -> None:
        gallery_id = stage.gallery(10)

        oldest, newest, drawn = (
            stage.planned(stage.start(gallery_id, item_order=order)) for order in ("oldest", "newest", "random")
        )

        assert [len(chunk) for chunk in oldest] == [4, 4, 2]
        assert flat(oldest) == [f"i{n}" for n in range(10)]
        assert flat(newest) == [f"i{n}" for n in reversed(range(10))]
        assert sorted(flat(drawn)) == flat(oldest)
        assert flat(drawn) not in (flat(oldest), flat(newest))

    def test_reencode_takes_what_has_an_image_and_no_embedding_of_its_own(self, stage: Planning) -> None:
        gallery_id = stage.gallery(2)
        stage.store(gallery_id, ["without image"], blob=None)
        stage.store(gallery_id, ["encoded"], V2)
        stage.store(gallery_id, ["supplied"], V2, origin="supplied")
        stage.store(gallery_id, ["transformed"], V2, origin="transformed")
        with stage.database.write() as connection:
            delete_items(connection, gallery_id, ["i0"])
        stage.gallery(3)

        started = stage.start(gallery_id)

        assert flat(stage.planned(started)) == ["i1", "transformed"]
        assert stage.row(started).total == 2

    def test_transform_takes_what_is_active_in_a_version_with_an_item_edge(self, stage: Planning) -> None:
        gallery_id = stage.gallery(2)
        stage.store(gallery_id, ["v1 without image"], blob=None)
        stage.store(gallery_id, ["v2"], V2)
        stage.store(gallery_id, ["v3"], V3)

        assert flat(stage.planned(stage.start(gallery_id, Kind.TRANSFORM, V3))) == ["i0", "i1", "v1 without image"]
        assert stage.planned(stage.start(gallery_id, Kind.TRANSFORM, V2)) == []


class TestClaim:
    def test_every_worker_gets_another_chunk_until_none_is_left(self, stage: Planning) -> None:
        stage.start(stage.gallery(10))

        claimed = [stage.claim(owner) for owner in "abcd"]

        assert [len(chunk.item_ids) for chunk in claimed if chunk] == [4, 4, 2]
        assert claimed[3] is None
        assert [chunk.owner for chunk in claimed if chunk] == ["a", "b", "c"]

    def test_a_lease_that_ran_out_is_taken_over_and_not_before(self, stage: Planning, clock: Clock) -> None:
        stage.start(stage.gallery(4))
        first = stage.claim("a")
        clock.now += LEASE - 1
        assert stage.claim("b") is None
        clock.now += 2

        taken = stage.claim("b")

        assert first
        assert taken
        assert (taken.id, taken.owner) == (first.id, "b")

    def test_a_sign_of_life_keeps_the_lease(self, stage: Planning, clock: Clock) -> None:
        stage.start(stage.gallery(4))
        chunk = stage.claim("a")
        assert chunk
        clock.now += LEASE - 1
        with stage.database.write() as connection:
            assert leasing.extend(connection, chunk, LEASE)
        clock.now += LEASE - 1
        assert stage.claim("b") is None
        clock.now += 2
        assert stage.claim("b")
        with stage.database.write() as connection:
            assert not leasing.extend(connection, chunk, LEASE)

    @pytest.mark.parametrize("state", [BackfillState.PAUSED, BackfillState.CANCELLED, BackfillState.DONE])
    def test_only_a_running_backfill_gives_chunks(self, stage: Planning, state: BackfillState) -> None:
        stage.set_state(stage.start(stage.gallery(4)), state)

        assert stage.claim() is None

    def test_a_backfill_gives_no_chunk_while_it_is_planned(self, stage: Planning) -> None:
        started = stage.start(stage.gallery(4))
        for sweep_seq in (4, None):
            with stage.database.write() as connection:
                connection.execute(update(backfill).where(backfill.c.id == started).values(sweep_seq=sweep_seq))

            assert (stage.claim() is None) is (sweep_seq is not None)

    def test_galleries_take_turns(self, stage: Planning, clock: Clock) -> None:
        galleries = [stage.gallery(8), stage.gallery(8)]
        for gallery_id in galleries:
            stage.start(gallery_id)

        turns = []
        for _ in range(4):
            clock.now += 1
            chunk = stage.claim()
            assert chunk
            turns.append(chunk.gallery_id)

        assert turns == [*galleries, *galleries]

    def test_a_rate_holds_over_all_workers_and_time(self, stage: Planning, clock: Clock) -> None:
        """20 items a second in chunks of 4: five chunks a second, however often and by how many it is asked."""
        stage.start(stage.gallery(400), rate=20.0, next_claim=clock.now)

        claimed = 0
        for tick in range(600):
            clock.now = 1000.0 + tick / 60
            claimed += stage.claim(f"w{tick % 3}") is not None

        assert claimed * 4 == pytest.approx(20 * 10, abs=4)

    def test_what_was_not_used_of_a_rate_is_made_up_for_by_a_second_at_most(
        self, stage: Planning, clock: Clock
    ) -> None:
        stage.start(stage.gallery(400), rate=20.0, next_claim=clock.now)
        clock.now += 3600

        burst = 0
        while stage.claim() is not None:
            burst += 4

        assert burst == pytest.approx(20, abs=4)

    @pytest.mark.parametrize("rate", [20.0, None])
    def test_a_clock_that_was_set_back_stops_nobody(self, stage: Planning, clock: Clock, rate: float | None) -> None:
        stage.start(stage.gallery(400), rate=rate, next_claim=clock.now)
        assert stage.claim()
        clock.now -= 500

        claimed = 0
        for _ in range(120):
            clock.now += 1 / 60
            claimed += stage.claim() is not None

        # All 400 and not 396: a lease that ends further ahead than any is given is over, whoever held it.
        assert claimed * 4 == (pytest.approx(20 * 2 + 20, abs=8) if rate else 400)

    def test_a_chunk_that_was_given_back_is_free_at_once(self, stage: Planning) -> None:
        stage.start(stage.gallery(4))
        chunk = stage.claim("a")
        assert chunk
        with stage.database.write() as connection:
            leasing.release(connection, chunk)

        again = stage.claim("b")

        assert again
        assert again.id == chunk.id

    def test_a_chunk_that_failed_is_nobodys_until_its_lease_has_run_out(self, stage: Planning, clock: Clock) -> None:
        stage.start(stage.gallery(4))
        chunk = stage.claim("a")
        assert chunk
        with stage.database.write() as connection:
            leasing.abandon(connection, chunk)
            assert leasing.lease_owners(connection, "a") == []
            assert not leasing.extend(connection, chunk, LEASE)
        clock.now += LEASE - 1
        assert stage.claim("a") is None
        clock.now += 2

        again = stage.claim("a")

        assert again
        assert again.id == chunk.id


def test_every_statement_can_be_said_to_postgresql_where_claims_pass_by_locked_chunks(stage: Planning) -> None:
    said: list[str] = []

    def note(_: Any, statement: Any, *__: Any) -> None:
        said.append(str(statement.compile(dialect=postgresql.dialect())))

    event.listen(stage.database._writer, "before_execute", note)
    gallery_id = stage.gallery(4)
    started = stage.start(gallery_id, rate=1000.0)
    chunk = stage.claim()
    assert chunk
    stage.commit(chunk, stage.read(chunk)[1:], failed=stage.read(chunk)[:1])
    stage.finish(started)

    assert len(said) > 15
    assert sum("FOR UPDATE SKIP LOCKED" in statement for statement in said) == 2


class TestCommit:
    def test_items_get_the_embedding_beside_the_old_one_and_rising_numbers(self, stage: Planning) -> None:
        gallery_id = stage.gallery(4)
        started = stage.start(gallery_id)
        chunk = stage.claim()
        assert chunk

        counts = stage.commit(chunk, stage.read(chunk))

        items = stage.items(gallery_id)
        assert counts == {"done": 4, "failed": 0, "skipped": 0, "retried": 0}
        assert sorted(row.seq for row in items.values()) == [5, 6, 7, 8]
        assert set(stage.origins(gallery_id, V2).values()) == {"encoded"}
        assert len(stage.origins(gallery_id, V1)) == 4
        assert (stage.row(started).done, stage.row(started).total) == (4, 4)

    def test_it_is_counted_by_its_own_backfill_alone(self, stage: Planning) -> None:
        started = [stage.start(stage.gallery(4)) for _ in range(2)]
        chunk, seen = stage.taken()

        stage.commit(chunk, seen[:2], failed=seen[2:3])

        rows = {number: stage.row(number) for number in started}
        counted = {number: (row.done, row.failed, row.skipped) for number, row in rows.items()}
        assert counted == {number: (2, 1, 1) if number == chunk.backfill_id else (0, 0, 0) for number in started}

    def test_a_transformed_embedding_says_so_and_a_reencode_replaces_it(self, stage: Planning) -> None:
        gallery_id = stage.gallery(4)
        for kind, origin in ((Kind.TRANSFORM, "transformed"), (Kind.REENCODE, "encoded")):
            stage.start(gallery_id, kind, V3)
            stage.commit(*stage.taken())

            assert set(stage.origins(gallery_id, V3).values()) == {origin}

    def test_an_item_written_or_deleted_since_it_was_read_is_skipped(self, stage: Planning) -> None:
        gallery_id = stage.gallery(4)
        started = stage.start(gallery_id)
        chunk, seen = stage.taken()
        stage.store(gallery_id, ["i0"])
        with stage.database.write() as connection:
            delete_items(connection, gallery_id, ["i1"])

        counts = stage.commit(chunk, seen)

        assert counts == {"done": 2, "failed": 0, "skipped": 2, "retried": 0}
        assert set(stage.origins(gallery_id, V2)) == {"i2", "i3"}
        items = stage.items(gallery_id)
        assert (items["i0"].deleted, items["i1"].deleted) == (False, True)
        assert stage.row(started).skipped == 2

    def test_the_others_of_its_chunk_keep_their_own_numbers(self, stage: Planning) -> None:
        stage.gallery(3)  # from here on an item's key is no number of the feed
        gallery_id = stage.gallery(4)
        stage.start(gallery_id)
        chunk, seen = stage.taken()
        keys, seqs = zip(*seen, strict=True)
        stage.store(gallery_id, ["i1"])
        own = np.array(keys, np.float32)
        made = EmbeddedItems(keys, seqs, np.stack([own, -own], axis=1), 2 * own[:, None], 3 * own)

        with stage.database.write() as connection:
            chunks.commit(connection, chunk, [made], [])
            named = (embedding.c.item_id, embedding.c.vector, embedding.c.side, embedding.c.uncertainty)
            held = connection.execute(select(*named).where(embedding.c.version_id == V2)).all()

        stored = {
            key: (*np.frombuffer(vector, "<f4"), *np.frombuffer(side, "<f4"), unsure)
            for key, vector, side, unsure in held
        }
        assert stored == {key: (key, -key, 2 * key, 3 * key) for key in keys if key != stage.items(gallery_id)["i1"].id}

    def test_the_failure_of_an_item_written_since_is_not_recorded(self, stage: Planning) -> None:
        gallery_id = stage.gallery(4)
        stage.start(gallery_id)
        chunk, seen = stage.taken()
        stage.store(gallery_id, ["i0"])

        assert stage.commit(chunk, seen[2:], failed=seen[:2]) == {"done": 2, "failed": 1, "skipped": 1, "retried": 0}

    def test_a_worker_that_lost_its_lease_writes_nothing(self, stage: Planning, clock: Clock) -> None:
        stage.start(stage.gallery(4))
        late, seen = stage.taken("late")
        clock.now += LEASE + 1
        assert stage.claim("heir")
        before = stage.everything()

        with pytest.raises(ChunkLost):
            stage.commit(late, seen)

        assert stage.everything() == before

    def test_a_worker_whose_heir_was_faster_writes_nothing(self, stage: Planning, clock: Clock) -> None:
        gallery_id = stage.gallery(4)
        stage.start(gallery_id)
        late, seen = stage.taken("late")
        clock.now += LEASE + 1
        stage.commit(*stage.taken("heir"))
        before = stage.everything()

        with pytest.raises(ChunkLost):
            stage.commit(late, seen)

        assert stage.everything() == before

    def test_a_lease_that_ran_out_unnoticed_may_still_be_committed_once(self, stage: Planning, clock: Clock) -> None:
        stage.start(stage.gallery(4))
        chunk, seen = stage.taken()
        clock.now += 10 * LEASE

        assert stage.commit(chunk, seen)["done"] == 4
        with pytest.raises(ChunkLost):
            stage.commit(chunk, seen)

    @pytest.mark.parametrize("state", [BackfillState.PAUSED, BackfillState.CANCELLED])
    def test_a_backfill_that_stopped_meanwhile_gets_nothing_written(
        self, stage: Planning, state: BackfillState
    ) -> None:
        started = stage.start(stage.gallery(4))
        chunk, seen = stage.taken()
        stage.set_state(started, state)
        before = stage.everything()

        with pytest.raises(ChunkLost):
            stage.commit(chunk, seen)

        assert stage.everything() == before

    def test_a_gallery_that_was_deleted_meanwhile_gets_nothing_written(self, stage: Planning) -> None:
        gallery_id = stage.gallery(4)
        stage.start(gallery_id)
        chunk, seen = stage.taken()
        with stage.database.write() as connection:
            delete_gallery(connection, gallery_id)
        left = stage.everything()

        with pytest.raises(UnknownGallery):
            stage.commit(chunk, seen)
        assert stage.everything() == left
        with stage.database.write() as connection:
            free_items(connection, gallery_id, 0, 4)
            forget_gallery(connection, gallery_id)
        assert stage.everything() == [[]] * 6
