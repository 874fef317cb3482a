"""Random operations against a plain in-memory model of what DESIGN.md promises (section 6), step by step.

The model knows what each item holds and derives everything else from two rules: an item is active in the version it
holds that queries of the current version reach best, and a query ranks every live item by its active embedding. Which
chunk a worker takes is not the model's business: it looks what moved, and checks that this was allowed.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from index.encoder import Encoder
from index.folder import pack_version
from index.graph import Graph
from index.transform import load_transform
from index.version import EdgeKind, Version
from service.app import create_app
from service.backfills import attempts
from service.backfills.chunks import ChunkLost
from service.backfills.worker import Worker
from service.database import Database
from service.repository import from_bytes
from service.settings import Settings
from service.tables import embedding, gallery, item

STEPS = 90
ORDERS = ["random", "newest", "oldest", "traffic", "transformed"]
IDS = [f"i{n}" for n in range(14)]


class World:
    """The versions, and what their encoders and edges give for numbered pictures."""

    def __init__(self, versions: list[Version], picture: Callable[[int], Any], as_bytes: Callable[..., bytes]) -> None:
        self.versions = {version.name: version for version in versions}
        self.graph = Graph([edge for version in versions for edge in version.edges])
        self.encoders = {version.name: Encoder(version) for version in versions}
        self.as_bytes = lambda number: as_bytes(picture(number))
        self.picture = picture

    def route(self, current: str, held: str) -> Any:
        return self.graph.route(current, held, frozenset(self.versions))

    def encode(self, version: str, number: int) -> np.ndarray:
        return self.encoders[version].encode([self.picture(number)]).vectors[0]

    def apply(self, edge: Any, vector: np.ndarray) -> np.ndarray:
        transform = load_transform(edge, self.versions[edge.new].card, self.versions[edge.old].card)
        return transform(vector[None])[0]

    def best(self, current: str, held: list[str]) -> str:
        """The version of those held that queries of the current one reach best, one comparison at a time."""
        best = held[0]
        for name in held[1:]:
            if self.better(self.route(current, name), self.route(current, best)):
                best = name
        return best

    def better(self, one: Any, other: Any) -> bool:
        dual = [route.dual for route in (one, other)]
        if dual[0] != dual[1]:
            return dual[1]
        if dual[0]:
            return self.age(one) > self.age(other)
        if one.measured != other.measured:
            return bool(one.measured > other.measured)
        if len(one.edges) != len(other.edges):
            return len(one.edges) < len(other.edges)
        return self.age(one) > self.age(other)

    def age(self, route: Any) -> int:
        return list(self.versions).index(route.item_version)


class Flaky:
    """Images of which now and then one cannot be read; never two in a row, or the store would seem out of reach."""

    def __init__(self, images: Any) -> None:
        self.images, self.reads, self.failures = images, 0, 0

    def read(self, key: str) -> bytes:
        self.reads += 1
        if self.reads % 6 == 0:
            self.failures += 1
            raise TimeoutError("the store did not answer")
        return bytes(self.images.read(key))


@dataclass
class Held:
    """A live item: the picture it was stored with, if any, and its embeddings with their origins."""

    picture: int | None
    vectors: dict[str, np.ndarray]
    origins: dict[str, str]


@dataclass
class Model:
    """What should be true."""

    world: World
    current: str = ""
    before: list[str] = field(default_factory=list)
    items: dict[str, Held] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    moving_to: str | None = None
    kind: str = ""
    paused: bool = False
    capped: bool = False

    def active(self, name: str) -> str:
        return self.world.best(self.current, list(self.items[name].vectors))

    def mix(self) -> dict[str, int]:
        counted: dict[str, int] = {}
        for name in self.items:
            counted[self.active(name)] = counted.get(self.active(name), 0) + 1
        return counted

    def answer(self, number: int) -> dict[str, tuple[str, float]]:
        """Item -> (version, score) for a query by picture `number`, with no index and no shortcut."""
        scored = {}
        for name, held in self.items.items():
            route = self.world.route(self.current, self.active(name))
            query = self.world.encode(route.encoders[0], number)
            for edge in route.edges:
                query = query if edge.kind is EdgeKind.DUAL else self.world.apply(edge, query)
            scored[name] = (route.item_version, float(query @ held.vectors[route.item_version]))
        return scored

    def may_move(self, name: str) -> bool:
        held = self.items[name]
        if self.moving_to is None or self.paused:
            return False
        if self.kind == "reencode":
            return held.picture is not None and held.origins.get(self.moving_to) in {None, "transformed"}
        return self.moving_to not in held.vectors and self.source(name) is not None

    def source(self, name: str) -> str | None:
        """The version a transform starts from: the active one if an item edge leads from it, else the newest such."""
        names = list(self.world.versions)
        carried = [v for v in self.items[name].vectors if self.world.graph.forward(v, str(self.moving_to))]
        active = self.active(name)
        return active if active in carried else max(carried, key=names.index, default=None)

    def moved(self, name: str) -> tuple[str, np.ndarray]:
        """Origin and embedding the running backfill gives an item."""
        held, target = self.items[name], self.moving_to
        assert target is not None
        if self.kind == "reencode":
            assert held.picture is not None
            return "encoded", self.world.encode(target, held.picture)
        source = self.source(name)
        assert source is not None
        return "transformed", self.world.apply(self.world.graph.forward(source, target), held.vectors[source])


class Run:
    """One random life of a gallery."""

    def __init__(self, world: World, data: Path, seed: int, stack: ExitStack) -> None:
        self.world, self.model, self.draw = world, Model(world), random.Random(seed)
        self.settings = Settings(data=data)
        self.stack = stack
        self.flaky: list[Flaky] = []
        self.database = stack.enter_context(_closing(Database(self.settings.database_url)))
        self.worker = stack.enter_context(_closing(self._worker(3600.0)))
        self.http: Any = None
        # The lease of one runs out as soon as it has it, that of the other never: no clock decides what happens.
        self.others = [stack.enter_context(_closing(self._worker(lease))) for lease in (1e-9, 3600.0)]
        self.moves = self.choices = 0
        self.late: list[tuple[Worker, Any, Any]] = []
        self.done: list[str] = []
        self.pictures = 0
        self.backfill: int | None = None
        self.start()

    def start(self) -> None:
        app = create_app(self.settings)
        self.life = ExitStack()
        self.http = self.life.enter_context(TestClient(app, base_url="http://127.0.0.1/v1"))

    def _worker(self, lease_seconds: float) -> Worker:
        made = Worker(self.settings.model_copy(update={"lease_seconds": lease_seconds}), threading.Event())
        made._mover._images = Flaky(made._mover._images)
        self.flaky.append(made._mover._images)
        return made

    def choose(self, weighted: dict[str, int]) -> Callable[[], None]:
        """An operation by chance; it is noted as done."""
        (name,) = self.draw.choices(list(weighted), list(weighted.values()))
        self.done.append(name)
        return getattr(self, name)  # type: ignore[no-any-return]

    def pick(self) -> str:
        """An id; while a chunk is computed, rather one of its items."""
        at_work = [key for _, chunk, _ in self.late for key in chunk.item_ids]
        if not at_work or self.draw.random() < 0.3:
            return self.draw.choice(IDS)
        names = {row.id: row.external_id for row in self._rows("select id, external_id from item")}
        return str(names[self.draw.choice(at_work)])

    def end(self) -> None:
        self.life.close()

    def post(self, path: str, **body: Any) -> Any:
        return self.http.post(path, json=body)

    # Operations: each changes the service and the model alike.

    def store_picture(self) -> None:
        self.store(self.pick())

    def store(self, name: str) -> None:
        self.pictures += 1
        number = self.pictures
        listed = json.dumps([{"id": name, "metadata": {}, "image": "a"}])
        files = [("images", ("a", self.world.as_bytes(number)))]
        assert self.http.post("/galleries/g/items", data={"items": listed}, files=files).json()["stored"] == 1
        vector = self.world.encode(self.model.current, number)
        self._stored(name, Held(number, {self.model.current: vector}, {self.model.current: "encoded"}))

    def store_embedding(self) -> None:
        self.pictures += 1
        name, version = self.pick(), self.draw.choice(list(self.world.versions))
        vector = self.world.encode(version, self.pictures)
        listed = [{"id": name, "metadata": {}, "embedding": [float(x) for x in vector]}]
        answer = self.post("/galleries/g/items", version=version, items=listed)
        if answer.status_code == 409:  # an embedding alone cannot tell that its version has an encoder
            assert answer.json()["code"] == "no_route"
            return
        assert answer.json()["stored"] == 1
        self._stored(name, Held(None, {version: vector}, {version: "supplied"}))

    def _stored(self, name: str, held: Held) -> None:
        self.model.items[name] = held
        self.model.deleted.discard(name)

    def delete(self) -> None:
        name = self.pick()
        answer = self.http.delete(f"/galleries/g/items/{name}")
        assert answer.status_code == (204 if name in self.model.items else 404)
        if name in self.model.items:
            del self.model.items[name]
            self.model.deleted.add(name)

    def deploy(self) -> None:
        version = self.draw.choice(list(self.world.versions))
        answer = self.post("/galleries/g/deployments", version=version)
        if version == self.model.current:
            assert answer.json()["code"] == "already_current"
            return
        assert answer.status_code == 201, answer.text
        self.model.before.append(self.model.current)
        self._current_is(version)

    def upgrade(self) -> None:
        self.deploy()
        self.start_backfill()

    def roll_back(self) -> None:
        answer = self.post("/galleries/g/rollback")
        assert answer.status_code == (201 if self.model.before else 409)
        if self.model.before:
            assert answer.json()["version"] == self.model.before[-1]
            self._current_is(self.model.before.pop())

    def _current_is(self, version: str) -> None:
        if version != self.model.current:
            self.model.moving_to = None
        self.model.current = version
        self.choices += sum(len(held.vectors) > 1 for held in self.model.items.values())

    def deploy_and_roll_back(self) -> None:
        """Invariant 5."""
        before = self.ask(1)
        held_before = self.model.moving_to, self.model.paused
        version = self.draw.choice([name for name in self.world.versions if name != self.model.current])
        assert self.post("/galleries/g/deployments", version=version).status_code == 201
        assert self.post("/galleries/g/rollback").json()["version"] == self.model.current
        assert self.ask(1) == before
        if held_before[0] is not None:
            self.model.moving_to = None

    def start_backfill(self) -> None:
        kind = self.draw.choice(["reencode", "reencode", "transform"])
        order, size = self.draw.choice(ORDERS), self.draw.randint(1, 6)
        scope = self.draw.choice([{}, {}, {"limit": self.draw.randint(1, 8)}, {"share": 0.5}])
        answer = self.post("/galleries/g/backfills", kind=kind, order=order, chunk_size=size, attempts=10, **scope)
        if self.model.moving_to is not None:
            assert answer.json()["code"] == "backfill_active"
        elif kind == "transform" and not any(
            self.world.graph.forward(old, self.model.current) for old in self.world.versions
        ):
            assert answer.json()["code"] == "no_route"
        else:
            assert answer.status_code == 202, answer.text
            self.backfill = answer.json()["id"]
            self.model.capped = bool(scope)
            if answer.json()["state"] == "running":
                self.model.moving_to, self.model.kind, self.model.paused = self.model.current, kind, False

    def steer(self) -> None:
        action = self.draw.choice(["pause", "resume", "cancel"])
        if self.model.moving_to is None:
            return
        assert self.post(f"/backfills/{self.backfill}/{action}").status_code == 200
        if action == "cancel":
            self.model.moving_to = None
        else:
            self.model.paused = action == "pause"

    def work(self) -> None:
        for _ in range(self.draw.randint(1, 3)):
            self.worker.step()

    def claim_and_die(self) -> None:
        self.others[0]._claim()

    def compute_and_keep(self) -> None:
        """A worker that has computed a chunk, and comes to commit it some other time."""
        for other in self.others:
            if chunk := other._claim():
                self.late.append((other, chunk, other._move(chunk)))

    def commit_late(self) -> None:
        while self.late:
            other, chunk, outcome = self.late.pop(self.draw.randrange(len(self.late)))
            with suppress(ChunkLost):
                other._persist(chunk, outcome)

    def race(self) -> None:
        """Something happens between the computing and the commit of a chunk."""
        self.compute_and_keep()
        self.choose(RACING)()
        self.commit_late()

    def restart(self) -> None:
        """Invariant 7: a replica built anew answers as the one that followed."""
        before = self.ask(2)
        self.life.close()
        self.start()
        assert self.ask(2) == before

    # What must hold after every step.

    def ask(self, number: int) -> Any:
        """A query by a picture for every live item: id -> (version, score)."""
        count = len(self.model.items)
        files = [("images", ("q", self.world.as_bytes(number)))]
        answer = self.http.post("/galleries/g/query", data={"k": str(max(count, 1))}, files=files)
        if count == 0:
            assert answer.status_code == 422
            return {}
        body = answer.json()
        assert body["degraded"] == []
        found = body["results"][0]["matches"]
        scores = [match["score"] for match in found]
        assert scores == sorted(scores, reverse=True)
        assert len(found) == count
        return {match["id"]: (match["version"], round(match["score"], 6)) for match in found}

    def look(self) -> None:
        """See what workers moved since the last look, and check that each move was allowed and right."""
        for row in self._embeddings():
            held = self.model.items[row.external_id]
            if held.origins.get(row.version) == row.origin:
                expected = held.vectors[row.version]
            else:
                assert self.model.may_move(row.external_id), f"{row.external_id} may not gain {row.version}"
                assert row.version == self.model.moving_to
                origin, expected = self.model.moved(row.external_id)
                assert row.origin == origin
                self.moves += 1
                held.origins[row.version], held.vectors[row.version] = origin, expected
            np.testing.assert_allclose(from_bytes([row.vector], len(expected))[0], expected, atol=1e-5)
        if self.model.moving_to is not None:
            state = self.http.get(f"/backfills/{self.backfill}").json()["state"]
            if state == "done":
                # Under a cap the rest stays where it is.
                assert self.model.capped or not any(self.model.may_move(name) for name in self.model.items)
                self.model.moving_to = None

    def _embeddings(self) -> list[Any]:
        names = {row.id: row.name for row in self._rows("select id, name from version")}
        with self.database.read() as connection:
            columns = (item.c.external_id, embedding.c.version_id, embedding.c.origin, embedding.c.vector)
            rows = connection.execute(select(*columns).join(item, item.c.id == embedding.c.item_id)).all()
        for name, held in self.model.items.items():
            there = {names[row.version_id] for row in rows if row.external_id == name}
            assert set(held.vectors) <= there, f"{name} lost an embedding"
        assert {row.external_id for row in rows} == set(self.model.items)
        return [_Embedding(row.external_id, names[row.version_id], row.origin, row.vector) for row in rows]

    def _rows(self, statement: str) -> list[Any]:
        with self.database.read() as connection:
            return list(connection.exec_driver_sql(statement))

    def check(self) -> None:
        self.look()
        with self.database.read() as connection:
            seqs = connection.execute(select(item.c.seq)).scalars().all()
            following = connection.execute(select(func.max(gallery.c.next_seq))).scalar_one()
        assert len(set(seqs)) == len(seqs)
        assert all(seq < following for seq in seqs)
        self._wait_for_feed(following - 1)
        shown = self.http.get("/galleries/g").json()
        assert (shown["current"], shown["mix"]) == (self.model.current, self.model.mix())
        answered = self.ask(3)
        expected = self.model.answer(3)
        assert {name: version for name, (version, _) in answered.items()} == {n: v for n, (v, _) in expected.items()}
        for name, (_, score) in expected.items():
            assert answered[name][1] == pytest.approx(score, abs=1e-4)
        assert not self.model.deleted & set(answered)

    def _wait_for_feed(self, seq: int) -> None:
        deadline = time.monotonic() + 10
        while self.http.get("/galleries/g").json()["seq"] < seq:
            assert time.monotonic() < deadline, "the replica does not follow the feed"
            time.sleep(0.005)

    def finish(self) -> None:
        """Invariant 6: however it went so far, a backfill ends with everything moved that can be."""
        self.commit_late()
        self.look()
        if self.model.moving_to is None:
            self.model.kind, self.model.capped = "reencode", False
            answer = self.post("/galleries/g/backfills", attempts=10)
            self.backfill = answer.json()["id"]
            self.model.moving_to, self.model.paused = self.model.current, False
        elif self.model.paused:
            self.post(f"/backfills/{self.backfill}/resume")
            self.model.paused = False
        deadline = time.monotonic() + 30
        while self.http.get(f"/backfills/{self.backfill}").json()["state"] == "running":
            assert time.monotonic() < deadline
            self.worker.step()
        self.check()
        assert self.model.moving_to is None


@dataclass(frozen=True)
class _Embedding:
    external_id: str
    version: str
    origin: str
    vector: bytes


class _closing(ExitStack):  # noqa: N801
    """`contextlib.closing` with the thing typed as it is."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.thing = thing
        self.callback(thing.close)

    def __enter__(self) -> Any:
        return self.thing


