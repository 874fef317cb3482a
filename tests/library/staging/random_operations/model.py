"""`Model`: a plain model of the invariants of one gallery (docs/design.md, section 6), in memory, without an index.

It stores the embeddings of each item and derives everything else from two rules: of an item's versions, the one that
queries of the current version reach best is active; and a query ranks all live items by their active embeddings. It
does not predict which chunks workers take: it reads what was moved and checks that this was allowed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from index.version import EdgeKind
from staging.random_operations.deployment_model import Deployments
from staging.random_operations.sight import Sight
from staging.random_operations.world import World

Embed = Callable[[str], np.ndarray]
"""Version -> the query embedded by that version."""


def merged(value: Any, change: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a change of metadata by JSON Merge Patch (RFC 7396)."""
    result = dict(value) if isinstance(value, dict) else {}
    for key, new in change.items():
        if new is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), new) if isinstance(new, dict) else new
    return result


@dataclass(frozen=True)
class Move:
    """The work of a running backfill; its target is the current version."""

    target: str
    kind: str


@dataclass
class Held:
    """A live item: the number of its image, if any, its metadata, and its embeddings with their origins."""

    picture: int | None
    metadata: dict[str, Any]
    vectors: dict[str, np.ndarray]
    origins: dict[str, str]

    def has(self, version: str, vector: np.ndarray) -> bool:
        """Whether it has this vector, not by a transform: then storing it again is no change."""
        made = self.origins.get(version, "transformed") == "transformed"
        return not made and np.array_equal(self.vectors[version], vector)


@dataclass(frozen=True)
class Expected:
    """The expected match of an item."""

    version: str
    origin: str
    kinds: tuple[str, ...]
    score: float
    metadata: Mapping[str, Any]


