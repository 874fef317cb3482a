"""What a query may ask besides images: stored items, mixed batches, pages, thresholds."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, update

from index.encoders.encoder import Encoder
from index.encoders.image import decode_image
from index.version import Version
from service.store.tables import embedding, item
from staging.api.served import ids, problem
from staging.inputs.builders import make_version

DEEP = base64.urlsafe_b64encode(b"[" * 100_000).decode()


@pytest.fixture(scope="module")
def filled(served: Any, pictures: list[bytes]) -> str:
    """A gallery of v1 with every picture."""
    path: str = served.gallery()
    store(served, path, range(20), pictures)
    return path


@pytest.fixture(scope="module")
def upgraded(served: Any, pictures: list[bytes]) -> str:
    """Ten items of v1, and ten of v2, which is current."""
    path: str = served.gallery()
    store(served, path, range(10), pictures)
    served.deploy(path, "v2")
    store(served, path, range(10, 20), pictures)
    return path


def store(served: Any, path: str, numbers: range, pictures: list[bytes]) -> None:
    items = [{"id": f"i{n}", "metadata": {}, "image": f"{n}"} for n in numbers]
    assert served.post_items(path, items, [(f"{n}", pictures[n]) for n in numbers]).status_code == 200


def ask(served: Any, path: str, **body: Any) -> Any:
    return served.http.post(f"{path}/query", json=body)


def lose_image(served: Any, path: str, name: str) -> int:
    """Remove an item's image from the store; returns the item's key."""
    loaded = served.runtime.replica.find(path.rpartition("/")[2])
    with served.runtime.database.lookup() as connection:
        row = connection.execute(select(item).where(item.c.gallery_id == loaded.id, item.c.external_id == name)).one()
    assert served.runtime.blobs.remove([row.blob]) == []
    return int(row.id)


class TestItems:
    def test_an_item_finds_what_its_image_finds_but_not_itself(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        by_image = ids(served.query(filled, pictures[3], pictures[11], k=20))

        answer = ask(served, filled, items=["i3", "i11"], k=20)

        expected = [[n for n in row if n != own] for row, own in zip(by_image, ("i3", "i11"), strict=True)]
        assert ids(answer) == expected
        assert [result["query"] for result in answer.json()["results"]] == ["/items/0", "/items/1"]

    def test_an_old_item_asks_as_the_current_version_by_its_image(
        self, served: Any, upgraded: str, pictures: list[bytes]
    ) -> None:
        by_image = ids(served.query(upgraded, pictures[3], pictures[13], k=20))

        answer = ask(served, upgraded, items=["i3", "i13"], k=20).json()

        expected = [[n for n in row if n != own] for row, own in zip(by_image, ("i3", "i13"), strict=True)]
        assert [[m["id"] for m in r["matches"]] for r in answer["results"]] == expected
        assert [(r["version"], r["mode"]) for r in answer["results"]] == [("v2", "raw")] * 2
        assert answer["degraded"] == []

    def test_an_item_without_an_image_asks_as_the_version_it_has(self, served: Any, pictures: list[bytes]) -> None:
        path = served.gallery()
        bare = [{"id": f"e{n}", "embedding": [1.0, n, 0.0, 0.0]} for n in range(3)]
        assert served.http.post(f"{path}/items", json={"items": bare}).status_code == 200
        served.deploy(path, "v2")
        store(served, path, range(2), pictures)

        answer = ask(served, path, items=["i0", "e0", "i1"], k=5).json()

        assert [result["query"] for result in answer["results"]] == ["/items/0", "/items/1", "/items/2"]
        (new, old, _) = answer["results"]
        assert (new["version"], {m["id"] for m in new["matches"]}) == ("v2", {"i1", "e0", "e1", "e2"})
        assert (old["version"], [m["id"] for m in old["matches"]]) == ("v1", ["e1", "e2"])
        assert [(d["version"], d["items"]) for d in answer["degraded"]] == [("v2", 2)]
        assert "no edge leads" in answer["degraded"][0]["reason"]

    def test_an_item_whose_image_is_lost_asks_as_the_version_it_has(self, served: Any, pictures: list[bytes]) -> None:
        path = served.gallery()
        store(served, path, range(3), pictures)
        served.deploy(path, "v2")
        store(served, path, range(3, 5), pictures)
        lose_image(served, path, "i0")

        answer = ask(served, path, items=["i1", "i0"], k=5).json()

        (kept, lost) = answer["results"]
        assert (kept["version"], {m["id"] for m in kept["matches"]}) == ("v2", {"i0", "i2", "i3", "i4"})
        assert (lost["version"], {m["id"] for m in lost["matches"]}) == ("v1", {"i1", "i2"})
        assert [(d["version"], d["items"]) for d in answer["degraded"]] == [("v2", 2)]
        problem(ask(served, path, items=["i0"], k=5, strict=True), 409, "no_route")

    @pytest.mark.parametrize(("name", "edges"), [("apart", []), ("mixed", ["slerp"])])
    def test_an_item_whose_image_is_lost_reaches_no_items_that_only_the_old_encoder_does(
        self, served: Any, pictures: list[bytes], tmp_path: Path, name: str, edges: list[str]
    ) -> None:
        """By its own embedding of the query, or by a mix of both versions' embeddings."""
        path = served.gallery()
        store(served, path, range(3), pictures)
        made = make_version(tmp_path / name, name, 5, edges=[(served.versions["v1"], kind) for kind in edges])
        assert served.register(made).status_code == 201
        served.deploy(path, name)
        store(served, path, range(3, 6), pictures)
        lose_image(served, path, "i3")

        answer = ask(served, path, items=["i4", "i3"], k=9).json()

        (kept, lost) = answer["results"]
        assert {result["version"] for result in (kept, lost)} == {name}
        assert {m["id"] for m in kept["matches"]} == {"i0", "i1", "i2", "i3", "i5"}
        assert {m["id"] for m in lost["matches"]} == {"i4", "i5"}
        assert [(d["version"], d["items"]) for d in answer["degraded"]] == [("v1", 3)]
        problem(ask(served, path, items=["i3"], k=9, strict=True), 409, "no_route")

    def test_an_item_whose_image_and_embedding_are_lost_is_named(self, served: Any, pictures: list[bytes]) -> None:
        path = served.gallery()
        store(served, path, range(2), pictures)
        key = lose_image(served, path, "i0")
        with served.runtime.database.write() as connection:
            connection.execute(update(embedding).where(embedding.c.item_id == key).values(vector=b"damaged"))

        problem(ask(served, path, items=["i1", "i0"], k=1), 404, "no_image", "/items/1")

    def test_an_item_that_is_not_there_is_named(self, served: Any, filled: str) -> None:
        problem(ask(served, filled, items=["i3", "i99"], k=1), 404, "unknown_item", "/items/1")

    @pytest.mark.parametrize(
        ("items", "pointer"), [([], "/items"), ("i3", "/items"), (None, "/items"), (["i3", 4], "/items/1")], ids=str
    )
    def test_a_bad_list_is_named(self, served: Any, filled: str, items: Any, pointer: str) -> None:
        problem(ask(served, filled, items=items, k=1), 422, "invalid_body", pointer)


