"""Items: read in pages, deleted, and written by many at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import service.items.transaction
from staging.api.ingest import blobs
from staging.api.served import problem


def test_a_batch_encoded_while_another_version_was_deployed_is_encoded_again(
    served: Any, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = served.gallery("v1")
    store = service.items.transaction.store_batch
    seen: list[str] = []

    def deploy_first(to: Any, *rest: Any) -> Any:
        if not seen:
            deployed = served.http.post(f"{path}/deployments", json={"version": "v2"})
            assert deployed.status_code == 201, deployed.text
        seen.append(to.current.name)
        return store(to, *rest)

    monkeypatch.setattr(service.items.transaction, "store_batch", deploy_first)
    count = len(blobs(served))

    assert served.ingest(path, {"a": pictures[0]}).json()["stored"] == 1

    assert seen == ["v1", "v2"]
    assert served.http.get(path).json()["mix"] == {"v2": 1}
    assert len(blobs(served)) == count + 1


def test_pages_show_every_item_once(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    ids = [f"i{n}" for n in range(7)]
    served.ingest(path, dict.fromkeys(ids, pictures[0]))
    served.http.delete(f"{path}/items/i3")

    seen, cursor = [], ""
    for _ in range(3):
        page = served.http.get(f"{path}/items", params={"limit": 2, "cursor": cursor}).json()
        seen += [i["id"] for i in page["items"]]
        cursor = page["next"]

    assert seen == ["i0", "i1", "i2", "i4", "i5", "i6"]
    assert cursor is None


def test_a_cursor_of_another_list_is_refused(served: Any, pictures: list[bytes]) -> None:
    path, other = served.gallery(), served.gallery()
    for each in (path, other):
        served.ingest(each, dict.fromkeys("ab", pictures[0]))
    cursor = served.http.get(f"{path}/items", params={"limit": 1}).json()["next"]

    for listed in ("items?", "items:embeddings?", "items:missing?version=v1&"):
        answers = [served.http.get(f"{at}/{listed}cursor={cursor}") for at in (path, other)]
        assert answers[0].status_code == 200
        problem(answers[1], 422, "invalid_argument", "/cursor")


@pytest.mark.parametrize(
    "name", ["a/b", "a/image", "image", "ü ☃", "a%2Fb", "?x=#y", "a" * 256, ".a", "a\u00a0b\u200b", "a..b", "..."]
)
def test_any_legal_id_can_be_read_and_deleted(served: Any, pictures: list[bytes], name: str) -> None:
    from urllib.parse import quote

    path = served.gallery()
    served.ingest(path, {name: pictures[0], "other": pictures[1]})
    url = f"{served.http.base_url}{path[1:]}/items/{quote(name, safe='')}"

    assert served.http.get(url).json()["id"] == name
    assert served.http.get(f"{url}/image").content == pictures[0]
    assert served.http.delete(url).status_code == 204
    assert served.http.get(url).status_code == 404
    assert served.http.get(f"{path}/items/other").status_code == 200


def test_an_id_with_a_line_break_behind_it_is_another_one(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, {"a": pictures[0]})

    problem(served.http.get(f"{path}/items/a%0A"), 404, "not_found")
    problem(served.http.delete(f"{path}/items/a%0A"), 404, "not_found")

    assert served.http.get(f"{path}/items/a").status_code == 200


def test_a_deleted_item_is_gone_at_once_with_all_it_had(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, {"a": pictures[0], "b": pictures[1]})
    images = len(blobs(served))

    assert served.http.delete(f"{path}/items/a").status_code == 204

    problem(served.http.get(f"{path}/items/a"), 404, "unknown_item")
    problem(served.http.get(f"{path}/items/a/image"), 404, "unknown_item")
    problem(served.http.delete(f"{path}/items/a"), 404, "unknown_item")
    assert served.http.get(path).json()["mix"] == {"v1": 1}
    assert [m["id"] for m in served.query(path, pictures[0], k=1).json()["results"][0]["matches"]] == ["b"]
    assert len(blobs(served)) == images - 1


def test_many_are_deleted_at_once_and_the_unknown_named(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, dict.fromkeys("abcd", pictures[0]))

    deleted = served.http.post(f"{path}/items:delete", json={"ids": ["a", "x", "c", "a"]})

    assert deleted.json() == {"deleted": 2, "missing": ["x"]}
    assert [i["id"] for i in served.http.get(f"{path}/items").json()["items"]] == ["b", "d"]
    problem(served.http.post(f"{path}/items:delete", json={"ids": []}), 422, "invalid_argument", "/ids")
    unlikely = ["a\0", "a\n", ""]
    assert served.http.post(f"{path}/items:delete", json={"ids": unlikely}).json()["missing"] == unlikely
    problem(served.http.get(f"{path}/items/a%00"), 404, "unknown_item")
    problem(served.http.post(f"{path}/items:delete", json={"ids": [1]}), 422, "invalid_request", "/ids/0")
    problem(served.http.post(f"{path}/items:delete", json={"ids": [1] * 101}), 413, "body_too_large", "/ids")


def test_a_deleted_id_can_be_stored_again(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    served.ingest(path, {"a": pictures[0]}, label=0)
    served.http.delete(f"{path}/items/a")

    served.ingest(path, {"a": pictures[1]}, label=1)

    assert served.http.get(f"{path}/items/a").json()["metadata"] == {"label": 1}
    shown = served.http.get(path).json()
    assert (shown["current"], shown["items"], shown["mix"], shown["seq"]) == ("v1", 1, {"v1": 1}, 4)


def test_ingest_and_delete_from_many_clients_agree_in_the_end(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery()
    failures: list[str] = []

    def work(number: int) -> None:
        for turn in range(6):
            stored = served.ingest(path, {f"{number}-{turn}": pictures[turn], "shared": pictures[number]}, n=number)
            gone = served.http.delete(f"{path}/items/{number}-{turn}") if turn % 2 else stored
            failures.extend(r.text for r in (stored, gone) if r.status_code >= 400)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    ids = {i["id"] for i in served.http.get(f"{path}/items").json()["items"]}
    assert ids == {"shared"} | {f"{n}-{turn}" for n in range(4) for turn in (0, 2, 4)}
    assert served.http.get(path).json()["items"] == len(ids)
    winner = served.http.get(f"{path}/items/shared").json()["metadata"]["n"]
    assert served.http.get(f"{path}/items/shared/image").content == pictures[winner]
