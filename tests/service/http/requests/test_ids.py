"""Ids that would climb out of their path, and what a client that joins paths does with those there are."""

from __future__ import annotations

import http.client
import posixpath
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from index.item_id import are_plain_ids, is_item_id
from regraft.client import Client, Problem, UnexpectedAnswer
from staging.api.served import problem
from staging.inputs.builders import make_version

CLIMBING = [".", "..", "../b", "a/..", "a/./b", r"a\..\b", "..\u00a0", "%2e%2E", "%252e.", "..%2fb", "..?x=1", "a/..#y"]


def listed(*ids: str) -> dict[str, Any]:
    return {"items": [{"id": i, "embedding": [1, 2, 3, 4]} for i in ids]}


@pytest.mark.parametrize("climbing", CLIMBING)
def test_no_item_can_be_named_so_that_its_path_is_anothers(served: Any, climbing: str) -> None:
    path = served.gallery()

    refused = problem(served.http.post(f"{path}/items", json=listed(climbing)), 422, "items_refused", "/items/0/id")

    assert refused["errors"][0]["code"] == "invalid_item"
    assert not is_item_id(climbing)


@given(st.lists(st.one_of(st.text("./\\%2e?# a\u00a0\n", max_size=8), st.sampled_from([*CLIMBING, "a" * 257, 1]))))
def test_many_ids_told_at_once_are_each_legal(ids: list[Any]) -> None:
    assert not are_plain_ids(ids) or all(map(is_item_id, ids))
    assert are_plain_ids(["a", "b/c", ".d", "e...", "ä 1"])


def test_a_client_that_joins_paths_deletes_the_items_and_not_their_gallery(served: Any) -> None:
    path = served.gallery()
    served.http.post(f"{path}/items", json=listed(*CLIMBING, "a..b", "...", ".a", "a/b"))

    for item in served.http.get(f"{path}/items").json()["items"]:
        assert served.http.delete(f"{path}/items/{item['id']}").status_code == 204  # httpx shortens it

    assert served.http.get(path).json()["items"] == 0


@pytest.mark.parametrize("joined", ["..", "../", "a/../..", "../evaluations/{set}", "../../../versions/lone"])
@pytest.mark.parametrize("shortened", [False, True], ids=["as it is", "shortened"])
def test_an_id_that_is_joined_unchecked_deletes_nothing_else(
    served: Any, tmp_path: Path, joined: str, shortened: bool
) -> None:
    path = served.gallery()
    assert served.register(make_version(tmp_path / "lone", "lone", 4)).status_code in {200, 201}
    entries = {"entries": [{"label": 0}, {"label": 0}], "embeddings": {"v1": [[1, 0, 0, 0], [0, 1, 0, 0]]}}
    kept = served.http.post(f"{path}/evaluations", json=entries).json()["id"]
    joined, base = f"/v1{path}/items/{joined.format(set=kept)}", served.http.base_url
    raw = http.client.HTTPConnection(base.host, base.port)  # sends the path as it is
    raw.request("DELETE", posixpath.normpath(joined) if shortened else joined)

    assert raw.getresponse().status in {404, 405, 422}

    raw.close()
    for there in (path, f"{path}/evaluations/{kept}", "/versions/lone"):
        assert served.http.get(there).status_code == 200


def test_a_deletion_of_more_than_an_item_says_twice_what_it_deletes(served: Any) -> None:
    path = served.gallery()

    problem(served.http.delete(path), 422, "invalid_request", "/confirm")
    problem(served.http.delete(path, params={"confirm": "other"}), 422, "invalid_argument", "/confirm")
    assert served.remove(path).status_code == 204


def test_a_proxy_that_merges_slashes_makes_the_client_delete_and_show_no_other_item(served: Any) -> None:
    """As nginx does by default, if it also removes a prefix."""
    path = served.gallery()
    ids = ["a//b", "a/b", "c%20d"]
    served.http.post(f"{path}/items", json=listed(*ids))

    def merged(request: httpx.Request) -> httpx.Response:
        url = served.http.base_url.join(quote(request.url.path.replace("//", "/")))
        return served.http.request(request.method, url, params=request.url.params)

    with Client("http://proxy", transport=httpx.MockTransport(merged)) as client:
        gallery = path.rpartition("/")[2]
        with pytest.raises(Problem, match="confirm must be 'a/b'"):
            client.delete_item(gallery, "a//b")
        with pytest.raises(UnexpectedAnswer, match="item 'a//b' was asked for, and the answer shows 'a/b'"):
            client.item(gallery, "a//b")
        with pytest.raises(Problem, match="confirm must be 'a/b'"):
            client.item_image(gallery, "a//b")
        with pytest.raises(Problem, match="item 'a/b' was stored as an embedding"):
            client.item_image(gallery, "a/b")
        assert client.item(gallery, "a/b").id == "a/b"
        client.delete_item(gallery, "a/b")

    with Client(served.url) as client:
        assert [item.id for item in client.items(gallery).items] == ["a//b", "c%20d"]
        assert [client.item(gallery, key).id for key in ("a//b", "c%20d")] == ["a//b", "c%20d"]
        client.delete_item(gallery, "c%20d")
        client.delete_item(gallery, "a//b")
    assert served.http.get(path).json()["items"] == 0


@pytest.mark.parametrize(
    "below",
    ["/", "//", "/.", "/items", "/items/", "/items//", "/items/..", "/items/%2e%2e", "/items/%2E%2E/", "/items/a/.."],
)
def test_no_path_below_a_gallery_deletes_it(served: Any, below: str) -> None:
    path = served.gallery()
    base = served.http.base_url
    raw = http.client.HTTPConnection(base.host, base.port)  # sends the path as it is
    raw.request("DELETE", f"/v1{path}{below}")

    assert raw.getresponse().status in {404, 405}

    raw.close()
    assert served.http.get(path).status_code == 200


def test_a_gallery_cannot_be_named_so_that_its_path_is_anothers(served: Any) -> None:
    for name in ("..", ".", "a/..", "%2e%2e", ""):
        problem(served.http.post("/galleries", json={"name": name}), 422, "invalid_argument", "/name")


def test_ids_that_no_item_has_are_unknown_wherever_they_are_named(served: Any) -> None:
    path = served.gallery()

    assert served.http.post(f"{path}/items:delete", json={"ids": ["..", "a\tb"]}).json()["missing"] == ["..", "a\tb"]
    problem(served.http.get(f"{path}/items/{quote('a/../b', safe='')}"), 404, "unknown_item")