def test_a_request_without_a_query_is_told_what_it_lacks(served: Any, filled: str) -> None:
    told = problem(ask(served, filled, k=1), 422, "invalid_body")

    assert told["detail"].startswith("the query is empty: give at least one of embeddings, texts and items")


def test_a_batch_may_mix_images_embeddings_and_items(
    served: Any, filled: str, pictures: list[bytes], versions: dict[str, Version]
) -> None:
    vectors = Encoder(versions["v1"]).encode([decode_image(picture) for picture in pictures]).vectors
    by_image = ids(served.query(filled, *pictures, k=20))

    form = served.query(filled, pictures[0], pictures[5], items='["i3"]', k=19)
    plain = ask(served, filled, version="v1", embeddings=vectors[:2].tolist(), items=["i3"], k=19)

    without = [n for n in by_image[3] if n != "i3"]
    assert ids(form) == [by_image[0][:19], by_image[5][:19], without]
    assert ids(plain) == [by_image[0][:19], by_image[1][:19], without]
    assert [r["query"] for r in form.json()["results"]] == ["/images/0", "/images/1", "/items/0"]
    assert [r["query"] for r in plain.json()["results"]] == ["/embeddings/0", "/embeddings/1", "/items/0"]


class TestPages:
    @pytest.mark.parametrize("mode", [None, "raw", "rank"])
    def test_pages_put_together_are_the_whole_ranking(
        self, served: Any, upgraded: str, pictures: list[bytes], mode: str | None
    ) -> None:
        fields = {"mode": mode} if mode else {}
        whole = ids(served.query(upgraded, pictures[3], pictures[4], k=20, **fields))

        pages = []
        following: dict[str, str] = {}
        for _ in range(9):
            answer = served.query(upgraded, pictures[3], pictures[4], k=6, **fields, **following)
            pages.append(ids(answer))
            if answer.json()["next"] is None:
                break
            following = {"cursor": answer.json()["next"]}

        assert [len(page[0]) for page in pages] == [6, 6, 6, 2]
        assert [[n for page in pages for n in page[row]] for row in range(2)] == whole

    def test_items_that_are_equally_near_are_each_on_one_page(self, served: Any) -> None:
        path = served.gallery("plain")
        rows = np.eye(3)[np.arange(90) % 2].tolist()
        items = [{"id": f"c{n}", "embedding": row} for n, row in enumerate(rows)]
        assert served.http.post(f"{path}/items", json={"version": "plain", "items": items}).status_code == 200

        seen = []
        following: dict[str, str] = {}
        while True:
            asked = {"version": "plain", "embeddings": rows[:1], "k": 7, **following}
            answer = served.http.post(f"{path}/query", json=asked)
            seen += ids(answer)[0]
            if answer.json()["next"] is None:
                break
            following = {"cursor": answer.json()["next"]}

        assert sorted(seen) == sorted(item["id"] for item in items)

    def test_an_item_is_left_out_of_all_its_pages(self, served: Any, filled: str) -> None:
        whole = ids(ask(served, filled, items=["i3"], k=20))
        first = ask(served, filled, items=["i3"], k=10)
        second = ask(served, filled, items=["i3"], k=10, cursor=first.json()["next"])

        assert [ids(first)[0] + ids(second)[0]] == whole
        assert second.json()["next"] is None

    @pytest.mark.parametrize("cursor", ["", "x", "WzEsIDJd", 7, "WzEsICJ4Il0", "Z" * 5, DEEP])
    def test_a_foreign_cursor_is_refused(self, served: Any, filled: str, cursor: Any) -> None:
        problem(ask(served, filled, items=["i3"], k=1, cursor=cursor), 422, "invalid_argument", "/cursor")

    @pytest.mark.parametrize(
        "other",
        [{"mode": "rank"}, {"threshold": 0}, {"filter": {"field": "a", "exists": False}}, {"items": ["i3"] * 2}],
    )
    def test_a_cursor_of_another_request_is_refused(self, served: Any, filled: str, other: dict[str, Any]) -> None:
        asked = {"items": ["i3"], "k": 1}
        cursor = ask(served, filled, **asked).json()["next"]

        problem(ask(served, filled, **{**asked, **other}, cursor=cursor), 422, "invalid_argument", "/cursor")
        same = {**asked, "k": 4, "strict": True, "explain": True}
        assert ask(served, filled, **same, cursor=cursor).status_code == 200

    def test_a_cursor_of_other_queries_or_another_gallery_is_refused(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        other = served.filled(pictures[:4])
        one, two = ({"version": "v1", "embeddings": [row]} for row in np.eye(4)[:2].tolist())
        for asked, changed in ((one, two), ({"items": ["i3"]}, {"items": ["i2"]})):
            cursor = ask(served, filled, **asked, k=1).json()["next"]
            for path, queries in ((filled, changed), (other, asked)):
                refused = ask(served, path, **queries, k=1, cursor=cursor)
                problem(refused, 422, "invalid_argument", "/cursor")
            assert ask(served, filled, **asked, k=1, cursor=cursor).status_code == 200

        cursor = served.query(filled, pictures[3], k=1).json()["next"]
        problem(served.query(filled, pictures[4], k=1, cursor=cursor), 422, "invalid_argument", "/cursor")
        assert served.query(filled, pictures[3], k=1, cursor=cursor).status_code == 200


@pytest.mark.parametrize("shown", [{"metadata": {"told": "x" * 60_000, "n": 1}}, {"text": "x" * 60_000}])
def test_what_matches_show_is_no_longer_than_a_body(served: Any, shown: dict[str, Any]) -> None:
    path = served.gallery("plain")
    items = [{"id": f"i{n}", "embedding": [n, 1, 1], **shown} for n in range(5)]
    assert served.http.post(f"{path}/items", json={"items": items}).json()["stored"] == 5
    body = {"version": "plain", "embeddings": [[1, 1, 1]] * 4, "k": 5, "with_text": True}  # 20 times 60,000 characters

    told = problem(ask(served, path, **body), 422, "invalid_argument", "/k")

    assert "request fewer matches" in told["detail"]
    less = {"with_text": False} if "text" in shown else {"fields": ["n"]}
    assert [len(found) for found in ids(ask(served, path, **body | less))] == [5] * 4
    assert [len(found) for found in ids(ask(served, path, **body | {"k": 3}))] == [3] * 4


class TestThreshold:
    def test_matches_of_a_cosine_space_are_at_least_so_near(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        whole = served.query(filled, pictures[3], k=20).json()["results"][0]["matches"]
        least = np.float64(whole[6]["score"])

        answer = served.query(filled, pictures[3], k=20, threshold=json.dumps(float(least))).json()

        assert [m["id"] for m in answer["results"][0]["matches"]] == [m["id"] for m in whole if m["score"] >= least]
        assert len(answer["results"][0]["matches"]) >= 7
        assert answer["next"] is None

    def test_matches_of_a_distance_are_at_most_so_far(self, served: Any, tmp_path: Any) -> None:
        assert served.register(make_version(tmp_path / "far", "far", 2, space={"kind": "l2"})).status_code == 201
        path = served.gallery("far")
        items = [{"id": f"e{n}", "embedding": [float(n), 0.0]} for n in range(5)]
        assert served.http.post(f"{path}/items", json={"items": items}).status_code == 200

        answer = ask(served, path, version="far", embeddings=[[0.0, 0.0]], k=5, threshold=2)

        assert ids(answer) == [["e0", "e1", "e2"]]

    @pytest.mark.parametrize("threshold", ["0.5", True, [1]])
    def test_it_is_a_number(self, served: Any, filled: str, threshold: Any) -> None:
        problem(ask(served, filled, items=["i3"], k=1, threshold=threshold), 422, "invalid_body", "/threshold")
