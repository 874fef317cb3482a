"""What a refused gate stops, and options that a step does not look at."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from service.store.tables import gate_report
from staging.api.steps import advance, refusal


@pytest.fixture(scope="module", autouse=True)
def more(served: Any) -> None:
    served.add("wrong", 4, seed=5, edges=[("v1", "identity")])
    served.add("far", 5, seed=9)
    served.add("next", 4, edges=[("wrong", "identity", 0.9), ("v1", "identity", 0.8)])


@pytest.fixture
def filled(served: Any, pictures: list[bytes]) -> str:
    return served.filled(pictures, about=lambda n: {"digit": n % 5})


@pytest.fixture
def refused(served: Any, filled: str) -> tuple[str, int]:
    """A gallery where a gate refused the version `wrong`, and the gate's number."""
    report = served.http.post(f"{filled}/gates", json={"version": "wrong", "label": "digit"}).json()
    assert report["verdict"] == "refuse"
    return filled, int(report["id"])


def deploy(served: Any, path: str, version: str = "wrong", **body: Any) -> Any:
    return served.http.post(f"{path}/deployments", json={"version": version, **body})


def evidence(served: Any, path: str, number: int) -> dict[str, Any]:
    """That of the newest step."""
    return dict(served.http.get(f"{path}/deployments/{number}").json()["transitions"][-1]["evidence"])


REFUSED = (422, "gate_refused", ["/override"])


