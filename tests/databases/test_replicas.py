"""Two API processes on one database and data folder: what is asked of both at the same moment happens once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.http.app import create_app
from service.settings import Settings
from staging.inputs.builders import make_version, zip_version
from staging.together import together

AT_ONCE = 4


@pytest.fixture
def replicas(settings: Settings) -> Iterator[list[TestClient]]:
    with ExitStack() as stack:
        made = [TestClient(create_app(settings), base_url="http://127.0.0.1/v1") for _ in range(2)]
        yield [stack.enter_context(http) for http in made]


@pytest.fixture
def archives(tmp_path: Path) -> dict[str, bytes]:
    v1 = make_version(tmp_path / "v1", "v1", 4)
    v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")])
    v3 = make_version(tmp_path / "v3", "v3", 5, edges=[(v1, "truncate")])
    return {version.name: zip_version(version.folder) for version in (v1, v2, v3)}


def at_once(replicas: list[TestClient], ask: Callable[[TestClient, int], Any]) -> list[Any]:
    """The answers to requests that start at one moment, each at the next replica."""
    answers: list[Any] = [None] * AT_ONCE

    def run(number: int) -> None:
        answers[number] = ask(replicas[number % 2], number)

    together(AT_ONCE, run)
    return answers


def test_registrations_deployments_and_rollbacks_at_once_leave_one_state(
    replicas: list[TestClient], archives: dict[str, bytes]
) -> None:
    for name, archive in archives.items():
        sent = at_once(replicas, lambda http, _: http.post("/versions", files={"archive": archive}))  # noqa: B023
        codes = Counter(answer.status_code for answer in sent)
        assert codes[201] == 1, (name, codes)
        assert set(codes) <= {200, 201, 409}, [answer.text for answer in sent]
    first, second = replicas
    made = at_once(replicas, lambda http, _: http.post("/galleries", json={"name": "g"}))
    assert sorted(answer.status_code for answer in made) == [201, 409, 409, 409]
    first.post("/galleries/g/deployments", json={"version": "v1"})
    vectors = [[1.0, float(n), 0.0, -1.0] for n in range(12)]
    items = [{"id": f"i{n}", "embedding": vector} for n, vector in enumerate(vectors)]
    assert first.post("/galleries/g/items", json={"items": items}).status_code == 200

    tag = first.get("/galleries/g/deployments").headers["etag"]
    deployed = at_once(
        replicas,
        lambda http, n: http.post(
            "/galleries/g/deployments", json={"version": f"v{2 + n % 2}"}, headers={"If-Match": tag}
        ),
    )
    assert sorted(answer.status_code for answer in deployed) == [201, 412, 412, 412]
    (winner,) = [answer.json()["version"] for answer in deployed if answer.status_code == 201]
    for http in replicas:
        standing = [d["version"] for d in http.get("/galleries/g/deployments").json()["deployments"]]
        assert standing == ["v1", winner]

    edge = {"new": "v3", "old": "v1", "kind": "zero_pad"}
    declared = at_once(replicas, lambda http, _: http.post("/edges", json=edge))
    assert sorted(answer.status_code for answer in declared) == [201, 409, 409, 409]

    tag = second.get("/galleries/g/deployments").headers["etag"]
    back = at_once(replicas, lambda http, _: http.post("/galleries/g/rollback", headers={"If-Match": tag}))
    assert sorted(answer.status_code for answer in back) == [201, 412, 412, 412]
    for http in replicas:
        http.app.state.runtime.replica.refresh(1)  # type: ignore[attr-defined]
        shown = http.get("/galleries/g").json()
        assert (shown["current"], shown["mix"]) == ("v1", {"v1": 12})

    planned = at_once(replicas, lambda http, _: http.post("/galleries/g/backfills", json={"kind": "reencode"}))
    assert {answer.status_code for answer in planned} <= {202, 409}
    assert any(answer.status_code == 202 for answer in planned)
