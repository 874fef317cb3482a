"""Estimates and orders that need versions with models: what a user is told before a backfill starts."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, select

from service.backfills import planning, uncertainties
from service.store.tables import backfill_chunk, embedding, gallery, item, item_traffic
from service.store.vectors.codec import from_bytes
from staging.inputs.builders import add_text, make_version, tell_no_side

pytestmark = pytest.mark.usefixtures("alone")


UNIT = base64.b64encode(np.float32([1, 0, 0, 0, 0]).tobytes()).decode()


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    """`unsure` has an item edge from v1 that tells a variance; `lorentz` and `near` lie in hyperbolic space."""
    served.add("unsure", 5, edges=[("v1", "forward")], variance="v1")
    space = {"kind": "lorentz", "curvature": 1.0}
    served.add("lorentz", 4, space=space)
    served.add("near", 4, space=space, drift=0.1, edges=[("lorentz", "identity")])


def fill(served: Any, pictures: list[bytes], old: str = "v1", new: str = "v2") -> str:
    return served.filled(pictures, old, new)


def ask(served: Any, path: str, dry_run: bool = False, **fields: Any) -> Any:
    return served.http.post(f"{path}/backfills", params={"dry_run": str(dry_run).lower()}, json=fields)


def planned(served: Any, number: int) -> list[str]:
    with served.runtime.database.lookup() as connection:
        names = dict(tuple(row) for row in connection.execute(select(item.c.id, item.c.external_id)))
        mine = select(backfill_chunk.c.item_ids).where(backfill_chunk.c.backfill_id == number)
        return [names[key] for keys in connection.execute(mine.order_by(backfill_chunk.c.id)).scalars() for key in keys]


def stored(served: Any, path: str, version: str, column: Any) -> dict[str, Any]:
    registered = served.runtime.registry.named(version)
    mine = (gallery.c.name == path.rpartition("/")[2], embedding.c.version_id == registered.id)
    statement = select(item.c.external_id, column).join(item, item.c.id == embedding.c.item_id).join(gallery)
    with served.runtime.database.lookup() as connection:
        return dict(tuple(row) for row in connection.execute(statement.where(*mine)))


class TestEstimate:
    def test_an_item_whose_embedding_was_discarded_waits_like_others(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures)
        with served.runtime.database.write() as connection:
            mine = select(item.c.id).join(gallery).where(gallery.c.name == path.rpartition("/")[2])
            connection.execute(delete(embedding).where(embedding.c.item_id == mine.limit(1).scalar_subquery()))

        answer = ask(served, path, dry_run=True).json()

        assert (answer["items"], answer["macs_per_item"]["transform"]) == (20, None)

    def test_it_says_what_it_would_take_and_starts_nothing(self, served: Any, pictures: list[bytes]) -> None:
        """20 items of 4 numbers; 6 more numbers each; one product of (64, 6) an image."""
        path = fill(served, pictures)

        told = ask(served, path, dry_run=True)

        assert told.status_code == 200
        body = told.json()
        assert body["seconds_per_item"] > 0
        assert body["seconds"] == pytest.approx(20 * body["seconds_per_item"])
        assert {**body, "seconds": 0, "seconds_per_item": 0} == {
            "kind": "reencode",
            "version": "v2",
            "items": 20,
            "without_image": 0,
            "sampled": 20,
            "seconds_per_item": 0,
            "seconds": 0,
            "bytes_now": 20 * 16,
            "bytes_after": 20 * (16 + 24),
            "bytes_after_retiring": 20 * 24,
            "macs_per_item": {"reencode": 64 * 6, "transform": None},
            "macs": 20 * 64 * 6,
            "tokens": None,
            "price": None,
        }
        assert served.http.get(f"{path}/backfills").json() == {"backfills": []}
        assert served.http.get(path).json()["mix"] == {"v1": 20}

    def test_scope_and_rate_count(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures)
        supplied = {"version": "v1", "items": [{"id": "e", "metadata": {}, "embedding": [1, 2, 3, 4]}]}
        served.http.post(f"{path}/items", json=supplied)

        body = ask(served, path, dry_run=True, share=0.5, limit=8, rate=0.5).json()

        assert (body["items"], body["without_image"], body["seconds"]) == (8, 1, 16.0)
        assert (body["bytes_after"], body["bytes_after_retiring"]) == (21 * 16 + 8 * 24, None)

    def test_the_measured_move_is_taken_back(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures, "v1", "unsure")
        before = stored(served, path, "v1", embedding.c.vector)

        seq = served.http.get(path).json()["seq"]

        assert ask(served, path, dry_run=True, kind="transform").json()["sampled"] == 20

        assert stored(served, path, "unsure", embedding.c.vector) == {}
        assert stored(served, path, "v1", embedding.c.vector) == before
        assert served.http.get(path).json()["seq"] == seq

    def test_a_filter_rules_the_sample_too(self, served: Any, pictures: list[bytes]) -> None:
        path = served.gallery("v1")
        for kind, numbers in (("boot", range(6)), ("shoe", range(6, 20))):
            served.ingest(path, {f"i{n}": pictures[n] for n in numbers}, kind=kind)
        served.http.post(f"{path}/deployments", json={"version": "v2"})

        told = ask(served, path, dry_run=True, filter={"field": "kind", "eq": "boot"}).json()

        assert (told["items"], told["sampled"], told["bytes_after_retiring"]) == (6, 6, None)

    def test_what_is_replaced_adds_nothing_and_of_a_part_it_is_the_most_that_is_said(
        self, served: Any, pictures: list[bytes]
    ) -> None:
        path = served.gallery("v1")
        for kind, numbers in (("boot", range(6)), ("shoe", range(6, 20))):
            served.ingest(path, {f"i{n}": pictures[n] for n in numbers}, kind=kind)
        served.http.post(f"{path}/deployments", json={"version": "unsure"})
        assert ask(served, path, kind="transform", filter={"field": "kind", "eq": "shoe"}).status_code == 202
        served.work()

        boots, shoes = ({"filter": {"field": "kind", "eq": kind}} for kind in ("boot", "shoe"))
        for scope, added in (
            (boots, 6),
            (shoes, 0),
            ({"limit": 4}, 4),
            ({"limit": 8}, 6),
            ({"share": 0.2}, 4),
            ({}, 6),
        ):
            told = ask(served, path, dry_run=True, **scope).json()
            assert told["bytes_after"] - told["bytes_now"] == added * 20, scope

    @pytest.mark.parametrize(("name", "side_dim"), [("telling", 2), ("mute", 0)])
    def test_side_information_counts_if_the_edge_gives_it(
        self, served: Any, pictures: list[bytes], tmp_path: Path, name: str, side_dim: int
    ) -> None:
        """A transform by an edge without `next_side` stores vectors only; a reencode always stores both."""
        made = make_version(tmp_path / name, name, 5, side_dim=2, edges=[(served.versions["v1"], "forward")])
        assert served.register(made if side_dim else tell_no_side(made, "v1")).status_code == 201
        path = fill(served, pictures, "v1", name)

        told = {kind: ask(served, path, dry_run=True, kind=kind).json() for kind in ("transform", "reencode")}
        assert ask(served, path, kind="transform").status_code == 202
        served.work()
        after = ask(served, path, dry_run=True).json()

        added = {kind: estimate["bytes_after"] - estimate["bytes_now"] for kind, estimate in told.items()}
        assert added == {"transform": 20 * (5 + side_dim) * 4, "reencode": 20 * (5 + 2) * 4}
        assert after["bytes_now"] == told["transform"]["bytes_after"]

    def test_texts_get_no_side_information(self, served: Any, pictures: list[bytes], tmp_path: Path) -> None:
        bare = make_version(tmp_path / "reader", "reader", 5, side_dim=2)
        assert served.register(add_text(bare, {"east": np.eye(5)[0], "north": np.eye(5)[1]})).status_code == 201
        path = served.filled(pictures[:4])
        entries = [{"id": f"t{n}", "text": "east north", "embedding": [1, 2, 3, 4]} for n in range(6)]
        assert served.http.post(f"{path}/items", json={"version": "v1", "items": entries}).json()["failed"] == 0
        served.deploy(path, "reader")

        told = {limit: ask(served, path, dry_run=True, limit=limit).json() for limit in (10, 3)}
        assert ask(served, path).status_code == 202
        served.work()

        assert told[10]["bytes_after"] - told[10]["bytes_now"] == (10 * 5 + 4 * 2) * 4
        assert told[3]["bytes_after"] - told[3]["bytes_now"] == (3 * 5 + 3 * 2) * 4
        assert ask(served, path, dry_run=True).json()["bytes_now"] == told[10]["bytes_after"]

    def test_items_without_image_are_counted_in_the_scope_only(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures)
        for kind in ("boot", "boot", "shoe"):
            entry = {"id": f"{kind}-{time.monotonic_ns()}", "metadata": {"kind": kind}, "embedding": [1, 2, 3, 4]}
            served.http.post(f"{path}/items", json={"version": "v1", "items": [entry]})

        boots = {"field": "kind", "eq": "boot"}
        assert ask(served, path, dry_run=True).json()["without_image"] == 3
        assert ask(served, path, dry_run=True, filter=boots).json()["without_image"] == 2
        assert ask(served, path, dry_run=True, origin="encoded").json()["without_image"] == 0

    def test_a_filter_takes_what_passes_it(self, served: Any, pictures: list[bytes]) -> None:
        path = served.gallery("v1")
        for kind, numbers in (("boot", range(6)), ("shoe", range(6, 20))):
            served.ingest(path, {f"i{n}": pictures[n] for n in numbers}, kind=kind)
        served.http.post(f"{path}/deployments", json={"version": "v2"})
        where = {"field": "kind", "eq": "boot"}

        assert ask(served, path, dry_run=True, filter=where).json()["items"] == 6
        started = ask(served, path, filter=where).json()
        assert (started["filter"], sorted(planned(served, started["id"]))) == (where, [f"i{n}" for n in range(6)])
        served.work()
        assert served.http.get(f"/backfills/{started['id']}").json()["state"] == "done"
        served.runtime.replica.refresh(served.runtime.replica.find(path.rpartition("/")[2]).id)
        assert served.http.get(path).json()["mix"] == {"v1": 14, "v2": 6}

        for dry_run in (True, False):
            refused = ask(served, path, dry_run=dry_run, filter={"field": "kind", "like": "b"})
            assert (refused.status_code, refused.json()["code"]) == (422, "invalid_filter")

    def test_transform_is_reckoned_beside_reencode(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures, "v1", "unsure")

        body = ask(served, path, dry_run=True, kind="transform").json()

        assert body["macs_per_item"] == {"reencode": 64 * 5, "transform": 4 * 5 + 4 * 1}
        assert body["macs"] == 20 * 24

    def test_what_could_not_be_started_cannot_be_estimated(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures)

        assert ask(served, path, dry_run=True, kind="transform").json()["code"] == "no_route"
        assert ask(served, path, dry_run=True, version="v1").json()["code"] == "not_current"
        assert ask(served, path, dry_run=True, order="uncertainty").json()["code"] == "no_uncertainty"
        assert ask(served, path).status_code == 202
        for dry_run in (True, False):
            assert ask(served, path, dry_run=dry_run).json()["code"] == "backfill_active"


class TestUncertainty:
    def test_the_edges_variance_orders_the_items_and_is_kept_with_them(
        self, served: Any, pictures: list[bytes]
    ) -> None:
        path = fill(served, pictures, "v1", "unsure")
        vectors = stored(served, path, "v1", embedding.c.vector)
        variance = {name: abs(float(from_bytes([row], 4)[0, 0])) for name, row in vectors.items()}
        expected = sorted(variance, key=lambda name: -variance[name])

        number = ask(served, path, kind="transform", order="uncertainty").json()["id"]
        assert planned(served, number) == expected
        served.work()
        kept = stored(served, path, "unsure", embedding.c.uncertainty)
        assert kept == pytest.approx(variance)

        # What was kept orders the reencode of what is transformed now.
        again = ask(served, path, order="uncertainty", origin="transformed").json()["id"]
        assert planned(served, again) == expected

    @pytest.mark.parametrize("claimed_by", ["remote", "local"])
    def test_what_comes_while_it_runs_is_ordered_too_whoever_claims(
        self, served: Any, pictures: list[bytes], claimed_by: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(planning, "remove_ended_chunks", lambda *_: None)  # the order is read from them
        path = fill(served, pictures[:12], "v1", "unsure")
        number = ask(served, path, kind="transform", order="uncertainty", chunk_size=12).json()["id"]
        later = fill(served, pictures[12:], "v1", "unsure")
        rows = stored(served, later, "v1", embedding.c.vector)
        items = [
            {"id": f"late{n}", "embedding": from_bytes([row], 4)[0].tolist()} for n, row in enumerate(rows.values())
        ]
        added = served.http.post(f"{path}/items", json={"version": "v1", "items": items})
        assert added.status_code == 200, added.text
        vectors = stored(served, path, "v1", embedding.c.vector)
        variance = {name: abs(float(from_bytes([row], 4)[0, 0])) for name, row in vectors.items()}
        expected = sorted((name for name in vectors if name.startswith("late")), key=lambda name: -variance[name])
        assert expected != sorted(expected)

        if claimed_by == "local":
            served.work()
        else:
            for count in (12, 8):
                task = served.http.post("/work:claim", json={"worker": "w"}).json()
                assert task["items"] == count
                params = {"lease": task["lease"]}
                chunk = served.http.get(f"/work/{task['chunk']}", params=params).json()["items"]
                moved = [{"item": i["item"], "seq": i["seq"], "vector": UNIT} for i in chunk]
                given = served.http.post(f"/work/{task['chunk']}", params=params, json={"moved": moved})
                assert given.json()["done"] == count
            assert served.http.post("/work:claim", json={"worker": "w"}).status_code == 204

        assert planned(served, number)[12:] == expected
        assert served.http.get(f"/backfills/{number}").json()["state"] == "done"

    def test_beyond_its_limit_nothing_is_asked_of_the_edge_at_the_end(
        self, served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = fill(served, pictures, "v1", "unsure")
        number = ask(served, path, kind="transform", order="uncertainty", limit=5).json()["id"]
        monkeypatch.setattr(uncertainties, "uncertainties", lambda *_: pytest.fail("asked in vain"))

        served.work()

        shown = served.http.get(f"/backfills/{number}").json()
        assert (shown["state"], shown["done"]) == ("done", 5)

    def test_an_item_without_its_side_information_comes_last_and_hides_no_other(
        self, served: Any, pictures: list[bytes]
    ) -> None:
        served.add("sided", 4, side_dim=2)
        served.add("doubting", 5, edges=[("sided", "forward")], variance="sided")
        path = fill(served, pictures[:6], "sided", "doubting")
        lone = {"version": "sided", "items": [{"id": "lone", "embedding": [1, 0, 0, 0]}]}
        assert served.http.post(f"{path}/items", json=lone).status_code == 200

        started = ask(served, path, kind="transform", order="uncertainty")

        assert started.status_code == 202, started.text
        order = planned(served, started.json()["id"])
        assert (len(order), order[-1]) == (7, "lone")

    def test_in_hyperbolic_space_the_norm_does(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures, "lorentz", "near")
        vectors = stored(served, path, "lorentz", embedding.c.vector)
        norms = {name: float(np.linalg.norm(from_bytes([row], 4))) for name, row in vectors.items()}

        number = ask(served, path, order="uncertainty").json()["id"]

        assert planned(served, number) == sorted(norms, key=lambda name: norms[name])

    def test_where_nothing_tells_it_is_refused(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures)

        refused = ask(served, path, order="uncertainty")

        assert (refused.status_code, refused.json()["code"]) == (409, "no_uncertainty")
        assert refused.json()["errors"][0]["pointer"] == "/order"
        assert served.http.get(f"{path}/backfills").json() == {"backfills": []}


class TestTraffic:
    def test_what_queries_found_is_counted_and_orders_a_backfill(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures)
        found = []
        for number in (3, 3, 7):
            answer = served.query(path, pictures[number], k=2).json()
            found += [match["id"] for match in answer["results"][0]["matches"]]
        served.runtime.traffic.flush()
        expected = {name: found.count(name) for name in found}

        with served.runtime.database.lookup() as connection:
            mine = select(item.c.external_id, item_traffic.c.matches).select_from(item_traffic.join(item).join(gallery))
            rows = connection.execute(mine.where(gallery.c.name == path.rpartition("/")[2]))
            assert dict(tuple(row) for row in rows) == expected
        first = planned(served, ask(served, path, order="traffic").json()["id"])[: len(expected)]
        assert [expected[name] for name in first] == sorted(expected.values(), reverse=True)

    def test_counting_goes_on_when_a_gallery_is_gone(self, served: Any, pictures: list[bytes]) -> None:
        path = fill(served, pictures)
        served.query(path, pictures[0], k=3)
        assert served.remove(path).status_code == 204

        served.runtime.traffic.flush()

        with served.runtime.database.lookup() as connection:
            lost = select(item_traffic).outerjoin(item, item.c.id == item_traffic.c.item_id).where(item.c.id.is_(None))
            assert connection.execute(lost).all() == []


def test_each_failure_says_where_the_item_can_still_be_found(
    served: Any, pictures: list[bytes], tmp_path: Path
) -> None:
    path = fill(served, pictures)
    with served.runtime.database.lookup() as connection:
        last = connection.execute(select(item).order_by(item.c.id.desc()).limit(1)).one()
    served.runtime.blobs.remove([last.blob])
    number = ask(served, path).json()["id"]
    served.work()

    body = served.http.get(f"/backfills/{number}/failures").json()

    (failure,) = body["failures"]
    assert (failure["item"], failure["code"], failure["version"]) == (last.external_id, "image_missing", "v1")
    assert (failure["attempts"], failure["next_try"], body["failed"]) == (1, None, 1)
    served.runtime.replica.refresh(last.gallery_id)
    answer = served.query(path, pictures[19], k=20).json()
    assert last.external_id in [match["id"] for match in answer["results"][0]["matches"]]
