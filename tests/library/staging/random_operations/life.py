"""The life of a gallery on real processes, and of its model: steps drawn by Hypothesis; `live` runs one."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, assume, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import get_state_machine_test, initialize, invariant

from service.doctor.examination import Doctor
from service.http.app import create_app
from service.settings import Settings
from staging.processes.load import Load
from staging.processes.site import Site
from staging.processes.stage import MOST_WORKERS, Stage
from staging.random_operations.deployment_model import WAY
from staging.random_operations.lives import IDS, NAME, VERSION, Effect, Follower, Living, step
from staging.random_operations.model import Model
from staging.random_operations.sight import Sight, look
from staging.random_operations.world import World
from staging.waiting import until

LONG = 80
"""Steps of a life in long runs."""
FEWEST = 4
"""Items that are never deleted, so that the load always finds its k."""

JOB = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(("reencode", "reencode", "transform")),
        "order": st.sampled_from(("random", "newest", "oldest", "traffic", "transformed", "uncertainty")),
        "chunk_size": st.integers(1, 5),
        "rate": st.sampled_from((None, 10, 30)),
        "limit": st.sampled_from((None, None, None, 3)),
        "share": st.sampled_from((None, None, None, 0.5)),
    }
)
"""A backfill: with a rate it takes as long as some steps do."""
DOOM = st.sampled_from((*[None] * 30, 0.001, 0.004, 0.015))
"""Seconds from the beginning of a request until the server is killed; None: it is not."""


def options(steps: set[str], gate: int | None) -> dict[str, Any]:
    """The options that these steps accept; a refusal is always overridden."""
    given: dict[str, Any] = {"gate": gate} if "gated" in steps else {}
    if steps & {"gated", "canary", "current"}:
        given["override"] = "a test"
    if "canary" in steps:
        given["canary"] = {"share": 0.5}
    return given


def once_ended(effect: Effect) -> Effect:
    """The effect if workers have just ended the backfill."""

    def effect_then(model: Model) -> str | None:
        model.end_backfill()
        return effect(model)

    return effect_then


class Life(Living):
    """The life of one gallery."""

    galleries = 0
    kind = "auto"

    @initialize(chance=st.integers(0, 1 << 32), version=st.sampled_from(("v2", "v3", "v4")))
    def begin(self, chance: int, version: str) -> None:
        """Start with eight items, most of v1, another current version, and at least one worker."""
        # Hypothesis tries the simplest example first: the same step repeated.
        assume(chance)
        type(self).galleries += 1
        self.name = f"life{self.galleries}"
        self.model = Model(self.world)
        self.pictures = 0
        self.gates: dict[tuple[str, str], int] = {}
        self.followers: list[Follower] = []
        self.stack = ExitStack()
        made = {"name": self.name, "index": {"kind": self.kind}}
        assert self.stage.http.post("/galleries", json=made).status_code == 201
        self.deploy("v1", "current")
        self.store(names=IDS[:6], doom=None)
        self.deploy(version, "current")
        self.store(names=IDS[6:8], doom=None)
        if not self.stage.workers:
            self.stage.begin_worker()
        pictures = [self.world.as_bytes(number) for number in range(5)]
        url = f"{self.stage.http.base_url}galleries/{self.name}/query"
        self.load = self.loaded(url, pictures, 3, pause=0.02, outage=self.stage.outage)
        self.stack.enter_context(self.load.running())

    def loaded(self, *given: Any, **more: Any) -> Load:
        """The constant load of queries."""
        return Load(*given, **more)

    # Writing

    @step(names=st.lists(NAME, min_size=1, max_size=3, unique=True), doom=DOOM)
    def store(self, names: list[str], doom: float | None) -> None:
        """Store items with images, which replace existing items."""
        numbers = {name: self.pictures + n for n, name in enumerate(names)}
        self.pictures += len(names)
        about = {name: {"label": number % 7} for name, number in numbers.items()}
        listed = json.dumps([{"id": name, "metadata": about[name], "image": name} for name in names])
        files = [("images", (name, self.world.as_bytes(number))) for name, number in numbers.items()]

        def effect(model: Model) -> None:
            for name in names:
                model.store_picture(name, numbers[name], about[name])

        path = f"/galleries/{self.name}/items"
        answer = self.act(lambda http: http.post(path, data={"items": listed}, files=files), effect, doom=doom)
        assert answer is None or answer.json()["stored"] == len(names)

    @step(name=NAME, version=VERSION, doom=DOOM)
    def store_embedding(self, name: str, version: str, doom: float | None) -> None:
        """Store an embedding, in addition to those of an existing item."""
        self.pictures += 1
        vector = self.world.encode(version, self.pictures)
        listed = [{"id": name, "embedding": [float(x) for x in vector]}]
        request = self.post("items", version=version, items=listed)
        self.act(request, lambda model: model.store_embedding(name, version, vector), doom=doom)

    @step(label=st.integers(0, 6), number=st.integers(0, 99), doom=DOOM)
    def patch_passing(self, label: int, number: int, doom: float | None) -> None:
        """Change the metadata of the items with one label, by a filter; so few are one transaction."""
        names = [name for name, held in self.model.items.items() if held.metadata.get("label") == label]

        def effect(model: Model) -> None:
            for name in names:
                model.patch(name, {"number": number})

        path, body = f"/galleries/{self.name}/items", {"filter": {"field": "label", "eq": label}}
        request = {**body, "metadata": {"number": number}}
        answer = self.act(lambda http: http.patch(path, json=request), effect, doom=doom)
        assert answer is None or answer.json() == {"updated": len(names), "failed": 0, "errors": []}

    @step(name=NAME, doom=DOOM)
    def delete(self, name: str, doom: float | None) -> None:
        if len(self.model.items) > FEWEST:
            path = f"/galleries/{self.name}/items/{name}"
            self.act(lambda http: http.delete(path), lambda model: model.delete(name), doom=doom)

    @step(label=st.integers(0, 6), doom=DOOM)
    def delete_passing(self, label: int, doom: float | None) -> None:
        """Delete the items with one label, by a filter; so few are one transaction."""
        names = [name for name, held in self.model.items.items() if held.metadata.get("label") == label]
        if len(self.model.items) - len(names) < FEWEST:
            return

        def effect(model: Model) -> None:
            for name in names:
                model.delete(name)

        answer = self.act(self.post("items:delete", filter={"field": "label", "eq": label}), effect, doom=doom)
        assert answer is None or answer.json() == {"deleted": len(names), "missing": []}

    # Deploying

    @step(version=VERSION)
    def measure(self, version: str) -> None:
        """A gate, on the items' own labels."""
        if version == self.model.current:
            return
        labels = [held.metadata["label"] for held in self.model.items.values() if held.picture is not None]
        possible = len(set(labels)) < len(labels)
        answer = self.act(
            self.post("gates", version=version, label="label"), lambda _: None if possible else "invalid_argument"
        )
        if possible:
            self.gates[version, self.model.current] = answer.json()["id"]

    @step(version=VERSION, until=st.sampled_from((*WAY, "current", "current")), doom=DOOM)
    def begin_deployment(self, version: str, until: str, doom: float | None) -> None:
        self.deploy(version, until, doom)

    def deploy(self, version: str, until: str, doom: float | None = None) -> None:
        gate = self.gates.get((version, self.model.deployments.current or ""))
        steps = {until, "gated"} if gate is not None and until in WAY[2:] else {until}
        body = {"version": version, "until": until, **options(steps, gate)}
        effect = lambda model: model.begin(version, until, gate is not None)  # noqa: E731
        self.act(self.post("deployments", **body), effect, doom=doom)

    @step(back=st.integers(0, 2), to=st.sampled_from(WAY[1:]), doom=DOOM)
    def advance(self, back: int, to: str, doom: float | None) -> None:
        place = max(0, len(self.model.deployments.all) - 1 - back)
        number = self.stage.http.get(f"/galleries/{self.name}/deployments").json()["deployments"][place]["id"]
        gate = (
            self.gates.get((self.model.deployments.all[place].version, self.model.current)) if to == "gated" else None
        )
        request = self.post(f"deployments/{number}/advance", to=to, **options({to}, gate))
        self.act(request, lambda model: model.advance(place, to, gate is not None), doom=doom)

    @step(doom=DOOM)
    def roll_back(self, doom: float | None) -> None:
        self.act(self.post("rollback"), Model.rollback, doom=doom)

    @step(version=VERSION)
    def go_and_return(self, version: str) -> None:
        """Invariant 5: a deployment that is rolled back leaves every answer as it was."""
        if self.model.deployments.coming or version == self.model.current or self.model.moving:
            return
        # If an index was built in between, it sums in another order: scores may differ in the last bit.
        before = {
            match["id"]: match | {score: pytest.approx(match[score], abs=1e-6) for score in ("score", "raw_score")}
            for match in self.ask_picture(1)
        }
        self.deploy(version, "current")
        self.act(self.post("rollback"), Model.rollback)
        assert {match["id"]: match for match in self.ask_picture(1)} == before

    @step(version=VERSION, doom=DOOM)
    def retire(self, version: str, doom: float | None) -> None:
        effects: list[Effect] = [lambda model: model.retire(version)]
        if moving := self.model.moving:
            effects.append(lambda model: model.retire(version, moving))
        self.act(self.post("retire", version=version), *effects, doom=doom)

    # Backfilling

    @step(job=JOB, doom=DOOM)
    def start_backfill(self, job: dict[str, Any], doom: float | None) -> None:
        self.backfill(job, doom)

    def backfill(self, job: dict[str, Any], doom: float | None = None) -> None:
        start: Effect = lambda model: model.start(job["kind"], job["order"], bool(job["limit"] or job["share"]))  # noqa: E731
        effects = [start]
        if self.model.moving:
            effects.append(once_ended(start))
        if self.model.moving and job["order"] == "uncertainty":
            effects.append(lambda _: "no_uncertainty")
        self.act(self.post("backfills", **job), *effects, doom=doom)

    @step(version=VERSION, job=JOB, doom=DOOM)
    def upgrade(self, version: str, job: dict[str, Any], doom: float | None) -> None:
        """Deploy a version and start a backfill to it."""
        self.switch(version)
        self.backfill(job, doom)

    def switch(self, version: str) -> None:
        if self.model.deployments.coming:
            self.act(self.post("rollback"), Model.rollback)
        self.deploy(version, "current")

    @step(action=st.sampled_from(("pause", "resume", "resume", "cancel")), doom=DOOM)
    def steer(self, action: str, doom: float | None) -> None:
        if not self.model.backfills:
            return
        steer: Effect = lambda model: model.steer(action)  # noqa: E731
        effects = [steer]
        if self.model.moving:
            effects.append(once_ended(steer))
        number = look(self.stage.site.database, self.name).backfills[-1].id
        self.act(lambda http: http.post(f"/backfills/{number}/{action}"), *effects, doom=doom)

    @step()
    def let_work(self) -> None:
        """Wait until workers have moved something or have nothing to do."""
        if not self.stage.workers:
            self.stage.begin_worker()
        before = self.model.moves
        until(lambda: self.learn([self.model]) and (self.model.moves > before or not self.model.moving))

    # Processes

    @step()
    def begin_worker(self) -> None:
        self.stage.begin_worker()

    @step(place=st.integers(0, MOST_WORKERS), how=st.sampled_from((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
    def end_process(self, place: int, how: signal.Signals) -> None:
        """End a worker, or the server, which is started again."""
        if place == MOST_WORKERS:
            self.stage.end_server(how)
        else:
            self.stage.end_worker(place, how)

    @step()
    def follow(self) -> None:
        """Start another replica here, and end the oldest."""
        site = self.stage.site
        self.followers = [*self.followers[-1:], Follower(site.settings, site.database, site.engines, self.name)]

    @invariant()
    def as_the_model_says(self) -> None:
        with self.noted():
            self._check()
        self.sound = True

    def _check(self) -> None:
        k = len(self.model.items)

        def tell(sight: Sight) -> Any:
            followed = self.followed(k)
            return self.shown(), [{sight.names[key]: raw for key, raw in told.items()} for told in followed]

        shown, followed = self.settled(tell)
        assert (shown["current"], shown["mix"]) == (self.model.current, self.model.mix())
        assert shown["items"] == len(self.model.items)
        expected, _ = self.model.by_picture(3)
        for told in followed:
            assert told == pytest.approx({name: found.score for name, found in expected.items()}, abs=1e-5)
        self.ask_picture(4)
        assert self.load.wrong == []

    def followed(self, k: int) -> list[dict[int, float]]:
        """The answer of each follower to a query by an image."""
        return [follower.answer(self.world, 3, k) for follower in self.followers]

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "load"):
            return
        with self.stack:
            if self.sound:
                self.finish()
        assert self.load.wrong == []
        for count in ("answered", "cut_off"):
            self.stage.counts[f"load {count}"] += getattr(self.load, count)

    def finish(self) -> None:
        """Invariants 1 and 6: after a kill of everything the final state is that of a run without kills."""
        while self.stage.workers:
            self.stage.end_worker(0, signal.SIGKILL)
        self.stage.end_server(signal.SIGKILL)
        self.as_the_model_says()
        self.stage.begin_worker()
        self.load.wait(1)
        if self.model.backfill == "paused":
            self.steer(action="resume", doom=None)
        self.end_backfill()
        self.switch("v2" if self.model.current == "v3" else "v3")
        self.backfill({"kind": "reencode", "order": "random", "chunk_size": 3, "limit": None, "share": None})
        self.end_backfill()
        self.as_the_model_says()
        for held in self.model.items.values():
            if held.picture is not None and held.origins[self.model.current] != "supplied":
                vector = self.world.encode(self.model.current, held.picture)
                np.testing.assert_allclose(held.vectors[self.model.current], vector, atol=1e-5)
        assert [row.failed for row in look(self.stage.site.database, self.name).backfills] == [0] * self.model.backfills
        self.stage.check()
        findings = Doctor(self.stage.site.settings, self.stage.site.database).examine()
        assert [finding for finding in findings if finding.severity == "error"] == []
        self.stage.counts["items moved by workers"] += self.model.moves

    def end_backfill(self) -> None:
        until(lambda: self.learn([self.model]) and not self.model.moving)


@contextmanager
def staged(settings: Settings, world: World, kind: type[Site] = Site) -> Iterator[Stage]:
    """A server with all versions registered."""
    with TestClient(create_app(settings), base_url="http://127.0.0.1/v1") as http:
        world.register(http)
    with closing(kind(settings.data, settings)) as site, closing(Stage(site)) as stage:
        yield stage


def live(stage: Stage, world: World, number: int, steps: int, kind: type[Life] = Life) -> None:
    """Run the life of a seed."""
    lives: list[Life] = []

    def begin() -> Life:
        lives.append(kind())
        lives[-1].stage, lives[-1].world, lives[-1].story = stage, world, []
        return lives[-1]

    one = settings(
        max_examples=1,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        # Each step is a few requests: shrinking a failure would take minutes.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    try:
        seed(number)(get_state_machine_test(begin, settings=one))()  # type: ignore[arg-type]  # it calls `begin`
    except Exception as error:
        error.add_note(f"--model-seed {number}; the first of its lives:\n" + "\n".join(lives[1].story))
        raise
