"""Random deployments, steps, rollbacks and retirements against a plain model of what must come of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from index.version import Version
from service.backfills.worker import Worker
from staging.deployments import Deployments

VERSIONS = ("v1", "v2", "v3")
STEPS = ("registered", "verified", "shadow", "canary", "current")
SELDOM = st.sampled_from((False, False, False, True))


@pytest.fixture(scope="module", autouse=True)
def more(
    served: Any, versions: dict[str, Version], tmp_path_factory: Any, make_version: Callable[..., Version]
) -> None:
    folder = tmp_path_factory.mktemp("more") / "v3"
    made = make_version(folder, "v3", 6, drift=0.1, edges=[(versions["v2"], "identity", 0.8)])
    assert served.register(made).status_code == 201


class Machine(RuleBasedStateMachine):
    served: Any
    pictures: list[bytes]

    @initialize()
    def start(self) -> None:
        self.path = self.served.gallery(None)
        self.model = Deployments()
        self.switch(0)
        self.ingest(0)

    @precondition(lambda self: self.model.coming is None)
    @rule(step=st.integers(1, 2))
    def switch(self, step: int) -> None:
        """Another version becomes current at once."""
        now = VERSIONS.index(self.model.current) if self.model.current else 0
        version = VERSIONS[(now + step) % 3]
        self.post("deployments", self.model.begin(version, "current"), False, version=version)

    @precondition(lambda self: len(self.model.standing) > 1 or self.model.coming is not None)
    @rule()
    def undo(self) -> None:
        """A rollback that has something to roll back."""
        self.post("rollback", self.model.rollback(), False)

    @precondition(lambda self: self.model.coming is not None)
    @rule(to=st.sampled_from(STEPS[1:]))
    def go_on(self, to: str) -> None:
        """The next step of what is on its way, if it is one."""
        number = self.shown()[0]["deployments"][self.model.all.index(self.model.coming)]["id"]
        self.post(f"deployments/{number}/advance", self.model.advance(self.model.coming, to), False, to=to)

    def post(self, route: str, expected: str | None, dry: bool, **body: Any) -> None:
        before = self.shown()
        params = {"dry_run": "true"} if dry else {}
        answer = self.served.http.post(f"{self.path}/{route}", json=body, params=params)
        assert (answer.json().get("code") if answer.status_code >= 300 else None) == expected, answer.text
        if dry or expected:
            assert self.shown() == before

    def shown(self) -> Any:
        return self.served.http.get(f"{self.path}/deployments").json(), self.served.http.get(self.path).json()

    def rehearsed(self, dry: bool, act: Callable[[Deployments], str | None]) -> str | None:
        """What the model says; a rehearsal leaves it as it was."""
        if not dry:
            return act(self.model)
        states, standing, coming = [e.state for e in self.model.all], list(self.model.standing), self.model.coming
        count = len(self.model.all)
        expected = act(self.model)
        del self.model.all[count:]
        for entry, state in zip(self.model.all, states, strict=True):
            entry.state = state
        self.model.standing, self.model.coming = standing, coming
        return expected

    @rule(version=st.sampled_from(VERSIONS), until=st.sampled_from(STEPS), dry=SELDOM)
    def begin(self, version: str, until: str, dry: bool) -> None:
        expected = self.rehearsed(dry, lambda model: model.begin(version, until))
        self.post("deployments", expected, dry, version=version, until=until)

    @rule(back=st.integers(0, 3), to=st.sampled_from(STEPS[1:]), dry=SELDOM)
    def advance(self, back: int, to: str, dry: bool) -> None:
        if not self.model.all:
            return
        place = max(0, len(self.model.all) - 1 - back)
        number = self.shown()[0]["deployments"][place]["id"]
        expected = self.rehearsed(dry, lambda model: model.advance(model.all[place], to))
        self.post(f"deployments/{number}/advance", expected, dry, to=to)

    @rule(dry=SELDOM)
    def rollback(self, dry: bool) -> None:
        self.post("rollback", self.rehearsed(dry, lambda model: model.rollback()), dry)

    @rule(version=st.sampled_from(VERSIONS), dry=SELDOM)
    def retire(self, version: str, dry: bool) -> None:
        mix = self.shown()[1]["mix"]
        expected = self.rehearsed(dry, lambda model: model.retire(version, mix))
        self.post("retire", expected, dry, version=version)

    @rule(number=st.integers(0, 3))
    def ingest(self, number: int) -> None:
        answer = self.served.ingest(self.path, {f"i{number}": self.pictures[number]})
        assert answer.status_code == (409 if self.model.current is None else 200)

    @rule()
    def backfill(self) -> None:
        if self.model.current is None or not self.shown()[1]["items"]:
            return
        assert self.served.http.post(f"{self.path}/backfills", json={}).status_code == 202
        worker = Worker(self.served.runtime.settings, threading.Event())
        while worker.step():
            pass
        worker.close()
        live = self.served.runtime.replica.find(self.path.rpartition("/")[2])
        self.served.runtime.replica.refresh(live.id)
        assert set(self.shown()[1]["mix"]) == {self.model.current}

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "model"):
            return
        listed, gallery = self.shown()
        assert [(d["version"], d["state"]) for d in listed["deployments"]] == [
            (entry.version, entry.state) for entry in self.model.all
        ]
        assert gallery["current"] == self.model.current
        assert sum(gallery["mix"].values()) == gallery["items"]

    @invariant()
    def everything_is_found(self) -> None:
        if not hasattr(self, "model") or not (items := self.shown()[1]["items"]):
            return
        answer = self.served.query(self.path, self.pictures[0], k=items).json()
        assert len(answer["results"][0]["matches"]) == items
        assert answer["degraded"] == []


def test_deployments_do_what_the_model_does(served: Any, pictures: list[bytes]) -> None:
    small = settings(
        max_examples=int(os.environ.get("REGRAFT_TEST_EXAMPLES", "4")),
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        # Each step is a few requests: looking for a shorter failure would take minutes.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )

    def machine() -> Machine:
        made = Machine()
        made.served, made.pictures = served, pictures
        return made

    run_state_machine_as_test(machine, settings=small)