@dataclass
class Model:
    """The expected state of one gallery. Operations return the code of their refusal, or None."""

    world: World
    deployments: Deployments = field(default_factory=Deployments)
    items: dict[str, Held] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    backfills: int = 0
    backfill: str | None = None
    """State of the newest backfill."""
    move: Move | None = None
    capped: bool = False
    written: set[str] = field(default_factory=set)
    """Items stored since the last `see`: a backfill may have ended before."""
    moves: int = 0

    def copy(self) -> Model:
        return copy.deepcopy(self)

    @property
    def current(self) -> str:
        current = self.deployments.current
        assert current is not None
        return current

    @property
    def moving(self) -> Move | None:
        """The work that workers may do now."""
        return self.move if self.backfill == "running" else None

    def active(self, name: str, current: str | None = None) -> str:
        return self.world.best(current or self.current, self.items[name].vectors)

    def mix(self) -> dict[str, int]:
        return dict(Counter(self.active(name) for name in self.items))

    # Operations

    def store_picture(self, name: str, number: int, metadata: dict[str, Any]) -> None:
        """Store an image, which replaces everything that the item has."""
        vector = self.world.encode(self.current, number)
        self._store(name, Held(number, metadata, {self.current: vector}, {self.current: "encoded"}))

    def store_embedding(
        self, name: str, version: str, vector: np.ndarray, metadata: dict[str, Any] | None = None
    ) -> str | None:
        """Store an embedding in addition to others; removes transforms of an earlier embedding of its version."""
        held = copy.deepcopy(self.items.get(name, Held(None, {}, {}, {})))
        if not held.has(version, vector):
            if version in held.vectors:
                stale = [made for made, origin in held.origins.items() if origin == "transformed"]
                held.vectors = {v: x for v, x in held.vectors.items() if v not in stale}
                held.origins = {v: origin for v, origin in held.origins.items() if v not in stale}
            held.vectors[version], held.origins[version] = vector, "supplied"
        if all(self.world.route(self.current, v) is None for v in held.vectors):
            return "items_refused"
        held.metadata = held.metadata if metadata is None else metadata
        self._store(name, held)
        return None

    def _store(self, name: str, held: Held) -> None:
        self.items[name] = held
        self.deleted.discard(name)
        self.written.add(name)

    def patch(self, name: str, change: dict[str, Any]) -> str | None:
        """Change the metadata of an item."""
        if name not in self.items:
            return "unknown_item"
        self.items[name].metadata = merged(self.items[name].metadata, change)
        return None

    def delete(self, name: str) -> str | None:
        if name not in self.items:
            return "unknown_item"
        del self.items[name]
        self.deleted.add(name)
        return None

    def begin(self, version: str, until: str = "current", gate: bool = False) -> str | None:
        return self._deploy(lambda deployments: deployments.begin(version, until, gate))

    def advance(self, place: int, to: str, gate: bool = False) -> str | None:
        return self._deploy(lambda deployments: deployments.advance(deployments.all[place], to, gate))

    def rollback(self) -> str | None:
        return self._deploy(Deployments.rollback)

    def _deploy(self, step: Callable[[Deployments], str | None]) -> str | None:
        before = self.deployments.current
        code = step(self.deployments)
        if before != self.deployments.current and self.backfill in {"running", "paused"}:
            self.backfill = "cancelled"
        return code

    def retire(self, version: str, meanwhile: Move | None = None) -> str | None:
        """`meanwhile`: workers have just moved the items that depended on the version."""
        for name in self.items:
            if meanwhile and version in {self.active(name), self.source(name, meanwhile.target)}:
                self.moved(name, meanwhile)
        anywhere = any(version in held.vectors for held in self.items.values())
        code = self.deployments.retire(version, self.mix(), anywhere, self._read(version))
        if code is None:
            for held in self.items.values():
                held.vectors.pop(version, None)
                held.origins.pop(version, None)
        return code

    def _read(self, version: str) -> bool:
        """Whether a transform backfill must still read embeddings of this version."""
        move = self.move if self._active() else None
        if move is None or move.kind != "transform":
            return False
        return any(self.may_move(name, move) and self.source(name, move.target) == version for name in self.items)

    def start(self, kind: str, order: str = "random", capped: bool = False) -> str | None:
        if self._active():
            return "backfill_active"
        if kind == "transform" and not self._carried(self.current):
            return "no_route"
        if order == "uncertainty" and self.unsure(kind):
            return "no_uncertainty"
        self.backfills += 1
        self.backfill, self.move, self.capped = "running", Move(self.current, kind), capped
        return None

    def _active(self) -> bool:
        return self.backfill in {"running", "paused"}

    def _carried(self, target: str) -> set[str]:
        """The versions from which an item edge leads to this one."""
        return {name for name in self.world.versions if self.world.graph.forward(name, target) is not None}

    def unsure(self, kind: str) -> bool:
        """Whether items wait for a backfill of this kind, and the uncertainty of none is known."""
        waiting = [name for name in self.items if self.may_move(name, Move(self.current, kind))]
        told = False
        for name in waiting:
            read = self.source(name, self.current) if kind == "transform" else self.active(name)
            told |= read in self._carried(self.current) or self.items[name].origins[str(read)] == "transformed"
        return bool(waiting) and not told

    def steer(self, action: str) -> str | None:
        """Pause, resume or cancel the newest backfill."""
        ended = {"done"} if action == "cancel" else {"done", "cancelled"}
        if self.backfill in ended:
            return "backfill_ended"
        if self.backfill != "cancelled":
            self.backfill = {"pause": "paused", "resume": "running", "cancel": "cancelled"}[action]
        return None

    # Workers

    def end_backfill(self) -> None:
        """End the backfill: all items that can move have moved, or as many as its limit allows."""
        for name in self.items:
            if not self.capped and self.move is not None:
                self.moved(name, self.move)
        self.backfill = "done"

    def may_move(self, name: str, move: Move) -> bool:
        held = self.items[name]
        if move.kind == "reencode":
            return held.picture is not None and held.origins.get(move.target) in {None, "transformed"}
        return move.target not in held.vectors and self.source(name, move.target) is not None

    def source(self, name: str, target: str) -> str | None:
        """The version that a transform of the item starts from: the best of its versions with an item edge."""
        carried = self._carried(target) & set(self.items[name].vectors)
        return self.world.best(target, carried) if carried else None

    def moved(self, name: str, move: Move) -> bool:
        """Move an item in the model, if a worker may have moved it; returns whether it may."""
        if not self.may_move(name, move):
            return False
        held = self.items[name]
        if move.kind == "reencode":
            assert held.picture is not None
            origin, vector = "encoded", self.world.encode(move.target, held.picture)
        else:
            old = self.source(name, move.target)
            assert old is not None
            edge = self.world.graph.forward(old, move.target)
            origin, vector = "transformed", self.world.apply(edge, held.vectors[old])
        held.origins[move.target], held.vectors[move.target] = origin, vector
        self.moves += 1
        return True

    # Comparison with the database

    def see(self, sight: Sight, lately: Move | None = None) -> None:
        """Apply the moves of workers since the last call; raises AssertionError on any other difference.

        `lately`: work that workers were allowed to do until some time since then.
        """
        assert sight.deployments == self.deployments.states()
        assert sight.current == self.deployments.current
        assert set(sight.items) == set(self.items), "items came or went"
        assert len(set(sight.seqs)) == len(sight.seqs)
        assert all(seq <= sight.seq for seq in sight.seqs)
        for name, seen in sight.items.items():
            self._see_item(name, seen.held, [move for move in (lately, self.moving) if move])
            assert seen.metadata == self.items[name].metadata
        self._see_backfill(sight, lately)
        self.written.clear()

    def _see_item(self, name: str, seen: Mapping[str, tuple[str, np.ndarray]], allowed: list[Move]) -> None:
        held = self.items[name]
        for version, (origin, _) in seen.items():
            for move in allowed:
                if held.origins.get(version) != origin and move.target == version:
                    self.moved(name, move)
        assert {version: origin for version, (origin, _) in seen.items()} == held.origins, (
            f"{name} holds something else"
        )
        for version, (_, vector) in seen.items():
            np.testing.assert_allclose(vector, held.vectors[version], atol=1e-5, err_msg=f"{name} by {version}")

    def _see_backfill(self, sight: Sight, lately: Move | None) -> None:
        assert len(sight.backfills) == self.backfills
        if not sight.backfills:
            return
        newest = sight.backfills[-1]
        if (self.backfill, newest.state) == ("running", "done"):
            assert self.move is not None
            left = [name for name in set(self.items) - self.written if self.may_move(name, self.move)]
            assert self.capped or not left, f"the backfill is done, but not for {left}"
            self.backfill = "done"
        if lately and (self.backfill, newest.state) == ("cancelled", "done"):
            self.backfill = "done"  # just before what would have ended it
        assert newest.state == self.backfill

    # Queries

    def by_picture(self, number: int, asking: str | None = None) -> tuple[dict[str, Expected], dict[str, int]]:
        """Item -> expected match of a query by an image; and version -> number of items that it cannot reach."""
        return self.ranking(asking or self.current, lambda version: self.world.encode(version, number))

    def by_embedding(self, version: str, vector: np.ndarray) -> tuple[dict[str, Expected], dict[str, int]]:
        return self.ranking(version, lambda _: vector, frozenset())

    def by_item(self, name: str) -> tuple[dict[str, Expected], dict[str, int]]:
        """As `by_picture`, for a stored item as query: by the current version if possible, from embedding or image."""
        held = self.items[name]
        able = frozenset(held.vectors) | (self.world.everyone if held.picture is not None else frozenset())
        asking = self.current if self.current in able else self.active(name)

        def embed(version: str) -> np.ndarray:
            if version in held.vectors:
                return held.vectors[version]
            assert held.picture is not None
            return self.world.encode(version, held.picture)

        return self.ranking(asking, embed, able)

    def ranking(
        self, asking: str, embed: Embed, able: frozenset[str] | None = None
    ) -> tuple[dict[str, Expected], dict[str, int]]:
        found: dict[str, Expected] = {}
        lost: Counter[str] = Counter()
        for name, held in self.items.items():
            version = self.active(name)
            route = self.world.route(asking, version, able)
            if route is None:
                lost[version] += 1
                continue
            query = embed(route.encoders[0])
            for edge in route.edges:
                query = query if edge.kind is EdgeKind.DUAL else self.world.apply(edge, query)
            score = float(query.astype(np.float64) @ held.vectors[version].astype(np.float64))
            found[name] = Expected(version, held.origins[version], route.kinds, score, held.metadata)
        return found, dict(lost)
