"""`Run`: random operations in one process, compared with the model of the invariants (docs/design.md, section 6).

Workers are objects, so that events between the claim, the computation and the commit of a chunk are random too.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.backfills.chunks import ChunkLost
from service.backfills.embedder import outcome_of
from service.backfills.worker import Worker
from service.http.app import create_app
from service.settings import Settings
from service.store.database.connections import Database
from service.upgrades.tombstones import TombstonePurger
from staging.external.flaky_store import Flaky
from staging.random_operations.model import Model
from staging.random_operations.sight import look
from staging.random_operations.world import World
from staging.states.working import SteppedWorker

ORDERS = ["random", "newest", "oldest", "traffic", "transformed", "uncertainty"]
UNTIL = ["registered", "verified", "shadow", "current"]
IDS = [f"i{n}" for n in range(14)]
OWN = 10_000
"""Numbers of images from here on are only sent as embeddings, so that their vectors are known exactly.

Vectors that the service encoded may differ from the model's in the last bit, because batches differ.
"""


class Run:
    """One random life of a gallery; `more`: settings."""

    def __init__(self, world: World, data: Path, seed: int, stack: ExitStack, **more: Any) -> None:
        self.world, self.model, self.draw = world, Model(world), random.Random(seed)
        self.repeat, self.purging = random.Random(seed), random.Random(seed)
        self.settings = Settings(data=data, **more)
        data.mkdir()
        self.stack = stack
        self.flaky: list[Flaky] = []
        self.database = stack.enter_context(closing(Database(self.settings.database_url)))
        self.purger = TombstonePurger(self.database, settle_seconds=0.0)
        self.worker = stack.enter_context(closing(self._worker(3600.0)))
        self.http: Any = None
        # The leases of one expire at once, those of the other never, so that no clock decides the outcome.
        self.others = [stack.enter_context(closing(self._worker(lease))) for lease in (1e-9, 3600.0)]
        self.choices = 0
        self.late: list[tuple[Worker, Any, Any]] = []
        self.done: list[str] = []
        self.pictures = 0
        self.backfill: int | None = None
        self.start()

    def start(self) -> None:
        app = create_app(self.settings)
        self.life = ExitStack()
        self.http = self.life.enter_context(TestClient(app, base_url="http://127.0.0.1/v1"))

    def _worker(self, lease_seconds: float) -> SteppedWorker:
        made = SteppedWorker(self.settings.model_copy(update={"lease_seconds": lease_seconds}))
        made._embedder._contents = Flaky(made._embedder._contents)
        self.flaky.append(made._embedder._contents)
        return made

    def choose(self, weighted: dict[str, int]) -> Callable[[], None]:
        """Draw an operation, and record it."""
        (name,) = self.draw.choices(list(weighted), list(weighted.values()))
        self.done.append(name)
        return getattr(self, name)  # type: ignore[no-any-return]

    def pick(self) -> str:
        """Draw an id; while a chunk is computed, preferably of one of its items."""
        at_work = [key for _, chunk, _ in self.late for key in chunk.item_ids]
        if not at_work or self.draw.random() < 0.3:
            return self.draw.choice(IDS)
        names = {row.id: row.external_id for row in self._rows("select id, external_id from item")}
        return str(names.get(self.draw.choice(at_work)) or self.draw.choice(IDS))

    def end(self) -> None:
        self.life.close()

    # Operations: each changes the service and the model.

    def post(self, code: str | None, path: str, dry_run: bool = False, **body: Any) -> Any:
        """Send a request, and check that the service answers like the model: with the refusal `code`, or None."""
        answer = self.http.post(path, json=body, params={"dry_run": "true"} if dry_run else {})
        assert (answer.json()["code"] if answer.status_code >= 400 else None) == code, answer.text
        return answer.json()

    def picture(self) -> int:
        """Draw the number of an image: mostly a new one, sometimes an earlier one, so that an old vector returns."""
        if self.pictures and self.repeat.random() < 0.4:
            return self.pictures - self.repeat.randrange(min(self.pictures, 5))
        self.pictures += 1
        return self.pictures

    def store_picture(self) -> None:
        self.store(self.pick())

    def store(self, name: str) -> None:
        number = self.picture()
        listed = json.dumps([{"id": name, "metadata": {}, "image": "a"}])
        files = [("images", ("a", self.world.as_bytes(number)))]
        assert self.http.post("/galleries/g/items", data={"items": listed}, files=files).json()["stored"] == 1
        self.model.store_picture(name, number, {})

    def store_embedding(self) -> None:
        name, version = self.pick(), self.draw.choice(list(self.world.versions))
        vector = self.world.encode(version, OWN + self.picture())
        listed = [{"id": name, "embedding": [float(x) for x in vector]}]
        self.post(
            self.model.store_embedding(name, version, vector), "/galleries/g/items", version=version, items=listed
        )

    def store_pictures(self) -> None:
        """Store several images in one request, some of them invalid or with repeated ids."""
        names, atomic = self.draw.choices(IDS, k=self.draw.randint(1, 5)), self.draw.random() < 0.3
        broken = {n for n in range(len(names)) if self.draw.random() < 0.15}
        numbers = [self.picture() for _ in names]
        listed = json.dumps([{"id": name, "metadata": {"n": n}, "image": f"{n}"} for n, name in enumerate(names)])
        images = [b"broken" if n in broken else self.world.as_bytes(numbers[n]) for n in range(len(names))]
        answer = self.http.post(
            "/galleries/g/items",
            data={"items": listed},
            files=[("images", (f"{n}", image)) for n, image in enumerate(images)],
            params={"atomic": str(atomic).lower()},
        )
        for n in self._stored(answer, names, broken, atomic):
            self.model.store_picture(names[n], numbers[n], {"n": n})

    def store_embeddings(self) -> None:
        """Store several embeddings of the current version, some of length zero; with or without metadata."""
        names, version = self.draw.choices(IDS, k=self.draw.randint(1, 5)), self.model.current
        broken = {n for n in range(len(names)) if self.draw.random() < 0.15}
        self.pictures += 1
        vectors = [self.world.encode(version, OWN + self.pictures) * (n not in broken) for n in range(len(names))]
        about = self.draw.choice([None, {"e": self.pictures}])
        more = {} if about is None else {"metadata": about}
        listed = [{"id": name, "embedding": v.tolist(), **more} for name, v in zip(names, vectors, strict=True)]
        answer = self.http.post("/galleries/g/items", json={"version": version, "items": listed})
        for n in self._stored(answer, names, broken, False):
            assert self.model.store_embedding(names[n], version, vectors[n], about) is None

    def _stored(self, answer: Any, names: list[str], broken: set[int], atomic: bool) -> list[int]:
        """The indices of the items that such a request must have stored; checks that its answer lists the others."""
        bad = broken | {n for n, name in enumerate(names) if name in names[:n]}
        told = answer.json()
        assert {error["index"] for error in told["errors"]} == bad
        if len(bad) == len(names) or (atomic and bad):
            assert answer.status_code == 422
            return []
        assert (answer.status_code, told["stored"], told["failed"]) == (200, len(names) - len(bad), len(bad))
        return [n for n in range(len(names)) if n not in bad]

    def patch_several(self) -> None:
        names = list(dict.fromkeys(self.draw.choices(IDS, k=3)))
        self.pictures += 1
        listed = [{"id": name, "metadata": {"p": self.pictures}} for name in names]
        missing = [n for n, name in enumerate(names) if self.model.patch(name, {"p": self.pictures}) is not None]
        answer = self.http.patch("/galleries/g/items", json={"items": listed})
        assert [error["index"] for error in answer.json()["errors"]] == missing
        assert answer.status_code == (422 if len(missing) == len(names) else 200)

    def delete_several(self) -> None:
        names = list(dict.fromkeys(self.draw.choices(IDS, k=3)))
        missing = [name for name in names if self.model.delete(name) is not None]
        told = self.post(None, "/galleries/g/items:delete", ids=names)
        assert told == {"deleted": len(names) - len(missing), "missing": missing}

    def delete(self) -> None:
        name = self.pick()
        answer = self.http.delete(f"/galleries/g/items/{name}")
        assert answer.status_code == (204 if self.model.delete(name) is None else 404)

    def deploy(self) -> None:
        self._begin(self.draw.choice(list(self.world.versions)))

    def _begin(self, version: str) -> None:
        self.post(self.model.begin(version), "/galleries/g/deployments", version=version)
        self._choose_anew()

    def upgrade(self) -> None:
        if self.model.deployments.coming:
            self.roll_back()
        self.deploy()
        self.start_backfill()

    def roll_back(self) -> None:
        self.post(self.model.rollback(), "/galleries/g/rollback")
        self._choose_anew()

    def step_deployment(self) -> None:
        """Begin, advance, roll back or retire a deployment, or do so as a dry run."""
        dry_run = self.draw.random() < 0.3
        model = self.model.copy() if dry_run else self.model
        version, until = self.draw.choice(list(self.world.versions)), self.draw.choice(UNTIL)
        to = self.draw.choice(UNTIL[1:])
        place = max(0, len(model.deployments.all) - self.draw.randint(1, 3))
        number = self.http.get("/galleries/g/deployments").json()["deployments"][place]["id"]
        choices: dict[str, tuple[Callable[[], str | None], dict[str, str]]] = {
            "deployments": (lambda: model.begin(version, until), {"version": version, "until": until}),
            f"deployments/{number}/advance": (lambda: model.advance(place, to), {"to": to}),
            "rollback": (model.rollback, {}),
            "retire": (lambda: model.retire(version), {"version": version}),
        }
        route = self.draw.choice(list(choices))
        effect, body = choices[route]
        before = self.shown()
        code = effect()
        self.post(code, f"/galleries/g/{route}", dry_run, **body)
        if dry_run or code:
            assert self.shown() == before

    def shown(self) -> Any:
        """The gallery, its deployments and its items, as the service shows them."""
        told = self.http.get("/galleries/g").json()
        deployments = self.http.get("/galleries/g/deployments").json()["deployments"]
        items = self.http.get("/galleries/g/items", params={"limit": 1000}).json()["items"]
        return (
            (told["current"], told["mix"], told["items"], told["seq"]),
            [(deployment["version"], deployment["state"]) for deployment in deployments],
            {item["id"]: (item["active"], item["metadata"]) for item in items},
        )

    def _choose_anew(self) -> None:
        self.choices += sum(len(held.vectors) > 1 for held in self.model.items.values())

    def deploy_and_roll_back(self) -> None:
        """Invariant 5."""
        if self.model.deployments.coming:
            return
        versions, scores = self.ask(1)
        self._begin(self.draw.choice([name for name in self.world.versions if name != self.model.current]))
        self.roll_back()
        assert self.ask(1) == (versions, pytest.approx(scores, abs=1e-6))  # type: ignore[comparison-overlap]

    def start_backfill(self) -> None:
        kind, order = self.draw.choice(["reencode", "reencode", "transform"]), self.draw.choice(ORDERS)
        scope: dict[str, Any] = self.draw.choice([{}, {}, {"limit": self.draw.randint(1, 8)}, {"share": 0.5}])
        asked = {"kind": kind, "order": order, "chunk_size": self.draw.randint(1, 6), "attempts": 10, **scope}
        code = self.model.start(kind, order, bool(scope))
        answer = self.post(code, "/galleries/g/backfills", **asked)
        self.backfill = answer.get("id", self.backfill)

    def steer(self) -> None:
        action = self.draw.choice(["pause", "resume", "cancel"])
        if self.backfill is not None:
            self.post(self.model.steer(action), f"/backfills/{self.backfill}/{action}")

    def work(self) -> None:
        self.worker.step(self.draw.randint(1, 3))

    def claim_and_die(self) -> None:
        self.others[0]._claim()

    def compute_and_keep(self) -> None:
        """Compute a chunk by a worker that commits it at some later time."""
        for other in self.others:
            if chunk := other._claim():
                self.late.append((other, chunk, outcome_of(other._load(chunk))))

    def commit_late(self) -> None:
        while self.late:
            other, chunk, outcome = self.late.pop(self.draw.randrange(len(self.late)))
            with suppress(ChunkLost):
                other._persist(chunk, outcome)

    def race(self) -> None:
        """Run another operation between the computation and the commit of a chunk."""
        self.compute_and_keep()
        self.choose(RACING)()
        self.commit_late()

    def restart(self) -> None:
        """Invariant 7: a newly loaded replica answers as the one that followed the feed."""
        versions, scores = self.ask(2)
        self.life.close()
        self.start()
        # An index that was built in between sums in another order.
        assert self.ask(2) == (versions, pytest.approx(scores, abs=1e-6))  # type: ignore[comparison-overlap]

    # What must hold after every step.

    def ask(self, number: int) -> tuple[dict[str, str], dict[str, float]]:
        """Query by an image for all live items; returns the version and the score of each."""
        count = len(self.model.items)
        files = [("images", ("q", self.world.as_bytes(number)))]
        answer = self.http.post("/galleries/g/query", data={"k": str(max(count, 1))}, files=files)
        body = answer.json()
        assert body["degraded"] == []
        found = body["results"][0]["matches"]
        scores = [match["score"] for match in found]
        assert scores == sorted(scores, reverse=True)
        assert len(found) == count
        return {match["id"]: match["version"] for match in found}, {match["id"]: match["score"] for match in found}

    def ask_for_best(self) -> None:
        """Check a query for the few best items, their metadata, and stored images."""
        number, k = self.draw.randint(0, 50), self.draw.randint(1, len(IDS))
        files = [("images", ("q", self.world.as_bytes(number)))]
        answer = self.http.post("/galleries/g/query", data={"k": str(k), "exact": "true"}, files=files).json()
        found, _ = self.model.by_picture(number)
        matches = answer["results"][0]["matches"]
        best = sorted((expected.score for expected in found.values()), reverse=True)[:k]
        assert [match["score"] for match in matches] == pytest.approx(best, abs=1e-5)
        assert len({match["id"] for match in matches}) == len(matches)
        for match in matches:
            expected = found[match["id"]]
            about = (match["version"], match["origin"], match["metadata"])
            assert about == (expected.version, expected.origin, expected.metadata)
        for name, held in list(self.model.items.items())[:2]:
            image = self.http.get(f"/galleries/g/items/{name}/image")
            stored = None if held.picture is None else self.world.as_bytes(held.picture)
            assert image.status_code == (200 if stored else 404)
            assert stored in (None, image.content)

    def look(self) -> int:
        """Read what workers have moved since the last call, and check that each move was allowed and correct."""
        sight = look(self.database, "g")
        self.model.see(sight)
        return sight.seq

    def _rows(self, statement: str) -> list[Any]:
        with self.database.read() as connection:
            return list(connection.exec_driver_sql(statement))

    def check(self) -> None:
        self.catch_up()
        told, deployments, items = self.shown()
        assert told[:3] == (self.model.current, self.model.mix(), len(self.model.items))
        assert deployments == self.model.deployments.states()
        assert items == {name: (self.model.active(name), held.metadata) for name, held in self.model.items.items()}
        expected, lost = self.model.by_picture(3)
        versions, scores = self.ask(3)
        assert lost == {}
        assert versions == {name: found.version for name, found in expected.items()}
        assert scores == pytest.approx({name: found.score for name, found in expected.items()}, abs=1e-4)

    def catch_up(self) -> None:
        """`look`, and let the service follow, as it sees the writes of workers only later."""
        if self.purging.random() < 0.3:
            self.purger.look()
        seq = self.look()
        deadline = time.monotonic() + 10
        while self.http.get("/galleries/g").json()["seq"] < seq:
            assert time.monotonic() < deadline, "the replica does not follow the feed"
            time.sleep(0.005)

    def finish(self) -> None:
        """Invariant 6: whatever happened, a backfill ends with all movable items moved."""
        self.commit_late()
        self.look()
        if self.model.backfill == "paused":
            self.post(self.model.steer("resume"), f"/backfills/{self.backfill}/resume")
        if self.model.backfill != "running":
            self.backfill = self.post(self.model.start("reencode"), "/galleries/g/backfills", attempts=10)["id"]
        deadline = time.monotonic() + 30
        while self.http.get(f"/backfills/{self.backfill}").json()["state"] == "running":
            assert time.monotonic() < deadline
            self.worker.drain()
        self.check()
        assert self.model.backfill == "done"


OPERATIONS: dict[str, int] = {
    "store_picture": 3,
    "store_embedding": 1,
    "store_pictures": 2,
    "store_embeddings": 2,
    "patch_several": 1,
    "delete": 2,
    "delete_several": 1,
    "ask_for_best": 2,
    "step_deployment": 3,
    "deploy": 1,
    "upgrade": 6,
    "roll_back": 3,
    "deploy_and_roll_back": 1,
    "start_backfill": 2,
    "steer": 1,
    "work": 8,
    "claim_and_die": 1,
    "compute_and_keep": 1,
    "commit_late": 1,
    "race": 6,
    "restart": 1,
}
RACING = {"store_picture": 3, "store_embedding": 1, "delete": 2, "upgrade": 1, "roll_back": 2, "steer": 2, "work": 1}
