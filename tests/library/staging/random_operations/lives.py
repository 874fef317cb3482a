"""`Living`: run each step of a gallery's life on real processes and on the model, and compare the answers."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from index.query.merge import Mode
from service.registry.registry import Registry
from service.replica.engines import Engines
from service.replica.replica import Replica
from service.settings import Settings
from service.store.database.connections import Database
from staging.processes.stage import Stage
from staging.random_operations.model import Expected, Model, Move
from staging.random_operations.sight import Sight, look
from staging.random_operations.world import World
from staging.waiting import until

Effect = Callable[[Model], str | None]
Request = Callable[[httpx.Client], httpx.Response]


IDS = [f"i{n}" for n in range(12)]
NAME = st.sampled_from(IDS)
VERSION = st.sampled_from(("v1", "v2", "v3", "v4"))


def step(**drawn: Any) -> Callable[[Any], Any]:
    """A rule that is counted, and recorded for the report of a failure."""

    def wrap(method: Callable[..., None]) -> Any:
        @functools.wraps(method)
        def told(self: Living, **given: Any) -> None:
            self.stage.counts[method.__name__] += 1
            self.stage.counts["steps"] += 1
            self.story.append(f"{method.__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})")
            self.sound = False
            with self.noted():
                method(self, **given)

        decorate: Callable[[Any], Any] = rule(**drawn)
        return decorate(told)

    return wrap


class Follower:
    """A replica that was loaded once and has followed the feed since (invariant 7)."""

    def __init__(self, settings: Settings, database: Database, engines: Engines, name: str) -> None:
        registry = Registry(database, settings)
        registry.sync()
        self.replica = Replica(database, registry, settings.indexes, settings.poll_seconds, collections_of=engines.of)
        self.loaded = self.replica.find(name)

    def answer(self, world: World, number: int, k: int) -> dict[int, float]:
        """Key -> raw score for a query by a picture."""
        assert self.replica._poll() == []  # it follows the feed and the edges
        self.loaded.gallery.adopt_segments()  # that the server has built
        found = self.loaded.gallery.search(
            None, lambda version: world.encode(version, number)[None], k, encoders=world.everyone, mode=Mode.RAW
        )
        return dict(zip(found.keys_QK[0].tolist(), found.raw_QK[0].tolist(), strict=True))


class Living(RuleBasedStateMachine):
    """The gallery `name` of a stage, and its model."""

    stage: Stage
    world: World
    model: Model
    name: str
    story: list[str]
    """The steps so far."""
    sound: bool
    """Whether the last step succeeded."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record a failure in the story, because Hypothesis repeats the run and reports the repetition."""
        try:
            yield
        except Exception:
            self.story.append(traceback.format_exc())
            raise

    def act(self, request: Request, *effects: Effect, doom: float | None = None) -> Any:
        """Send a request and apply its effect to the model; one of several effects if workers may be faster.

        Returns:
            The answer; None if the server was killed before it answered.
        """
        lately = self.model.moving
        outcomes: dict[str | None, Model] = {}
        for effect in effects:
            changed = self.model.copy()
            code = effect(changed)
            outcomes.setdefault(code, changed if code is None else self.model)
        answer = None
        with self.stage.doomed(doom):
            try:
                answer = request(self.stage.http)
            except httpx.TransportError:
                assert doom is not None
        if answer is None:
            self.stage.counts["requests cut off"] += 1
            done = [outcomes[None]] if None in outcomes else []
            self.learn([*done, self.model], lately)
            return None
        code = answer.json()["code"] if answer.status_code >= 400 else None
        assert code in outcomes, f"expected {list(outcomes)}: {answer.text}"
        self.learn([outcomes[code]], lately)
        return answer

    def learn(self, candidates: list[Model], lately: Move | None = None) -> Sight:
        """Read the database and keep the first candidate that agrees with it."""
        sight = look(self.stage.site.database, self.name)
        for candidate in candidates:
            seeing = candidate.copy()
            try:
                seeing.see(sight, lately)
            except AssertionError:
                if candidate is candidates[-1]:
                    raise
            else:
                self.model = seeing
                return sight
        raise AssertionError

    def settled(self, ask: Callable[[Sight], Any]) -> Any:
        """The result of `ask` at a time at which the model is known, although workers may be moving items."""
        deadline = time.monotonic() + 60
        while True:
            sight = self.learn([self.model])
            until(lambda: self.shown()["seq"] >= sight.seq)  # noqa: B023
            told = ask(sight)
            if look(self.stage.site.database, self.name).seq == sight.seq:
                return told
            assert time.monotonic() < deadline, "the gallery never rests"

    def shown(self) -> Any:
        return self.stage.http.get(f"/galleries/{self.name}").json()

    def post(self, route: str, **body: Any) -> Request:
        return lambda http: http.post(f"/galleries/{self.name}/{route}", json=body)

    @step(number=st.integers(0, 50), part=st.floats(0, 1))
    def query_picture(self, number: int, part: float) -> None:
        self.ask_picture(number, 1 + int(part * (len(self.model.items) - 1)))

    @step(number=st.integers(0, 50))
    def query_in_default_mode(self, number: int) -> None:
        """Query in the default mode: if a gate has fitted maps, the model only knows the order within each shard."""
        data, files = {"k": str(len(self.model.items))}, [("images", ("q", self.world.as_bytes(number)))]
        answer = self.settled(lambda _: self.query(data=data, files=files)).json()
        found, _ = self.model.by_picture(number, self._asking(answer))
        matches = self.compare(answer, found, {}, len(found))
        for shard in {(match["version"], match["origin"]) for match in matches}:
            raw = [match["raw_score"] for match in matches if (match["version"], match["origin"]) == shard]
            assert raw == sorted(raw, reverse=True)

    @step(version=VERSION, number=st.integers(0, 50))
    def query_embedding(self, version: str, number: int) -> None:
        """Invariant 8: items that no edge reaches are not compared, and the answer says so."""
        vector = self.world.encode(version, number)
        body: dict[str, Any] = {"version": version, "embeddings": [[float(x) for x in vector]]}
        self.ask(lambda: self.model.by_embedding(version, vector), **body)

    @step(name=NAME)
    def query_item(self, name: str) -> None:
        if name in self.model.items:
            self.ask(lambda: self.model.by_item(name), name, items=[name])

    def query(self, **request: Any) -> httpx.Response:
        return self.stage.http.post(f"/galleries/{self.name}/query", **request)

    def ask_picture(self, number: int, k: int | None = None) -> Any:
        """Query by an image; returns the matches."""
        k = k or len(self.model.items)
        data, files = {"k": str(k), "mode": "raw"}, [("images", ("q", self.world.as_bytes(number)))]
        answer = self.settled(lambda _: self.query(data=data, files=files)).json()
        found, lost = self.model.by_picture(number, self._asking(answer))
        assert lost == {}
        return self.compare(answer, found, lost, k)

    def _asking(self, answer: Any) -> str:
        """The version that answered: the current one or a canary."""
        coming = self.model.deployments.coming
        legal = [self.model.current, *([coming.version] if coming and coming.state == "canary" else [])]
        assert answer["version"] in legal
        return str(answer["version"])

    def ask(self, expect: Callable[[], Any], apart: str | None = None, **body: Any) -> None:
        """Send a query that may not reach everything and does not find `apart`."""
        k = len(self.model.items)
        answer = self.settled(lambda _: self.query(json={**body, "k": k, "mode": "raw"}))
        found, lost = expect()
        if not found:
            assert answer.json()["code"] == "no_route"
            return
        found.pop(apart, None)
        self.compare(answer.json(), found, lost, k)

    def compare(self, answer: Any, found: dict[str, Expected], lost: dict[str, int], k: int) -> Any:
        """Check that every match is as the model expects, and that no better item is missing."""
        matches = answer["results"][0]["matches"]
        assert {degraded["version"]: degraded["items"] for degraded in answer["degraded"]} == lost
        assert answer["mix"] == self.model.mix()
        assert len({match["id"] for match in matches}) == len(matches) == min(k, len(found))
        for match in matches:
            expected = found[match["id"]]
            about = (match["version"], match["origin"], tuple(match["route"]), match["metadata"])
            assert about == (expected.version, expected.origin, expected.kinds, expected.metadata)
            assert match["raw_score"] == pytest.approx(expected.score, abs=1e-5)
        scores = [match["score"] for match in matches]
        assert scores == sorted(scores, reverse=True)
        if answer["mode"] == "raw":
            best = sorted((expected.score for expected in found.values()), reverse=True)[:k]
            np.testing.assert_allclose(scores, best, atol=1e-5)
        return matches
