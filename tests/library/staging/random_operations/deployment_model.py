"""A model of the deployments of one gallery: the effect of each step, or the code of its refusal."""

from __future__ import annotations

from collections.abc import Mapping

WAY = ("registered", "verified", "gated", "shadow", "canary", "current")
BEFORE = {
    "verified": {"registered"},
    "gated": {"verified"},
    "shadow": {"verified", "gated"},
    "canary": {"verified", "gated", "shadow", "canary"},
    "current": {"verified", "gated", "shadow", "canary"},
}
"""State -> the states that it may follow."""


class Entry:
    """A deployment in the model."""

    def __init__(self, version: str, state: str) -> None:
        self.version, self.state = version, state


class Deployments:
    """The current and the pending deployment, the history for rollbacks, and the state of all deployments."""

    def __init__(self) -> None:
        self.all: list[Entry] = []
        self.standing: list[Entry] = []
        self.coming: Entry | None = None

    @property
    def current(self) -> str | None:
        return self.standing[-1].version if self.standing else None

    def states(self) -> list[tuple[str, str]]:
        return [(entry.version, entry.state) for entry in self.all]

    def begin(self, version: str, until: str, gate: bool = False) -> str | None:
        """`gate`: the request names a report that compares the version with the current one, and an override."""
        if self.coming is not None:
            return "deployment_active"
        if version == self.current:
            return "already_current"
        if until == "gated" and not gate:
            return "invalid_argument"
        if self.current is None and until in {"shadow", "canary"}:
            return "no_current_version"
        self.coming = Entry(version, until)
        self.all.append(self.coming)
        if until == "current":
            self._arrive()
        return None

    def advance(self, entry: Entry, to: str, gate: bool = False) -> str | None:
        if entry.state not in BEFORE[to]:
            return "illegal_transition"
        if to == "gated" and not gate:
            return "invalid_argument"
        if self.current is None and to in {"shadow", "canary"}:
            return "no_current_version"
        entry.state = to
        if to == "current":
            self._arrive()
        return None

    def _arrive(self) -> None:
        assert self.coming is not None
        if self.standing:
            self.standing[-1].state = "superseded"
        self.standing.append(self.coming)
        self.coming = None

    def rollback(self) -> str | None:
        if self.coming is not None:
            self.coming.state = "rolled_back"
            self.coming = None
            return None
        if len(self.standing) < 2 or self.standing[-2].state == "retired":
            return "nothing_to_roll_back"
        undone, target = self.standing.pop(), self.standing.pop()
        undone.state = "rolled_back"
        back = Entry(target.version, "current")
        self.all.append(back)
        self.standing.append(back)
        return None

    def retire(self, version: str, mix: Mapping[str, int], held: bool, read: bool) -> str | None:
        """`mix`: live items by active version; `held`: any item has it; `read`: a backfill must still read it."""
        if version == self.current or (self.coming and self.coming.version == version) or mix.get(version) or read:
            return "version_in_use"
        ended = [e for e in self.all if e.version == version and e.state in {"superseded", "rolled_back"}]
        if not ended and not held:
            return "nothing_to_retire"
        if not ended:
            self.all.append(Entry(version, "retired"))
        for entry in ended:
            entry.state = "retired"
        return None
