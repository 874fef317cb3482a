"""API keys of some galleries: what they open of those, of other galleries, and of what belongs to none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from index.version import Version
from service.settings import Settings
from staging.api.operations import WITH_KEY
from staging.api.served import Served, problem, serving

KEY = "correct horse battery"
ROOT = {"authorization": f"Bearer {KEY}"}
SHARED = {"/v1/galleries", "/v1/versions", "/v1/versions/{name}", "/v1/edges", "/v1/edges/{new}/{old}/{kind}"}
"""Read with any key: galleries show those of the key alone."""


class Shops(NamedTuple):
    """A service with two galleries, each with a backfill that waits, and a key for one of them."""

    served: Served
    mine: str
    other: str
    numbers: dict[str, int]
    header: dict[str, str]


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, Version]) -> Iterator[Shops]:
    with serving(Settings(data=tmp_path_factory.mktemp("shops"), api_key=KEY), **ROOT) as running:
        for version in ("v1", "v2"):
            assert running.register(versions[version]).is_success
        mine, other = running.gallery("v1"), running.gallery("v1")
        numbers = {path: running.backfill(path, kind="supplied") for path in (mine, other)}
        yield Shops(running, mine, other, numbers, bearer(running, "mine", "admin", [mine]))


def bearer(served: Served, name: str, scope: str, paths: list[str]) -> dict[str, str]:
    body = {"name": name, "scope": scope, "galleries": [path.rpartition("/")[2] for path in paths]}
    answer = served.http.post("/keys", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["galleries"] == body["galleries"]
    return {"authorization": f"Bearer {answer.json()['key']}"}


def status(shops: Shops, method: str, path: str, gallery: str) -> int:
    """What the key of `mine` is answered by this operation; nothing that is asked here is complete."""
    address = path.replace("{number}", str(shops.numbers[gallery])).replace("/v1/galleries/{name}", gallery)
    address = address.removeprefix("/v1").replace("{", "").replace("}", "")
    if (method, address) == ("PATCH", gallery) or address.endswith(("/pause", "/resume", "/cancel")):
        address += "?dry_run=true"
    with shops.served.http.stream(method, address, headers=shops.header) as answer:
        return answer.status_code


@pytest.mark.parametrize(("method", "path"), WITH_KEY, ids=[f"{m} {p}" for m, p in WITH_KEY])
def test_a_key_of_a_gallery_opens_that_and_nothing_of_others(shops: Shops, method: str, path: str) -> None:
    own = path.startswith(("/v1/galleries/{name}", "/v1/backfills/"))
    shared = method == "GET" and path in SHARED

    assert (status(shops, method, path, shops.mine) != 403) == (own or shared)
    assert (status(shops, method, path, shops.other) != 403) == shared


def test_galleries_and_metrics_tell_of_no_other_gallery(shops: Shops) -> None:
    listed = shops.served.http.get("/galleries", headers=shops.header).json()["galleries"]

    assert [f"/galleries/{one['name']}" for one in listed] == [shops.mine]
    told = problem(shops.served.http.get("/../metrics", headers=shops.header), 403, "forbidden")["detail"]
    assert "mine" in told
    assert shops.mine.rpartition("/")[2] in told
    assert shops.served.http.get("/../docs", headers=shops.header).status_code == 200
    problem(shops.served.http.post("/galleries", json={"name": "new"}, headers=shops.header), 403, "forbidden")


def test_an_edge_tells_nothing_of_another_gallery_that_it_was_fitted_on(shops: Shops) -> None:
    for path, number in ((shops.mine, 0), (shops.other, 8)):
        rows = np.random.default_rng(number).normal(size=(20 + number, 10)).astype("float32")
        for version, part in (("v1", rows[:, :4]), ("v2", rows[:, 4:])):
            items = [{"id": f"i{n}", "embedding": one.tolist()} for n, one in enumerate(part)]
            sent = {"version": version, "items": items}
            route = "items" if version == "v1" else "items:embeddings"
            put = shops.served.http.put if version == "v2" else shops.served.http.post
            assert put(f"{path}/{route}", json=sent).status_code == 200

    def made(path: str | None, header: dict[str, str]) -> list[dict[str, Any]]:
        name = path and path.rpartition("/")[2]
        fit = {"new": "v2", "old": "v1", "kind": "ridge", "gallery": name, "replace": True, "embed": 0}
        answer = shops.served.http.post("/edges:fit", json=fit)
        assert answer.status_code == 201, answer.text
        edges = shops.served.http.get("/edges", headers=header).json()["edges"]
        (listed,) = [edge for edge in edges if edge["origin"] == "fitted"]
        shown = shops.served.http.get(f"/edges/v2/v1/{listed['kind']}", headers=header).json()
        return [listed["made"], shown["made"]]

    of_items = {"gallery", "label", "held", "embedded"}
    for told in made(shops.mine, shops.header):
        assert (told["gallery"], told["held"]) == (shops.mine.rpartition("/")[2], 20)
    for told in (*made(shops.other, shops.header), *made(None, shops.header)):
        assert told["fit"] == "ridge"
        assert of_items.isdisjoint(told)
    for told in made(shops.other, ROOT):
        assert of_items <= set(told)


def test_an_edge_names_no_item_of_another_gallery_that_it_was_verified_on(shops: Shops) -> None:
    name = shops.other.rpartition("/")[2]
    rows = np.eye(4).tolist()
    twins = {"version": "v1", "items": [{"id": f"secret{n}", "embedding": row} for n, row in enumerate(rows)]}
    assert shops.served.http.post(f"{shops.other}/items", json=twins).json()["stored"] == 4
    shops.served.add("twin", 4)
    twins["version"] = "twin"
    assert shops.served.http.put(f"{shops.other}/items:embeddings", json=twins).json()["stored"] == 4
    claim = {"new": "twin", "old": "v1", "kind": "identity", "verify": {"gallery": name, "items": 4}}
    assert shops.served.http.post("/edges", json=claim).status_code == 201

    def told(header: dict[str, str]) -> str:
        return shops.served.http.get("/edges/twin/v1/identity", headers=header).text

    assert "secret" in told(ROOT)
    assert "secret" not in told(shops.header)
    assert "tolerance" in told(shops.header)


def test_the_scope_of_a_key_holds_in_its_galleries(shops: Shops) -> None:
    header = bearer(shops.served, "searches", "query", [shops.mine, shops.other])
    query = {"embeddings": [[1, 0, 0, 0]], "version": "v1"}
    item = {"items": [{"id": "a", "embedding": [1, 0, 0, 0]}]}

    for path in (shops.mine, shops.other):
        assert shops.served.http.post(f"{path}/query", json=query, headers=header).status_code == 200
        problem(shops.served.http.post(f"{path}/items", json=item, headers=header), 403, "forbidden")
    assert shops.served.http.post(f"{shops.mine}/items", json=item, headers=shops.header).json()["stored"] == 1


def test_a_deleted_gallery_closes_its_backfill(shops: Shops) -> None:
    gone = shops.served.gallery("v1")
    number, header = shops.served.backfill(gone, kind="supplied"), bearer(shops.served, "of-gone", "query", [gone])
    assert shops.served.http.get(f"/backfills/{number}", headers=header).status_code == 200

    assert shops.served.remove(gone).status_code == 204

    problem(shops.served.http.get(f"/backfills/{number}", headers=header), 404, "unknown_backfill")


@pytest.mark.parametrize(
    ("galleries", "status", "code", "pointer"),
    [
        (["nothing"], 404, "unknown_gallery", "/galleries/0"),
        ([], 422, "invalid_request", "/galleries"),
        ("photos", 422, "invalid_request", "/galleries"),
    ],
)
def test_galleries_that_are_none_are_refused(
    shops: Shops, galleries: Any, status: int, code: str, pointer: str
) -> None:
    answer = shops.served.http.post("/keys", json={"name": "refused", "scope": "query", "galleries": galleries})

    assert problem(answer, status, code)["errors"][0]["pointer"] == pointer
    assert "refused" not in [one["name"] for one in shops.served.http.get("/keys").json()["keys"]]
