"""Backfills of kind `transform`: items move along an item edge, by what is stored of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text

from index.edges.transform import load_transform
from index.version import Version
from staging.inputs.builders import make_version

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    """fct has an item edge from v1."""
    served.add("fct", 5, edges=[("v1", "forward")])


def start(served: Any, path: str, **fields: Any) -> Any:
    return served.http.post(f"{path}/backfills", json=fields)


def shown(served: Any, number: int) -> dict[str, Any]:
    return served.http.get(f"/backfills/{number}").json()


def test_items_move_by_the_item_edge_without_their_images(served: Any, pictures: list[bytes]) -> None:
    path = served.filled(pictures)
    served.http.post(f"{path}/items", json={"items": [{"id": "e", "metadata": {}, "embedding": [1, 2, 3, 4]}]})
    served.deploy(path, "fct")

    number = start(served, path, kind="transform").json()["id"]
    served.work()

    assert shown(served, number)["done"] == 21
    assert served.http.get(path).json()["mix"] == {"fct": 21}
    shown_item = served.http.get(f"{path}/items/e").json()
    assert [(e["version"], e["origin"]) for e in shown_item["embeddings"]] == [
        ("v1", "supplied"),
        ("fct", "transformed"),
    ]


def test_a_reencode_afterwards_replaces_what_was_transformed(served: Any, pictures: list[bytes]) -> None:
    path = served.gallery("v1")
    served.ingest(path, {"i": pictures[0]})
    served.deploy(path, "fct")
    for kind in ("transform", "reencode"):
        assert start(served, path, kind=kind).json()["total"] == 1
        served.work()

    origins = [(e["version"], e["origin"]) for e in served.http.get(f"{path}/items/i").json()["embeddings"]]
    assert origins == [("v1", "encoded"), ("fct", "encoded")]
    assert start(served, path).json()["total"] == 0


def test_it_reads_any_embedding_an_item_edge_leads_from_also_one_that_is_not_active(
    served: Any, pictures: list[bytes]
) -> None:
    """v1 -> v2, backfilled -> back -> fct, which only an item edge from v1 leads to: items go to v2 by `dual`."""
    path = served.filled(pictures[:6])
    served.deploy(path, "v2")
    start(served, path)
    served.work()
    served.ingest(path, {"late": pictures[6]})
    served.http.post(f"{path}/rollback")
    served.deploy(path, "fct")
    assert served.http.get(path).json()["mix"] == {"v2": 7}
    estimate = served.http.post(f"{path}/backfills", json={"kind": "transform"}, params={"dry_run": "true"}).json()

    number = start(served, path, kind="transform").json()["id"]
    reading = served.http.post(f"{path}/retire", json={"version": "v1"})
    served.work()

    assert (estimate["items"], estimate["sampled"]) == (6, 6)
    assert estimate["macs_per_item"]["transform"] > 0
    assert (reading.status_code, reading.json()["code"]) == (409, "version_in_use")
    assert f"backfill {number} is running and reads 6 embeddings of 'v1'" in reading.json()["detail"]
    assert (shown(served, number)["state"], shown(served, number)["done"]) == ("done", 6)
    assert served.http.get(path).json()["mix"] == {"fct": 6, "v2": 1}
    held = served.http.get(f"{path}/items/i0").json()["embeddings"]
    assert [(e["version"], e["origin"]) for e in held] == [
        ("v1", "encoded"),
        ("v2", "encoded"),
        ("fct", "transformed"),
    ]
    assert served.http.post(f"{path}/retire", json={"version": "v1"}).json()["embeddings"] == 6
    assert start(served, path, kind="transform").json()["total"] == 0


def test_of_several_embeddings_it_reads_the_active_one(
    served: Any, pictures: list[bytes], versions: dict[str, Version], tmp_path: Path
) -> None:
    edges = [(versions["v1"], "forward"), (versions["v2"], "forward")]
    assert served.register(make_version(tmp_path / "both", "both", 7, edges=edges)).status_code == 201
    added = {"new": "both", "old": "v1", "kind": "truncate"}
    assert served.http.post("/edges", json=added).status_code == 201
    path = served.gallery("v1")
    served.ingest(path, {"i": pictures[0]})
    served.deploy(path, "v2")
    start(served, path)
    served.work()
    served.deploy(path, "both")
    assert served.http.get(path).json()["mix"] == {"v1": 1}

    start(served, path, kind="transform")
    served.work()

    row = """select vector from embedding join version on version.id = version_id
        where version.name = :name and item_id in (select id from item where gallery_id =
        (select id from gallery where name = :gallery))"""
    with served.runtime.database.lookup() as connection:
        by_name = {
            name: np.frombuffer(
                connection.execute(text(row), {"name": name, "gallery": path.rpartition("/")[2]}).scalar_one(),
                "<f4",
            )
            for name in ("v1", "v2", "both")
        }
    both = served.runtime.registry.named("both")
    edge = served.runtime.registry.graph().forward("v1", "both")
    expected = load_transform(edge, both.card, versions["v1"].card)(by_name["v1"][None])[0]
    assert by_name["both"] == pytest.approx(expected, abs=1e-6)
    other = served.runtime.registry.graph().forward("v2", "both")
    assert by_name["both"] != pytest.approx(
        load_transform(other, both.card, versions["v2"].card)(by_name["v2"][None])[0], abs=1e-3
    )
