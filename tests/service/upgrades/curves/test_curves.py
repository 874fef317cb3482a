"""The curve of a backfill: what its points say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event

from index.metadata.filter import value_at
from service.store.galleries.items import rows_of
from service.upgrades.curves import scoring
from staging.api.curves import Loops, curve_of, deploy, ended, evaluation, group, start, turn, wait_for
from staging.api.served import problem
from staging.inputs.builders import add_text, make_version

pytestmark = pytest.mark.usefixtures("alone")


def start_and_cancel(served: Any, path: str, **more: Any) -> dict[str, Any]:
    """The first point of a curve of mAP."""
    number = start(served, path, {"label": "group", "metric": "mAP@1.0", **more})
    turn(served, number, "cancel")
    return dict(curve_of(served, number)["points"][0])


METRICS = [
    ({"label": "group"}, "cmc@1"),
    ({"label": "group", "metric": "cmc@5"}, "cmc@5"),
    ({"label": "group", "metric": "mAP@1.0"}, "mAP@1.0"),
    ({"k": 4}, "recall@4"),
]


class TestValues:
    @pytest.mark.parametrize(("curve", "metric"), METRICS)
    def test_they_are_those_of_plain_loops_at_the_start_paused_in_the_middle_and_at_the_end(
        self, served: Any, filled: str, pictures: list[bytes], curve: dict[str, Any], metric: str
    ) -> None:
        loops, everyone = Loops(served, filled, pictures), range(20)
        expected = [loops.value(metric, everyone)]
        number = start(served, filled, curve)
        at_start = curve_of(served, number)
        served.work(2)
        turn(served, number, "pause")
        expected.append(loops.value(metric, everyone))
        middle = wait_for(served, number, lambda found: found["points"][-1]["moved"] == 10)
        turn(served, number, "resume")
        served.work()
        expected.append(loops.value(metric, everyone))

        whole = wait_for(served, number, ended)

        assert (at_start["metric"], at_start["state"], at_start["area"]) == (metric, "measuring", None)
        assert [p["value"] for p in at_start["points"]] == pytest.approx(expected[:1])
        assert middle["points"][-1] == {
            **middle["points"][-1],
            "share": 0.5,
            "moved": 10,
            "meanwhile": 0,
            "value": pytest.approx(expected[1]),
            "queries": 20,
        }
        last = whole["points"][-1]
        assert (whole["state"], whole["error"], last["share"], last["moved"]) == ("complete", None, 1.0, 20)
        assert last["value"] == pytest.approx(expected[2])
        assert len(set(expected)) > 1, "a metric that does not change would prove nothing"
        assert all(p["low"] <= p["value"] <= p["high"] for p in whole["points"])
        shares, values = ([p[name] for p in whole["points"]] for name in ("share", "value"))
        assert shares == sorted(set(shares))
        pairs = zip(shares[1:], shares, values[1:], values, strict=False)
        assert whole["area"] == pytest.approx(sum((b - a) * (v + u) / 2 for b, a, v, u in pairs))

    def test_an_evaluation_set_asks_the_gallery_and_finds_itself_there(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        loops, asking = Loops(served, filled, pictures), [0, 3, 4, 8, 11]
        by_images = evaluation(served, filled, pictures, asking)
        entries = [{"label": group(n)} for n in asking]
        vectors = {"new": [[float(x) for x in loops.by_new[n]] for n in asking]}
        body = {"name": "e", "entries": entries, "embeddings": vectors}
        by_vectors = served.http.post(f"{filled}/evaluations", json=body).json()["id"]

        for number in (by_images, by_vectors):
            curve = {"evaluation": number, "label": "group", "metric": "mAP@1.0"}
            started = start(served, filled, curve, limit=10)
            assert curve_of(served, started)["points"][0]["value"] == pytest.approx(
                loops.value("mAP@1.0", asking, itself=True)
            )
            if number == by_images:
                turn(served, started, "cancel")
        served.work()

        whole = wait_for(served, started, ended)

        assert (whole["state"], whole["evaluation"]) == ("complete", by_vectors)
        assert whole["points"][-1]["value"] == pytest.approx(loops.value("mAP@1.0", asking, itself=True))
        assert {p["queries"] for p in whole["points"]} == {5}

    def test_a_version_that_must_ask_the_old_encoder_does(self, served: Any, pictures: list[bytes]) -> None:
        path = served.gallery("v1")
        items = [{"id": f"i{n}", "metadata": {"group": group(n)}, "image": f"{n}.png"} for n in range(20)]
        served.post_items(path, items, [(f"{n}.png", p) for n, p in enumerate(pictures)])
        deploy(served, path, "apart")
        loops = Loops(served, path, pictures, "apart")

        number = start(served, path, {"label": "group", "metric": "mAP@1.0"})

        loops.by_new = loops.by_old  # nothing has moved: old queries over old items
        assert curve_of(served, number)["points"][0]["value"] == pytest.approx(loops.value("mAP@1.0", range(20)))

    def test_texts_do_not_ask_where_an_old_version_embeds_images_only(
        self, served: Any, pictures: list[bytes], tmp_path: Path
    ) -> None:
        reads = add_text(make_version(tmp_path / "reads", "reads", 5, seed=4), {"east": np.ones(5)})
        assert served.register(reads).status_code == 201
        path = served.gallery("v1")
        items = [{"id": f"i{n}", "metadata": {"group": group(n)}, "image": f"{n}.png"} for n in range(20)]
        served.post_items(path, items, [(f"{n}.png", p) for n, p in enumerate(pictures)])
        deploy(served, path, "reads")
        texts = [{"id": f"t{n}", "metadata": {"group": group(n)}, "text": "east"} for n in range(3)]
        assert served.http.post(f"{path}/items", json={"items": texts}).json()["stored"] == 3

        number = start(served, path, {"label": "group"})
        served.work()
        whole = wait_for(served, number, ended)

        assert (whole["state"], whole["error"]) == ("complete", None)
        assert {point["queries"] for point in whole["points"]} == {20}

    def test_the_encoders_that_queries_need_are_told_by_the_routes(self, served: Any) -> None:
        needed = served.runtime.registry.needed
        assert needed("apart", []) == needed("apart", ["apart"]) == {"apart"}
        assert needed("new", ["new", "v1"]) == {"new"}
        assert needed("apart", ["apart", "v1"]) == {"apart", "v1"}

    def test_the_labels_of_items_are_read_once_a_process(
        self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read, streamed = [], []
        monkeypatch.setattr(scoring, "value_at", lambda *given: read.append(1) or value_at(*given))

        def note(_c: Any, statement: Any, _m: Any, _p: Any, options: Any) -> None:
            if [getattr(column, "name", "") for column in statement.selected_columns] == [
                "id",
                "seq",
                "deleted",
                "metadata",
            ]:
                streamed.append(options.get("stream_results"))

        engine = served.runtime.database._reader
        event.listen(engine, "before_execute", note)
        start(served, filled, {"label": "group"})
        event.remove(engine, "before_execute", note)

        assert len(read) == 20
        assert streamed == [True] * 3, "followed, and again, and after the one block, from where the last time ended"

    def test_what_is_written_while_it_is_measured_counts_by_its_label(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each query finds its own image again, stored after the labels were read."""
        whole = scoring._ask
        asked: list[bool] = []

        def late(*given: Any) -> Any:
            if not asked:
                asked.append(True)
                items = [{"id": f"j{n}", "metadata": {"group": group(n)}, "image": f"{n}.png"} for n in range(20)]
                assert served.post_items(filled, items, [(f"{n}.png", p) for n, p in enumerate(pictures)]).is_success
            return whole(*given)

        monkeypatch.setattr(scoring, "_ask", late)

        number = start(served, filled, {"label": "group"})

        assert curve_of(served, number)["points"][0]["value"] == 1

    def test_what_is_written_while_it_is_measured_and_keeps_its_label_is_looked_up_where_it_was(
        self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A backfill writes many items while a large gallery is measured, block by block."""
        whole, made, tables = scoring._ask, scoring._sorted, []

        def late(*given: Any) -> Any:
            same = [{"id": f"i{n}", "metadata": {"group": group(n)}, "embedding": [1, 0, 0, 0]} for n in range(20)]
            assert served.http.post(f"{filled}/items", json={"items": same, "version": "v1"}).json()["failed"] == 0
            monkeypatch.setattr(scoring, "_sorted", lambda of: tables.append(len(of)) or made(of))
            return whole(*given)

        monkeypatch.setattr(scoring, "_ask", late)

        start(served, filled, {"label": "group"})

        assert tables == [0]

    def test_what_is_deleted_or_labelled_anew_once_it_is_found_breaks_no_point(
        self, served: Any, filled: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = Loops(served, filled, pictures).value("mAP@1.0", range(20))
        anew = [{"id": "i2", "metadata": {"group": "other"}, "image": "a"}]
        changes = [
            lambda: served.http.post(f"{filled}/items:delete", json={"ids": ["i1"]}),
            lambda: served.post_items(filled, anew, [("a", pictures[2])]),
        ]
        whole = scoring._ask

        def early(*given: Any) -> Any:
            found = whole(*given)
            assert changes.pop(0)().is_success
            return found

        monkeypatch.setattr(scoring, "_ask", early)

        first, second = (start_and_cancel(served, filled) for _ in range(2))

        assert (first["value"], first["queries"]) == (pytest.approx(expected), 20)
        assert second["queries"] == 19

    def test_a_sample_is_drawn_once(self, served: Any, filled: str, pictures: list[bytes]) -> None:
        asking = evaluation(served, filled, pictures, range(5))
        assert start_and_cancel(served, filled, evaluation=asking, sample=3)["queries"] == 3
        number = start(served, filled, {"label": "group", "sample": 6, "seed": 1, "metric": "mAP@1.0"})
        served.work()

        whole = wait_for(served, number, ended)

        assert (whole["sample"], {p["queries"] for p in whole["points"]}) == (6, {6})

    def test_a_big_gallery_is_asked_fewer_full_rankings(
        self, served: Any, filled: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("service.upgrades.curves.probes.MAX_PLACES", 160)

        number = start(served, filled, {"label": "group", "metric": "mAP@1.0"})

        assert curve_of(served, number)["points"][0]["queries"] <= 8


@pytest.fixture(scope="module")
def spread(served: Any, pictures: list[bytes]) -> str:
    """A gallery where every item has a `lonely` value of its own."""
    path = served.gallery("v1")
    items = [{"id": f"i{n}", "metadata": {"group": n % 2, "lonely": n}, "image": f"{n}"} for n in range(20)]
    assert served.post_items(path, items, [(f"{n}", p) for n, p in enumerate(pictures)]).status_code == 200
    deploy(served, path, "new")
    return str(path)


BAD = [
    ({"label": 3}, 422, "invalid_request", "/curve/label"),
    ({"label": ""}, 422, "invalid_request", "/curve/label"),
    ({"label": "group", "marks": 0}, 422, "invalid_request", "/curve/marks"),
    ({"label": "group", "marks": 101}, 422, "invalid_request", "/curve/marks"),
    ({"label": "group", "metric": "TAR@FAR"}, 422, "invalid_request", "/curve/metric"),
    ({"label": "group", "sample": 1}, 422, "invalid_request", "/curve/sample"),
    ({"label": "group", "colour": 1}, 422, "invalid_request", "/curve/colour"),
    ({"metric": "cmc@1"}, 422, "invalid_argument", "/curve/label"),
    ({"label": "colour"}, 422, "invalid_argument", "/curve/label"),
    ({"label": "lonely"}, 422, "invalid_argument", "/curve/label"),
    ({"k": 20}, 422, "invalid_argument", "/curve/k"),
    ({"evaluation": 999_999, "label": "group"}, 404, "unknown_evaluation", "/curve/evaluation"),
]


class TestBadInput:
    @pytest.mark.parametrize(("curve", "status", "code", "pointer"), BAD)
    @pytest.mark.parametrize("dry_run", [False, True])
    def test_it_names_the_field_and_nothing_is_started(
        self, served: Any, spread: str, curve: dict[str, Any], status: int, code: str, pointer: str, dry_run: bool
    ) -> None:
        answer = served.http.post(f"{spread}/backfills", json={"curve": curve}, params={"dry_run": dry_run})

        problem(answer, status, code, pointer)
        assert served.http.get(f"{spread}/backfills").json() == {"backfills": []}

    def test_an_evaluation_set_must_say_what_is_right_and_hold_what_is_needed(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        vectors = {"v1": [[1.0, 0, 0, 0]] * 2}
        entries = [{"label": 0}, {"label": 1}]
        old_only = served.http.post(f"{filled}/evaluations", json={"entries": entries, "embeddings": vectors}).json()
        by_new = {"new": [[1.0, 0, 0, 0, 0, 0]] * 2}
        blank, named = (
            served.http.post(f"{filled}/evaluations", json={"entries": entries, "embeddings": by_new}).json()
            for entries in ([{}, {"label": 1}], [{"relevant": ["i0"]}, {"relevant": ["i1"]}])
        )
        strange = evaluation(served, filled, pictures, [0, 1])
        for curve, pointer in (
            ({"evaluation": old_only["id"], "label": "group"}, "/curve/evaluation"),
            ({"evaluation": blank["id"], "label": "group"}, "/curve/evaluation"),
            ({"evaluation": named["id"], "label": "group"}, "/curve/label"),
            ({"evaluation": strange}, "/curve/label"),
            ({"evaluation": strange, "label": "colour"}, "/curve/label"),
            ({"evaluation": strange, "metric": "recall@k"}, "/curve/metric"),
        ):
            for dry_run in (False, True):
                answer = served.http.post(f"{filled}/backfills", json={"curve": curve}, params={"dry_run": dry_run})
                problem(answer, 422, "invalid_argument", pointer)

    def test_an_estimate_with_a_curve_measures_and_starts_nothing(self, served: Any, filled: str) -> None:
        answer = served.http.post(f"{filled}/backfills", json={"curve": {"label": "group"}}, params={"dry_run": True})

        assert (answer.status_code, answer.json()["items"]) == (200, 20)
        assert served.http.get(f"{filled}/backfills").json() == {"backfills": []}


def test_an_item_that_was_deleted_and_came_back_has_the_label_it_came_back_with(
    served: Any, filled: str, pictures: list[bytes]
) -> None:
    gallery_id = served.runtime.replica.find(filled.rpartition("/")[2]).id
    labels, database = scoring.ItemLabels(gallery_id, "group"), served.runtime.database
    with database.read() as connection:
        labels.follow(connection)
    assert served.http.delete(f"{filled}/items/i0").status_code == 204
    with database.read() as connection:
        labels.catch_up(connection)
    assert served.ingest(filled, {"i0": pictures[0]}).status_code == 200

    with database.read() as connection:
        labels.catch_up(connection)
        keys = np.array([[row.id for row in rows_of(connection, gallery_id, ["i0", "i1"])]])

    without, with_label = labels.of_items(keys)[0].tolist()
    assert (without, with_label >= 0) == (-1, True)
