"""How a curve is measured: at which marks, by whom, and what happens when it fails."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event, func, select, update

from service.store.galleries.items import rows_of
from service.store.leases.heartbeats import Leases
from service.store.tables import backfill_point
from service.upgrades.curves import measure as curves
from service.upgrades.curves import points
from service.upgrades.curves.probes import Probes
from service.upgrades.curves.scoring import ItemLabels, measure
from service.upgrades.gates.samples import Entry
from staging.api.curves import WAIT, Loops, curve_of, deploy, ended, evaluation, group, start, turn, wait_for
from staging.api.served import problem, serving
from staging.api.streams import events

pytestmark = pytest.mark.usefixtures("alone")

IDS = [f"i{n}" for n in range(20)]


def points_are(count: int) -> Callable[[dict[str, Any]], bool]:
    return lambda curve: len(curve["points"]) >= count


class TestMarks:
    def test_marks_that_were_jumped_over_are_not_made_up(self, served: Any, filled: str) -> None:
        number = start(served, filled, {"label": "group", "marks": 10}, chunk_size=7)
        shares = [0.0]
        for step in range(1, 3):
            served.work(1)
            wait_for(served, number, points_are(step + 1))
            shares.append(7 * step / 20)
        served.work()

        whole = wait_for(served, number, ended)

        assert [p["share"] for p in whole["points"]] == [*shares, 1.0]
        assert len({p["at"] for p in whole["points"]}) == 4

    def test_a_backfill_without_anything_to_move_has_its_two_ends(self, served: Any, filled: str) -> None:
        first = start(served, filled, {"label": "group"})
        served.work()
        wait_for(served, first, ended)

        whole = wait_for(served, start(served, filled, {"label": "group"}), ended)

        assert [(p["share"], p["moved"]) for p in whole["points"]] == [(0.0, 0), (1.0, 0)]
        assert whole["area"] == whole["points"][0]["value"] == whole["points"][1]["value"]

    def test_items_deleted_and_written_meanwhile(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        loops = Loops(served, filled, pictures)
        number = start(served, filled, {"label": "group", "metric": "mAP@1.0"})
        served.work(1)
        wait_for(served, number, points_are(2))
        served.http.post(f"{filled}/items:delete", json={"ids": ["i1", "i2", "i3"]})
        # Written anew: born in the new version, found by others, and no query any more.
        anew = [{"id": "i4", "metadata": {"group": group(4)}, "image": "a"}]
        assert served.post_items(filled, anew, [("a", pictures[4])]).status_code == 200
        left = [n for n in range(20) if n not in (1, 2, 3, 4)]
        served.work(1)
        turn(served, number, "pause")
        expected = loops.value("mAP@1.0", left)

        middle = wait_for(served, number, points_are(3))["points"][-1]
        turn(served, number, "resume")
        served.work()
        whole = wait_for(served, number, ended)

        assert (middle["value"], middle["queries"]) == (pytest.approx(expected), len(left))
        assert whole["state"] == "complete"
        assert whole["points"][-1]["value"] == pytest.approx(loops.value("mAP@1.0", left))

    def test_a_deleted_evaluation_set_ends_the_curve_and_nothing_else(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        made = evaluation(served, filled, pictures, range(6))
        number = start(served, filled, {"evaluation": made, "label": "group"})
        assert served.remove(f"{filled}/evaluations/{made}").status_code == 204
        served.work()

        curve = wait_for(served, number, ended)

        assert (curve["state"], curve["area"], len(curve["points"])) == ("stopped", None, 1)
        assert curve["error"] == f"the gallery has no evaluation set {made}"
        assert served.http.get(f"/backfills/{number}").json()["state"] == "done"

    def test_a_cancelled_or_rolled_back_backfill_has_no_more_points(self, served: Any, filled: str) -> None:
        for end in (lambda n: turn(served, n, "cancel"), lambda _: served.http.post(f"{filled}/rollback", json={})):
            number = start(served, filled, {"label": "group"})
            served.work(1)
            wait_for(served, number, points_are(2))
            end(number)

            curve = wait_for(served, number, ended)

            assert (curve["state"], curve["error"], len(curve["points"])) == ("stopped", None, 2)

    def test_a_deleted_gallery_takes_its_curves_along(self, served: Any, filled: str) -> None:
        number = start(served, filled, {"label": "group"})

        assert served.remove(filled).status_code == 204

        with served.runtime.database.lookup() as connection:
            left = select(func.count()).where(backfill_point.c.backfill_id == number)
            assert connection.execute(left).scalar_one() == 0

    def test_a_version_deployed_while_the_first_point_is_measured_refuses_the_start(
        self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or the first point would be of one version, and all others of another."""
        whole = served.runtime.curves.begin

        def slow(*given: Any) -> Any:
            begun = whole(*given)
            deploy(served, filled, "apart")
            return begun

        monkeypatch.setattr(served.runtime.curves, "begin", slow)

        answer = served.http.post(f"{filled}/backfills", json={"curve": {"label": "group"}})

        problem(answer, 409, "not_current", "/version")
        assert served.http.get(f"{filled}/backfills").json() == {"backfills": []}