class TestRefusal:
    def test_it_holds_whether_or_not_the_gate_is_named(self, served: Any, refused: tuple[str, int]) -> None:
        path, gate = refused

        unnamed = deploy(served, path)
        assert refusal(unnamed) == refusal(deploy(served, path, gate=gate)) == REFUSED
        assert f"gate {gate}" in unnamed.json()["detail"]
        number = deploy(served, path, until="verified").json()["id"]
        for to in ("canary", "current"):
            assert refusal(advance(served, path, number, to)) == REFUSED
            assert refusal(advance(served, path, number, to, override="  ")) == REFUSED
        assert served.http.get(path).json()["current"] == "v1"

    def test_it_holds_beside_a_report_of_an_earlier_release_that_holds_nan(
        self, served: Any, refused: tuple[str, int]
    ) -> None:
        path, gate = refused
        with served.runtime.database.write() as connection:
            row = connection.execute(select(gate_report).where(gate_report.c.id == gate)).one()
            earlier = {**row._asdict(), "id": None, "verdict": "warn", "report": {**row.report, "gap_closed": math.nan}}
            connection.execute(insert(gate_report).values(earlier))

        assert refusal(deploy(served, path)) == REFUSED
        assert deploy(served, path, override="the labels are wrong").json()["state"] == "current"

    def test_a_written_reason_leads_past_it_and_is_evidence(self, served: Any, refused: tuple[str, int]) -> None:
        path, gate = refused

        made = deploy(served, path, override="the labels are wrong").json()

        assert (made["state"], made["gate"], made["reason"]) == ("current", gate, "the labels are wrong")
        found = evidence(served, path, made["id"])
        assert {"gate": gate, "verdict": "refuse", "override": "the labels are wrong"}.items() <= found.items()

    def test_a_reason_given_at_an_earlier_step_counts_until_another_gate_refuses(
        self, served: Any, refused: tuple[str, int]
    ) -> None:
        path, gate = refused
        number = deploy(served, path, until="gated", gate=gate, override="known").json()["id"]
        assert advance(served, path, number, "canary").status_code == 200
        assert evidence(served, path, number)["override"] == "known"

        again = served.http.post(f"{path}/gates", json={"version": "wrong", "label": "digit"}).json()

        assert refusal(advance(served, path, number, "current")) == REFUSED
        assert advance(served, path, number, "current", override="seen again").status_code == 200
        assert evidence(served, path, number)["gate"] == again["id"]

    def test_a_shadow_answers_nobody_and_needs_no_reason(self, served: Any, refused: tuple[str, int]) -> None:
        path, _ = refused

        number = deploy(served, path, until="shadow").json()["id"]

        assert refusal(advance(served, path, number, "current")) == REFUSED

    @pytest.mark.parametrize(
        ("later", "stands"),
        [
            ({}, False),
            ({"queries": 21, "items": 40, "seed": 7, "slice": "shop"}, False),
            ({"queries": 15, "items": 18, "exhaustive": True}, False),
            ({"queries": 19}, True),
            ({"items": 19}, True),
            ({"metric": "cmc@5"}, True),
            ({"label": "other"}, True),
            ({"evaluation": 3}, True),
            ({"verdict": "warn"}, True),
            ({"verdict": "warn", "queries": 50, "items": 50, "seed": 1}, True),
        ],
    )
    def test_it_stands_until_a_report_of_at_least_its_strength_passes(
        self, served: Any, refused: tuple[str, int], later: dict[str, Any], stands: bool
    ) -> None:
        path, gate = refused
        # A version that is worse passes no true gate: the report that comes after the refusal is written by hand.
        with served.runtime.database.write() as connection:
            row = connection.execute(select(gate_report).where(gate_report.c.id == gate)).one()
            report = {**row.report, "exhaustive": False, "verdict": "pass", **later}
            values = {**row._asdict(), "report": report, "verdict": report["verdict"], "created": row.created + 1}
            del values["id"]
            number = connection.execute(insert(gate_report).values(values)).inserted_primary_key[0]

        answer = deploy(served, path)

        if stands:
            assert refusal(answer) == REFUSED
            assert f"gate {gate} " in answer.json()["detail"]
            assert refusal(deploy(served, path, gate=number)) == REFUSED
        else:
            found = evidence(served, path, answer.json()["id"])
            assert {"gate": number, "verdict": "pass"}.items() <= found.items()

    def test_a_smaller_or_another_draw_leads_past_no_refusal(self, served: Any, refused: tuple[str, int]) -> None:
        path, _ = refused
        for asked in ({"sample": 4, "label": "digit"}, {"seed": 1, "label": "digit"}, {"metric": "recall@k", "k": 19}):
            assert served.http.post(f"{path}/gates", json={"version": "wrong", **asked}).status_code == 201

        assert refusal(deploy(served, path)) == REFUSED

    def test_a_gate_over_another_current_version_says_nothing(self, served: Any, refused: tuple[str, int]) -> None:
        path, _ = refused
        assert deploy(served, path, "v2").status_code == 201

        assert deploy(served, path).status_code == 201

    def test_a_rollback_asks_no_gate(self, served: Any, refused: tuple[str, int]) -> None:
        path, _ = refused
        deploy(served, path, override="a test")
        deploy(served, path, "v1")

        assert served.http.post(f"{path}/rollback").json()["version"] == "wrong"

    def test_a_rollback_brings_back_the_gate_that_the_version_before_rested_on(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        first = served.http.post(f"{filled}/gates", json={"version": "v2", "label": "digit"}).json()["id"]
        deploy(served, filled, "v2", gate=first, override="a test")
        second = served.http.post(f"{filled}/gates", json={"version": "wrong", "label": "digit"}).json()["id"]
        assert deploy(served, filled, gate=second, override="a test").json()["gate"] == second

        back = served.http.post(f"{filled}/rollback").json()

        assert (back["version"], back["gate"]) == ("v2", first)
        assert served.query(filled, pictures[0], mode="calibrated").status_code == 200


class TestNotes:
    def test_a_deployment_says_what_it_does_not_reach_and_what_no_gate_has_measured(
        self, served: Any, filled: str
    ) -> None:
        """`far` has no edge: v1 answers on. `v2` has one."""
        alone = deploy(served, filled, "far", until="verified").json()
        advanced = advance(served, filled, alone["id"], "current").json()
        served.http.post(f"{filled}/rollback")
        reached = deploy(served, filled, "v2").json()

        for told in (alone["notes"], advanced["notes"]):
            assert len(told) == 2
            assert "20 items" in told[0]
            assert "'v1'" in told[0]
            assert "no gate" in told[1]
        assert [note.partition(" has")[0] for note in reached["notes"]] == ["no gate"]

    def test_items_that_an_edge_reaches_are_none_of_those_behind_old_encoders(
        self, served: Any, filled: str, pictures: list[bytes]
    ) -> None:
        deploy(served, filled, "far")
        assert served.ingest(filled, {"new": pictures[0]}).status_code == 200

        told = deploy(served, filled, "v2").json()["notes"]

        (behind,) = (note for note in told if note.startswith("no edge"))
        assert "from 'v2' to 'far'" in behind
        assert "1 items" in behind

    @pytest.mark.parametrize("verdict", ["pass", "warn", "refuse"])
    def test_it_tells_of_a_gate_that_did_not_pass(self, served: Any, refused: tuple[str, int], verdict: str) -> None:
        path, gate = refused
        with served.runtime.database.write() as connection:
            connection.execute(update(gate_report).where(gate_report.c.id == gate).values(verdict=verdict))

        told = deploy(served, path, override="known").json()["notes"]

        assert [f"gate {gate} " in note for note in told] == ([] if verdict == "pass" else [True])

    def test_it_tells_of_items_that_a_third_version_serves_and_no_gate_has_measured(
        self, served: Any, filled: str
    ) -> None:
        """A gate of `next` measures the twenty items as `wrong` would embed them; nobody has moved them from v1."""
        deploy(served, filled)
        gate = served.http.post(f"{filled}/gates", json={"version": "next", "label": "digit"}).json()["id"]

        told = deploy(served, filled, "next", override="known", until="canary").json()["notes"]
        served.http.post(f"{filled}/rollback")
        served.backfill(filled)
        served.work()
        moved = deploy(served, filled, "next", override="known").json()["notes"]

        (unmeasured,) = (note for note in told if "'v1'" in note)
        assert f"gate {gate} " in unmeasured
        assert "20 items" in unmeasured
        assert not [note for note in moved if "'v1'" in note]

    def test_a_first_deployment_and_a_rollback_have_nothing_to_tell(self, served: Any, filled: str) -> None:
        assert deploy(served, served.gallery(None), "v1").json()["notes"] == []
        deploy(served, filled, "v2")
        assert served.http.post(f"{filled}/rollback").json()["notes"] == []


class TestOptions:
    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({"until": "registered", "gate": 999}, "/gate"),
            ({"until": "verified", "gate": 1}, "/gate"),
            ({"until": "verified", "override": "x"}, "/override"),
            ({"until": "shadow", "override": "x"}, "/override"),
            ({"canary": {"share": 0.1}}, "/canary"),
            ({"shadow": {}}, "/shadow"),
            ({"until": "canary", "shadow": {}}, "/shadow"),
            ({"until": "shadow", "canary": {}}, "/canary"),
            ({"gate": 999}, "/gate"),
            ({"until": "shadow", "gate": 999}, "/gate"),
        ],
    )
    def test_one_that_no_step_looks_at_is_refused(
        self, served: Any, filled: str, body: dict[str, Any], pointer: str
    ) -> None:
        before = served.http.get(f"{filled}/deployments").json()

        answer = deploy(served, filled, "v2", **body)

        assert refusal(answer) == (422, "invalid_argument", [pointer])
        assert served.http.get(f"{filled}/deployments").json() == before

    @pytest.mark.parametrize(
        ("to", "body", "pointer"),
        [
            ("current", {"gate": 999}, "/gate"),
            ("canary", {"gate": 999}, "/gate"),
            ("current", {"canary": {"share": 0.5}}, "/canary"),
            ("shadow", {"override": "x"}, "/override"),
            ("shadow", {"canary": {}}, "/canary"),
        ],
    )
    def test_nor_by_an_advance(self, served: Any, filled: str, to: str, body: dict[str, Any], pointer: str) -> None:
        number = deploy(served, filled, "v2", until="verified").json()["id"]

        answer = advance(served, filled, number, to, **body)

        assert refusal(answer) == (422, "invalid_argument", [pointer])
        assert served.http.get(f"{filled}/deployments/{number}").json()["state"] == "verified"

    def test_the_refusal_names_the_step_and_what_is_legal(self, served: Any, filled: str) -> None:
        said = deploy(served, filled, "v2", canary={"share": 0.1}).json()["detail"]

        assert said == "canary is only legal for canary; legal for the steps of this call (verified, current): override"