OPERATIONS: dict[str, int] = {
    "store_picture": 3,
    "store_embedding": 1,
    "delete": 2,
    "deploy": 1,
    "upgrade": 4,
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


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory,
    make_version: Callable[..., Version],
    make_image: Callable[..., Any],
    image_bytes: Callable[..., bytes],
) -> World:
    """v1 <- v2 <- v3 by query edges, v1 -> v3 by an item edge, and v4 that only its own encoder reaches."""
    root = tmp_path_factory.mktemp("world")
    v1 = make_version(root / "v1", "v1", 4)
    v2 = make_version(root / "v2", "v2", 6, edges=[(v1, "truncate", 0.7)])
    v3 = make_version(root / "v3", "v3", 6, drift=0.1, edges=[(v2, "identity", 0.8), (v1, "forward")])
    v4 = make_version(root / "v4", "v4", 5, seed=9)
    return World([v1, v2, v3, v4], lambda number: make_image(number % 7, number), image_bytes)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is tried again at once: no clock decides what happens."""
    monkeypatch.setattr(attempts, "PAUSE_SECONDS", 0.0)


@pytest.fixture
def lives(world: World, tmp_path: Path) -> Iterator[Callable[[int], Run]]:
    """Begins a life: every version registered, v1 current, nothing stored."""
    with ExitStack() as stack:

        def begin(seed: int) -> Run:
            run = Run(world, tmp_path / "data", seed, stack)
            stack.callback(run.end)
            for version in world.versions.values():
                pack_version(version.folder, tmp_path / "v.zip")
                archive = {"archive": (tmp_path / "v.zip").read_bytes()}
                assert run.http.post("/versions", files=archive).status_code == 201
            run.post("/galleries", name="g")
            assert run.post("/galleries/g/deployments", version="v1").status_code == 201
            run.model.current = "v1"
            for name in IDS:
                run.store(name)
            return run

        yield begin


def live(run: Run, steps: int) -> None:
    for step in range(steps):
        try:
            run.choose(OPERATIONS)()
            run.check()
        except AssertionError as error:
            error.add_note(f"at step {step}: {', '.join(run.done[-3:])}")
            raise
    run.finish()


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_any_life_of_a_gallery_is_as_the_model_says(lives: Callable[[int], Run], seed: int) -> None:
    run = lives(seed)

    live(run, STEPS)

    # A life in which little happens would show little.
    assert len(set(run.done)) > len(OPERATIONS) - 3
    assert run.moves > 10
    assert run.choices > 40
    assert sum(flaky.failures for flaky in run.flaky) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_long_lives_of_a_gallery_are_as_the_model_says(lives: Callable[[int], Run], seed: int) -> None:
    live(lives(seed), 400)