class TestFailure:
    def test_it_is_shown_and_tried_again_while_everything_else_goes_on(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        number = start(served, filled, {"label": "group"})
        monkeypatch.setattr(curves, "PAUSE_SECONDS", 0.2)
        with monkeypatch.context() as broken:
            broken.setattr(curves, "measure", out_of_order)
            served.work(1)
            failing = wait_for(served, number, lambda curve: curve["error"])
            assert served.query(filled, pictures[0]).status_code == 200
        served.work()

        whole = wait_for(served, number, ended)

        assert (failing["state"], failing["error"]) == ("measuring", "RuntimeError: out of order")
        assert (whole["state"], whole["error"]) == ("complete", None)
        assert served.http.get(f"/backfills/{number}").json()["done"] == 20

    def test_after_three_failures_in_a_row_it_is_given_up(
        self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        number = start(served, filled, {"label": "group"})
        calls: list[int] = []
        monkeypatch.setattr(curves, "measure", lambda *_: calls.append(1) or out_of_order())
        served.work()

        curve = wait_for(served, number, ended)

        assert (curve["state"], curve["error"], len(calls)) == ("stopped", "RuntimeError: out of order", 3)
        assert served.http.get(f"/backfills/{number}").json()["state"] == "done"

    def test_a_process_that_ends_gives_its_mark_back(
        self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        number = start(served, filled, {"label": "group"})
        calls: list[int] = []

        def ends(*_: Any) -> Any:
            calls.append(1)
            raise curves.Stopped

        with monkeypatch.context() as ending:
            ending.setattr(curves, "measure", ends)
            served.work()
            wait_for(served, number, lambda _: len(calls) > curves.ATTEMPTS)
            assert curve_of(served, number)["error"] is None

        assert wait_for(served, number, ended)["state"] == "complete"


def out_of_order(*_: Any) -> Any:
    raise RuntimeError("out of order")


class TestClaims:
    @pytest.fixture
    def job(self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A backfill that has reached a mark, while the server's own thread is looking away."""
        monkeypatch.setattr(served.runtime.curves, "_follow", lambda: None)
        number = start(served, filled, {"label": "group"})
        served.work(1)
        return number

    def standing(self, served: Any, number: int) -> Any:
        with served.runtime.database.lookup() as connection:
            return next(job for job in points.measuring_jobs(connection) if job.id == number)

    def test_two_servers_measure_each_mark_once_between_them(
        self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        with serving(served.runtime.settings) as other:
            number = start(served, filled, {"label": "group", "metric": "mAP@1.0"})
            monkeypatch.setattr(curves, "measure", lambda *given: asked.append(1) or measure(*given))
            for step in range(1, 4):
                served.work(1)
                wait_for(other, number, points_are(step + 1))
            served.work()
            whole = wait_for(other, number, ended)

        assert whole == curve_of(served, number)
        assert (whole["state"], len(whole["points"]), len(asked)) == ("complete", 5, 4)

    def test_a_mark_belongs_to_one_process_until_that_has_died(self, served: Any, job: int) -> None:
        assert points.due_mark(self.standing(served, job)) == 5
        claims = [("a", 5), ("b", 5), ("a", 5), ("b", 6)]
        with served.runtime.database.write() as connection:
            assert [points.claim(connection, job, mark, who) for who, mark in claims] == [True, False, True, True]
            connection.execute(update(backfill_point).values(claimed=time.time() - 2 * points.CLAIM_SECONDS))
            assert points.claim(connection, job, 5, "b")
            connection.execute(update(backfill_point).values(claimed=time.time() + 2 * points.CLAIM_SECONDS))
            assert points.claim(connection, job, 5, "c")

    def test_a_mark_that_takes_long_stays_with_who_measures_it(
        self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        running, others = served.runtime.curves, []
        signs = Leases(running._renew, 0.01)
        monkeypatch.setattr(running, "_claims", signs)
        number = start(served, filled, {"label": "group"})

        def slow(*given: Any) -> Any:
            """Since it was claimed more time goes by than a dead process is given; then another one asks for it."""
            mine = backfill_point.c.event.is_(None), backfill_point.c.backfill_id == number
            long_ago = time.time() - 2 * points.CLAIM_SECONDS
            with served.runtime.database.write() as connection:
                mark = connection.execute(select(backfill_point.c.mark).where(*mine)).scalar_one()
                connection.execute(update(backfill_point).where(*mine).values(claimed=long_ago))
            deadline, claimed = time.monotonic() + WAIT, long_ago
            while claimed == long_ago and time.monotonic() < deadline:
                time.sleep(0.005)
                with served.runtime.database.lookup() as connection:
                    claimed = connection.execute(select(backfill_point.c.claimed).where(*mine)).scalar_one()
            with served.runtime.database.write() as connection:
                others.append(points.claim(connection, number, mark, "another"))
            return measure(*given)

        monkeypatch.setattr(curves, "measure", slow)
        served.work()
        try:
            assert wait_for(served, number, ended)["state"] == "complete"
        finally:
            signs.close()
        assert others
        assert not any(others)

    def test_the_gallery_is_locked_before_anything_that_belongs_to_it(
        self, served: Any, job: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As whoever deletes a gallery does, and whoever moves its items: on PostgreSQL nobody waits in a circle."""
        found = SimpleNamespace(score=SimpleNamespace(value=0.5, low=0.4, high=0.6), queries=3)
        standing, written = self.standing(served, job), []
        monkeypatch.setattr(curves.Curves, "_measure_mark", lambda *_: True)
        served.runtime.curves._measure(standing, 5)
        owner = served.runtime.curves._owner

        def note(_c: Any, _u: Any, statement: str, *_: Any) -> None:
            written.extend(re.findall(r"^(?:UPDATE|INSERT INTO) (\w+)", statement))

        steps: list[Callable[[Any], Any]] = [
            lambda c: points.store(c, standing, 5, owner, found, 7),
            lambda c: points.set_state(c, standing, "out of order", points.CurveState.MEASURING),
        ]
        orders = []
        for step in steps:
            with served.runtime.database.write() as connection:
                event.listen(connection, "before_cursor_execute", note)
                step(connection)
                event.remove(connection, "before_cursor_execute", note)
            orders.append([*written])
            written.clear()

        assert orders == [
            ["gallery", "backfill", "backfill_point", "backfill_curve"],
            ["gallery", "backfill", "backfill_curve"],
        ]

    def test_only_who_holds_a_mark_stores_it_and_only_once(self, served: Any, job: int) -> None:
        found = SimpleNamespace(score=SimpleNamespace(value=0.5, low=0.4, high=0.6), queries=3)
        standing = self.standing(served, job)
        with served.runtime.database.write() as connection:
            points.claim(connection, job, 4, "slow")
            points.claim(connection, job, 5, "a")
            points.claim(connection, job, 6, "a")
            stored = [points.store(connection, standing, 5, who, found, 7) for who in ("b", "a", "a")]
            late = points.store(connection, standing, 4, "slow", found, 7)

        assert (stored, late) == ([False, True, False], False)
        assert [p["value"] for p in curve_of(served, job)["points"]][1:] == [0.5]
        assert points.due_mark(self.standing(served, job)) is None

    def test_a_point_is_not_stored_once_the_gallery_went_another_way(self, served: Any, filled: str, job: int) -> None:
        found = SimpleNamespace(score=SimpleNamespace(value=0.5, low=0.4, high=0.6), queries=3)
        standing = self.standing(served, job)
        with served.runtime.database.write() as connection:
            points.claim(connection, job, 5, "a")
        served.http.post(f"{filled}/rollback", json={})

        with served.runtime.database.write() as connection:
            assert not points.store(connection, standing, 5, "a", found, 7)

    def test_what_moves_while_it_is_measured_counts_half(self, served: Any, job: int) -> None:
        found = SimpleNamespace(score=SimpleNamespace(value=0.5, low=0.4, high=0.6), queries=3)
        standing = self.standing(served, job)
        with served.runtime.database.write() as connection:
            points.claim(connection, job, 5, "a")
        served.work(1)
        with served.runtime.database.write() as connection:
            points.store(connection, standing, 5, "a", found, 7)

        point = curve_of(served, job)["points"][-1]
        assert (point["share"], point["moved"], point["meanwhile"]) == (0.375, 5, 5)


class TestEvents:
    def stream(self, served: Any, number: int, last: str = "") -> list[tuple[str, str, str]]:
        headers = {"last-event-id": last} if last else {}
        with served.http.stream("GET", f"/backfills/{number}/events", headers=headers, timeout=WAIT) as response:
            return list(events(response.iter_text()))

    def test_each_point_is_told_once_in_order_and_whoever_comes_back_misses_none(
        self, served: Any, filled: str
    ) -> None:
        number = start(served, filled, {"label": "group", "marks": 4})
        for step in range(1, 4):
            served.work(1)
            wait_for(served, number, points_are(step + 1))
        served.work()

        whole = self.stream(served, number)

        curve = wait_for(served, number, ended)
        told = [(int(i), json.loads(data)) for name, i, data in whole if name == "point"]
        assert [point for _, point in told] == curve["points"]
        ids = [int(i) for name, i, _ in whole if name != "end"]
        assert ids == sorted(set(ids))
        assert [name for name, _, _ in whole][-2:] == ["progress", "end"]
        assert json.loads(whole[-2][2])["curve"] == curve
        for number_seen, (last, _) in enumerate(told):
            again = self.stream(served, number, str(last))
            assert [json.loads(d) for name, _, d in again if name == "point"] == curve["points"][number_seen + 1 :]
            assert [name for name, _, _ in again][-2:] == ["progress", "end"]
        assert [name for name, _, _ in self.stream(served, number, str(ids[-1]))] == ["end"]
        elsewhere = self.stream(served, number, str(ids[-1] + 1000))
        assert [json.loads(d) for name, _, d in elsewhere if name == "point"] == curve["points"]

    def test_the_stream_waits_for_the_last_point(self, served: Any, filled: str) -> None:
        number = start(served, filled, {"label": "group"})
        seen: list[Any] = []
        watcher = threading.Thread(target=lambda: seen.extend(self.stream(served, number)), daemon=True)
        watcher.start()
        served.work()
        watcher.join(WAIT)

        assert json.loads(seen[-2][2])["curve"]["state"] == "complete"
        assert json.loads([data for name, _, data in seen if name == "point"][-1])["share"] == 1.0


def test_an_item_that_asks_and_got_another_label_is_no_longer_among_those_of_its_old_one(
    served: Any, filled: str
) -> None:
    gallery = served.runtime.replica.find(filled.rpartition("/")[2])
    labels = ItemLabels(gallery.id, "group")
    with served.runtime.database.read() as connection:
        labels.follow(connection)
        entries = [
            Entry(row.id, None, str(row.metadata["group"]), None) for row in rows_of(connection, gallery.id, IDS)
        ]
    changed = [{"id": IDS[n], "metadata": {"group": change}} for n, change in ((0, 9), (1, None), (2, 9))]
    assert served.http.patch(f"{filled}/items", json={"items": changed}).json()["updated"] == 3
    with served.runtime.database.read() as connection:
        labels.catch_up(connection)
        now = {row.id: row.metadata.get("group") for row in rows_of(connection, gallery.id, IDS)}

    counted = labels.relevance(Probes(entries, {}, stored=True)).others(slice(None))

    assert counted.tolist() == [
        sum(str(group) == asks.label and key != asks.number for key, group in now.items()) for asks in entries
    ]
