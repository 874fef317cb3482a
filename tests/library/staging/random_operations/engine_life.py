"""The life of a gallery whose vectors are in an engine, which is killed and frozen like any other process."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from typing import Any

import httpx
from hypothesis import strategies as st

from index.engines.remote.base import EngineUnavailable
from staging.external.doomed_engine import DoomedEngine
from staging.processes.load import Load
from staging.random_operations.life import Life
from staging.random_operations.lives import step
from staging.random_operations.model import Expected

WHOLE_SECONDS = 60.0
"""Seconds after the engine's return in which answers may be incomplete on a busy machine."""


def reason(answer: Any) -> str:
    """The stated reason why an answer is incomplete; empty: none."""
    if answer.get("code") == "engine_unavailable":
        return str(answer["detail"])
    return ""


class Part(list[Any]):
    """The matches of an answer without the engine, not to be compared with those of other answers."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return True


class EngineLoad(Load):
    """A load whose answers may lack items in the engine, but only while it is unavailable."""

    def __init__(self, engine: DoomedEngine, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._engine, self.lacking = engine, 0

    def _note(self, answer: httpx.Response) -> None:
        told = answer.json()
        if (reason(told) or told.get("degraded")) and self._engine.lacking:
            self.lacking += 1
        else:
            super()._note(answer)


class EngineLife(Life):
    """The life of one gallery in an engine."""

    engine: DoomedEngine
    load: EngineLoad

    def loaded(self, *given: Any, **more: Any) -> EngineLoad:
        return EngineLoad(self.engine, *given, **more)

    @step(how=st.sampled_from(("killed", "frozen")), seconds=st.sampled_from((0.0, 0.0, 0.01, 0.1, 0.5)))
    def strike_engine(self, how: str, seconds: float) -> None:
        self.engine.strike(how, seconds)

    @step()
    def bring_back_engine(self) -> None:
        self.engine.bring_back()

    @step(how=st.sampled_from(("killed", "frozen")))
    def interrupt_engine(self, how: str) -> None:
        """Make the engine unavailable for less than a step."""
        self.engine.strike(how, 0.0)
        self.engine.bring_back()

    def query(self, **request: Any) -> httpx.Response:
        """Repeat the query while its answer lacks items of the engine although that is available."""
        deadline = time.monotonic() + WHOLE_SECONDS
        while True:
            self.stage.counts["queries"] += 1
            answer = super().query(**request)
            told = answer.json()
            engine_missing = any("edge" not in one["reason"] for one in told.get("degraded", ()))
            if not reason(told) and not engine_missing:
                return answer
            if self.engine.away:
                self.stage.counts["queries without the engine"] += 1
                return answer
            assert self.engine.lacking or time.monotonic() < deadline, told
            time.sleep(0.05)

    def _asking(self, answer: Any) -> str:
        return self.model.current if reason(answer) else super()._asking(answer)

    def compare(self, answer: Any, found: dict[str, Expected], lost: dict[str, int], k: int) -> Any:
        if reason(answer):
            return Part()
        away = sum(
            (Counter({one["version"]: one["items"]}) for one in answer["degraded"] if one["version"] not in lost),
            Counter(),
        )
        if not away:
            return super().compare(answer, found, lost, k)
        # A version has shards of several origins, and the answer does not state which of them is missing.
        told = {**answer, "degraded": [one for one in answer["degraded"] if one["version"] in lost]}
        active = {name: self.model.active(name) for name in self.model.items}
        shards = Counter((version, self.model.items[name].origins[version]) for name, version in active.items())
        places = [place for place in sorted(shards) if place[0] in away]
        errors = []
        for without in itertools.chain.from_iterable(itertools.combinations(places, n + 1) for n in range(len(places))):
            if sum((Counter({place[0]: shards[place]}) for place in without), Counter()) == away:
                left = {name: one for name, one in found.items() if (one.version, one.origin) not in without}
                try:
                    return Part(super().compare(told, left, lost, k))
                except (AssertionError, KeyError) as error:
                    errors.append(error)
        raise AssertionError(f"no shards of {places} explain {json.dumps(answer)}: {errors}")

    def followed(self, k: int) -> list[dict[int, float]]:
        if self.engine.lacking:
            return []
        try:
            return super().followed(k)
        except EngineUnavailable:  # the feed will bring the newer rows to the follower
            return [] if self.engine.lacking else super().followed(k)

    @step()
    def follow(self) -> None:
        if not self.engine.lacking:
            super().follow.__wrapped__(self)

    def finish(self) -> None:
        self.engine.bring_back()
        super().finish()

    def teardown(self) -> None:
        self.engine.bring_back()
        super().teardown()
        for how, times in self.engine.strikes.items():
            self.stage.counts[f"engines {how}"] = times
        self.stage.counts["load without the engine"] += self.load.lacking if hasattr(self, "load") else 0
