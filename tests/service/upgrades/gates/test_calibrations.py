"""The score maps of a gate: in force with its deployment, and gone with its rollback."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update

from service.http.app import create_app
from service.store.tables import calibration
from service.upgrades.gates import maps
from staging.api.served import Served
from staging.api.steps import gate, reencode
from staging.waiting import until


@pytest.fixture
def path(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures, about=lambda n: {"digit": n % 5})


def ask(served: Any, path: str, picture: bytes, **options: Any) -> dict[str, Any]:
    return dict(served.query(path, picture, k=20, **options).json())


def in_force(served: Any, path: str, picture: bytes) -> bool:
    return bool(ask(served, path, picture, mode="calibrated").get("mode") == "calibrated")


def finds_rank_best(served: Any, number: int) -> None:
    """All modes serve these galleries alike: have a gate have found another than the rule gives."""
    with served.runtime.database.write() as connection:
        mine = calibration.c.gate_id == number
        for row in connection.execute(select(calibration).where(mine, calibration.c.route != [])).all():
            found = {**row.evidence, "mode": row.evidence["mode"] and "rank"}
            connection.execute(update(calibration).where(calibration.c.id == row.id).values(evidence=found))


@pytest.mark.parametrize("label", ["digit", None])
def test_they_come_into_force_with_the_deployment_and_go_with_its_rollback(
    served: Any, path: str, pictures: list[bytes], label: str | None
) -> None:
    before = ask(served, path, pictures[0])
    report = gate(served, path, label=label).json()
    assert report["calibrations"] == 2
    assert all(area > 0 for area in report["merge"]["areas"].values())
    gated = ask(served, path, pictures[0])
    assert (gated["mode"], gated["results"]) == ("raw", before["results"])

    served.http.post(f"{path}/deployments", json={"version": "v2", "gate": report["id"], "override": "a test"})
    served.ingest(path, {"late": pictures[5]})
    assert ask(served, path, pictures[0])["mode"] == report["merge"]["mode"]
    mixed = ask(served, path, pictures[0], mode="calibrated")
    raw = served.query(path, pictures[0], k=20, mode="raw").json()["results"][0]["matches"]

    assert (mixed["mode"], mixed["mix"]) == ("calibrated", {"v1": 20, "v2": 1})
    scores = [match["score"] for match in mixed["results"][0]["matches"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    of_v1 = [m["id"] for m in mixed["results"][0]["matches"] if m["version"] == "v1"]
    assert of_v1 == [m["id"] for m in raw if m["version"] == "v1"][: len(of_v1)]
    served.http.delete(f"{path}/items/late")
    served.http.post(f"{path}/rollback")
    after = ask(served, path, pictures[0])
    assert (after["mode"], after["results"]) == ("raw", before["results"])


def test_a_canary_uses_those_of_its_gate(served: Any, path: str, pictures: list[bytes]) -> None:
    number = gate(served, path, label="digit").json()["id"]
    body = {"version": "v2", "gate": number, "override": "a test", "until": "canary", "canary": {"share": 1.0}}
    assert served.http.post(f"{path}/deployments", json=body).status_code == 201

    answer = ask(served, path, pictures[0], mode="calibrated")

    assert (answer["version"], answer["mode"]) == ("v2", "calibrated")


def test_the_mode_that_a_gate_found_best_is_the_default_while_its_deployment_stands(
    served: Any, path: str, pictures: list[bytes]
) -> None:
    report = gate(served, path, label="digit").json()
    areas = report["merge"]["areas"]
    assert set(areas) == {"raw", "calibrated", "rank"}
    assert set(report["merge"]["gains"]) == set(areas) - {report["merge"]["mode"]}
    finds_rank_best(served, report["id"])
    served.http.post(f"{path}/deployments", json={"version": "v2", "gate": report["id"], "override": "a test"})
    served.ingest(path, {"late": pictures[5]})

    assert ask(served, path, pictures[0])["mode"] == "rank"
    served.http.post(f"{path}/rollback")
    assert ask(served, path, pictures[0])["mode"] == "raw"


def test_there_is_one_for_each_version_that_serves_items(served: Any, path: str, pictures: list[bytes]) -> None:
    served.add("third", 6, drift=0.05, edges=[("v2", "identity")])
    served.deploy(path, "v2")
    served.filled(pictures)
    assert gate(served, path, "third").json()["calibrations"] == 3

    served.ingest(path, {"late": pictures[5], "later": pictures[0]})
    served.http.post(f"{path}/items:delete", json={"ids": [f"i{n}" for n in range(10)]})
    assert gate(served, path, "third").json()["calibrations"] == 3

    reencode(served, path)
    assert gate(served, path, "third").json()["calibrations"] == 2


@pytest.mark.parametrize("label", ["digit", None])
def test_large_samples_are_cut(served: Any, path: str, monkeypatch: pytest.MonkeyPatch, label: str | None) -> None:
    monkeypatch.setattr(maps, "MAX_ITEMS", 12)

    report = gate(served, path, label=label).json()

    assert (report["items"], report["calibrations"]) == (20, 2)
    assert 2 <= report["merge"]["queries"] <= 12


def test_a_deployment_without_gate_has_none(served: Any, path: str, pictures: list[bytes]) -> None:
    gate(served, path, label="digit")
    served.http.post(f"{path}/deployments", json={"version": "v2"})

    assert not in_force(served, path, pictures[0])


def test_those_of_a_replaced_edge_are_forgotten(served: Any, path: str, pictures: list[bytes]) -> None:
    number = gate(served, path, label="digit").json()["id"]
    served.http.post(f"{path}/deployments", json={"version": "v2", "gate": number, "override": "a test"})
    assert in_force(served, path, pictures[0])

    body = {"new": "v2", "old": "v1", "kind": "truncate", "replace": True}
    assert served.http.post("/edges", json=body).status_code == 201

    assert not in_force(served, path, pictures[0])
    with served.runtime.database.lookup() as connection:
        left = connection.execute(select(calibration.c.route).where(calibration.c.gate_id == number)).scalars()
        assert list(left) == [[]]


def test_those_of_an_edge_that_is_replaced_while_the_gate_measures_are_not_stored(
    served: Any, path: str, pictures: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, body = maps.fit_calibrations, {"new": "v2", "old": "v1", "kind": "truncate", "replace": True}

    def fit_and_replace(*args: Any) -> Any:
        fitted = fit(*args)
        assert served.http.post("/edges", json=body).status_code == 201
        return fitted

    monkeypatch.setattr("service.http.upgrades.gates.fit_calibrations", fit_and_replace)
    number = gate(served, path, label="digit").json()["id"]
    served.http.post(f"{path}/deployments", json={"version": "v2", "gate": number, "override": "a test"})

    assert not in_force(served, path, pictures[0])
    with served.runtime.database.lookup() as connection:
        stored = connection.execute(select(calibration.c.route).where(calibration.c.gate_id == number)).scalars()
        assert list(stored) == [[]]


def test_what_was_measured_along_other_edges_stays_when_one_goes(served: Any, path: str, pictures: list[bytes]) -> None:
    served.add("aside", 4)
    added = {"new": "v2", "old": "aside", "kind": "truncate"}
    assert served.http.post("/edges", json=added).status_code == 201
    number = gate(served, path, label="digit").json()["id"]
    finds_rank_best(served, number)
    served.http.post(f"{path}/deployments", json={"version": "v2", "gate": number, "override": "a test"})

    assert served.remove("/edges/v2/aside/truncate").status_code == 200

    assert in_force(served, path, pictures[0])
    assert ask(served, path, pictures[0])["mode"] == "rank"


def test_a_process_forgets_those_of_an_edge_that_another_replaced_by_one_alike(
    served: Any, path: str, pictures: list[bytes]
) -> None:
    again = {"new": "v2", "old": "v1", "kind": "truncate", "replace": True}
    served.http.post("/edges", json=again)
    number = gate(served, path, label="digit").json()["id"]
    served.http.post(f"{path}/deployments", json={"version": "v2", "gate": number, "override": "a test"})
    other = create_app(served.runtime.settings)
    with TestClient(other, base_url="http://127.0.0.1/v1") as elsewhere:
        assert in_force(Served(elsewhere, other.state.runtime), path, pictures[0])

        assert served.http.post("/edges", json=again).status_code == 201

        until(lambda: not in_force(Served(elsewhere, other.state.runtime), path, pictures[0]))
    assert not in_force(served, path, pictures[0])
