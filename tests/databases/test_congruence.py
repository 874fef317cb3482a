"""One seeded run of random operations over HTTP on both databases side by side: every answer must be the same."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from service.http.app import create_app
from service.settings import Settings
from staging.inputs.builders import image_bytes, make_image, make_version, zip_version
from staging.states.working import SteppedWorker

STEPS = int(os.environ.get("REGRAFT_CONGRUENCE_STEPS", "30"))
SEED = int(os.environ.get("REGRAFT_CONGRUENCE_SEED", "0"))
UNSTABLE = {"took_ms", "created", "at", "finished", "since", "request_id", "seconds", "latency_ms", "next_claim", "who"}
UNSTABLE |= {"items_per_second", "eta_seconds", "active_seconds", "next_try"}
# A filter adds to it, which is measured at the next write or within a second.
UNSTABLE |= {"bytes"}
# A retirement gives the items that held the version new numbers; where it empties a partition, all there are.
UNSTABLE |= {"seq"}


@contextmanager
def application(settings: Settings) -> Iterator[tuple[TestClient, SteppedWorker]]:
    with TestClient(create_app(settings), base_url="http://127.0.0.1/v1") as http:
        worker = SteppedWorker(settings)
        try:
            yield http, worker
        finally:
            worker.close()


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: stable(inner) for name, inner in value.items() if name not in UNSTABLE}
    if isinstance(value, list):
        told = [stable(inner) for inner in value]
        # Equal images are equally near: which of them comes first is not said.
        ties = bool(told) and isinstance(told[0], dict) and "raw_score" in told[0]
        return sorted(told, key=lambda match: (-match["score"], match["id"])) if ties else told
    return round(value, 4) if isinstance(value, float) else value


class Run:
    """One application, and what it answered."""

    def __init__(self, http: TestClient, worker: SteppedWorker, pictures: list[bytes]) -> None:
        self.http, self.worker, self.pictures = http, worker, pictures
        self.heard: list[Any] = []

    def step(self, number: int) -> None:
        """One operation, drawn (at first each once), and then everything that can be seen."""
        draw = random.Random(f"{SEED} {number}")
        weighted = [op for op, weight in OPERATIONS.items() for _ in range(weight)]
        name = list(OPERATIONS)[number] if number < len(OPERATIONS) else draw.choice(weighted)
        answer = getattr(self, name)(draw)
        self.heard.append((name, None if answer is None else self.told(answer)))
        self.settle()
        for path in ("/galleries/g", "/galleries/g/deployments", "/galleries/g/backfills", "/edges"):
            self.heard.append(self.told(self.http.get(path)))

    def settle(self) -> None:
        """Show what the worker did, and count what was matched, now and not a moment later."""
        runtime = self.http.app.state.runtime  # type: ignore[attr-defined]
        runtime.replica.refresh(1)
        runtime.traffic.flush()

    def told(self, answer: Any) -> Any:
        return answer.status_code, stable(answer.json()) if answer.content else None

    def ingest(self, draw: random.Random) -> Any:
        numbers = draw.sample(range(len(self.pictures)), draw.randint(1, 6))
        items = [{"id": f"i{n}", "metadata": {"n": n, "half": n % 2 == 0}, "image": f"{n}.png"} for n in numbers]
        files = [("images", (f"{n}.png", self.pictures[draw.randrange(len(self.pictures))])) for n in numbers]
        return self.http.post("/galleries/g/items", data={"items": json.dumps(items)}, files=files)

    def supply(self, draw: random.Random) -> Any:
        vectors = [[draw.gauss(0, 1) for _ in range(4)] for _ in range(3)]
        items = [{"id": f"s{draw.randrange(9)}", "metadata": {"ü": None}, "embedding": v} for v in vectors]
        return self.http.post("/galleries/g/items", json={"version": "v1", "items": items})

    def remove(self, draw: random.Random) -> Any:
        ids = [f"i{draw.randrange(len(self.pictures))}" for _ in range(draw.randint(1, 4))]
        return self.http.post("/galleries/g/items:delete", json={"ids": [*ids, "\u0000", "nobody"]})

    def ask(self, draw: random.Random) -> Any:
        fields = {"k": "40"}  # all there are
        if draw.random() < 0.5:
            fields["filter"] = json.dumps({"field": "half", "eq": True})
        files = [("images", ("q.png", draw.choice(self.pictures)))]
        return self.http.post("/galleries/g/query", data=fields, files=files)

    def deploy(self, draw: random.Random) -> Any:
        body = {"version": draw.choice(["v1", "v2", "v3"]), "until": draw.choice(["verified", "current", "current"])}
        return self.http.post("/galleries/g/deployments", json=body)

    def rollback(self, draw: random.Random) -> Any:
        return self.http.post("/galleries/g/rollback", json={"reason": "drawn"})

    def retire(self, draw: random.Random) -> Any:
        return self.http.post("/galleries/g/retire", json={"version": draw.choice(["v1", "v2", "v3"])})

    def backfill(self, draw: random.Random) -> Any:
        body: dict[str, Any] = {"kind": draw.choice(["reencode", "reencode", "transform"]), "chunk_size": 3}
        body["order"] = draw.choice(["random", "newest", "oldest", "traffic", "transformed"])
        if draw.random() < 0.3:
            body["filter"] = {"field": "half", "eq": True}
        return self.http.post("/galleries/g/backfills", json=body)

    def work(self, draw: random.Random) -> None:
        self.worker.step(draw.randint(1, 8))

    def turn(self, draw: random.Random) -> Any:
        found = self.http.get("/galleries/g/backfills").json()["backfills"]
        number = found[-1]["id"] if found else 1
        return self.http.post(f"/backfills/{number}/{draw.choice(['pause', 'resume', 'cancel'])}")

    def fit(self, draw: random.Random) -> Any:
        body = {"new": "v3", "old": "v1", "kind": draw.choice(["ridge", "procrustes"]), "replace": True}
        return self.http.post("/edges:fit", json=body)


OPERATIONS = {"ingest": 5, "supply": 2, "remove": 2, "ask": 4, "deploy": 3, "rollback": 1, "retire": 1}
OPERATIONS |= {"backfill": 3, "work": 5, "turn": 1, "fit": 1}


def test_both_databases_give_the_same_answers_to_everything(tmp_path: Path, server: Any) -> None:
    v1 = make_version(tmp_path / "v1", "v1", 4, side_dim=3)
    v2 = make_version(tmp_path / "v2", "v2", 6, edges=[(v1, "truncate")])
    v3 = make_version(tmp_path / "v3", "v3", 5, seed=4, edges=[(v1, "forward")])
    pictures = [image_bytes(make_image(n % 5, n)) for n in range(24)]
    url = server.create()
    folders = [
        Settings(data=tmp_path / "sqlite", poll_seconds=0.01),
        Settings(data=tmp_path / "postgresql", database_url=url, poll_seconds=0.01),
    ]
    with ExitStack() as stack:
        runs = [Run(*stack.enter_context(application(settings)), pictures) for settings in folders]
        for run in runs:
            for version in (v1, v2, v3):
                archive = {"archive": zip_version(version.folder)}
                assert run.http.post("/versions", files=archive).status_code == 201
            run.http.post("/galleries", json={"name": "g"})
            run.http.post("/galleries/g/deployments", json={"version": "v1"})
        for number in range(STEPS):
            for run in runs:
                run.step(number)
            first, second = (run.heard for run in runs)
            assert first[-5:] == second[-5:], f"step {number}: {first[-5][0]}"
    server.drop(url)
    names = {heard[0] for heard in runs[0].heard if isinstance(heard[0], str)}
    assert names == set(OPERATIONS)
