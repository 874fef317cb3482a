"""The operations of `sealed_run` while edges come and go, and filters choose what is listed, changed and found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from index.edges.graph import Graph
from index.version import EDGE, Edge, EdgeKind, Score
from naive_filters import holds
from staging.api.edges import zipped
from staging.inputs.builders import make_version
from staging.random_operations.model import Expected
from staging.random_operations.run import IDS, OWN
from staging.random_operations.sealed_run import SealedRun
from staging.random_operations.world import World

CHANGES: list[dict[str, Any]] = [
    {"n": 0},
    {"n": 1, "tags": ["red", "new"]},
    {"n": 2.0, "shop": {"city": "Bern"}},
    {"n": None, "shop": {"city": None, "open": True}},
    {"tags": ["red", ["old"]], "shop": {"city": ["Bern", "Basel"]}},
    {"tags": [], "shop": None},
]
"""Changes of metadata, as JSON Merge Patch."""
CONDITIONS: list[dict[str, Any]] = [
    {"field": "n", "eq": 2},
    {"field": "n", "in": [0, 1, "1", True]},
    {"field": "n", "range": {"gt": 0}},
    {"field": "n", "exists": False},
    {"field": "tags", "eq": "old"},
    {"field": "tags", "exists": True},
    {"field": "tags", "range": {"gte": "new", "lt": "red"}},
    {"field": "shop.city", "prefix": "B"},
    {"field": ["shop", "city"], "eq": "Basel"},
    {"field": "shop.open", "eq": True},
]
MOST_DELETED = 4
"""So that items are left; if more pass, the deletion is a dry run."""


class FilteredRun(SealedRun):
    """One life, with edges of its own: those of its versions, and three that may be added."""

    def __init__(self, world: World, data: Path, *given: Any) -> None:
        folder, (v1, _, v3, _) = data.parent / "edges", world.versions.values()
        more = [
            *make_version(folder / "v3", "v3", 6, drift=0.1, edges=[(v1, "truncate")]).edges,
            *make_version(folder / "v4", "v4", 5, seed=9, edges=[(v1, "matrix"), (v3, "onnx")]).edges,
        ]
        self.declared = {edge.key: edge for edge in (*world.graph.edges, *more)}
        super().__init__(world.with_own_edges(), data, *given)

    def draw_filter(self, depth: int = 2) -> dict[str, Any]:
        if not depth or self.draw.random() < 0.5:
            return self.draw.choice(CONDITIONS)
        parts = [self.draw_filter(depth - 1) for _ in range(2)]
        return self.draw.choice([{"and": parts}, {"or": parts}, {"not": parts[0]}])

    def passing(self, chosen: dict[str, Any]) -> list[str]:
        return [name for name, held in self.model.items.items() if holds(chosen, held.metadata)]

    def add_embeddings(self) -> None:
        """Add embeddings by any version to several items."""
        version, number = self.draw.choice(list(self.world.versions)), OWN + self.picture()
        vector = self.world.encode(version, number)
        names = [name for name in self.draw.sample(IDS, 5) if name in self.model.items]
        listed = [{"id": name, "embedding": vector.tolist()} for name in names]
        if listed:
            told = self.http.put("/galleries/g/items:embeddings", json={"version": version, "items": listed}).json()
            assert (told["stored"], told["failed"]) == (len(names), 0)
        for name in names:
            assert self.model.store_embedding(name, version, vector) is None

    # Metadata

    def describe(self) -> None:
        """Change the metadata of several items, each in its own way."""
        changes = {name: self.draw.choice(CHANGES) for name in self.draw.sample(IDS, 8) if name in self.model.items}
        if changes:
            listed = [{"id": name, "metadata": change} for name, change in changes.items()]
            told = self.http.patch("/galleries/g/items", json={"items": listed}).json()
            assert told == {"updated": len(changes), "failed": 0, "errors": []}
        for name, change in changes.items():
            self.model.patch(name, change)

    def patch_passing(self) -> None:
        """Change the metadata of all items that pass a filter, or count them."""
        chosen, change, dry_run = self.draw_filter(), self.draw.choice(CHANGES), self.draw.random() < 0.3
        names = self.passing(chosen)
        told = self.http.patch(
            "/galleries/g/items", json={"filter": chosen, "metadata": change}, params={"dry_run": dry_run}
        ).json()
        assert told == {"updated": len(names), "failed": 0, "errors": []}
        for name in names if not dry_run else []:
            self.model.patch(name, change)

    def delete_passing(self) -> None:
        chosen = self.draw_filter()
        names = self.passing(chosen)
        dry_run = len(names) > MOST_DELETED
        told = self.post(None, "/galleries/g/items:delete", dry_run, filter=chosen)
        assert told == {"deleted": len(names), "missing": []}
        for name in names if not dry_run else []:
            self.model.delete(name)
            self.counts["deleted by a filter"] += 1

    def list_passing(self) -> None:
        chosen, limit = self.draw_filter(), self.draw.randint(1, 5)
        found: list[str] = []
        cursor: dict[str, str] | None = {}
        while cursor is not None:
            body = {"filter": chosen, "limit": limit, **cursor}
            page = self.http.post("/galleries/g/items:list", json=body).json()
            found += [item["id"] for item in page["items"]]
            cursor = {"cursor": page["next"]} if page["next"] else None
        assert sorted(found) == sorted(self.passing(chosen))

    def ask_passing(self) -> None:
        """Query by an image with a filter; an index may miss some of the best, but returns as many."""
        number, k, chosen = self.draw.randint(0, 50), self.draw.randint(1, len(IDS)), self.draw_filter()
        exact = self.draw.random() < 0.6
        data = {"k": str(k), "mode": "raw", "exact": str(exact).lower(), "filter": json.dumps(chosen)}
        answer = self.http.post(
            "/galleries/g/query", data=data, files=[("images", ("q", self.world.as_bytes(number)))]
        ).json()
        found, _ = self.model.by_picture(number)
        self.compare(answer, {name: found[name] for name in self.passing(chosen)}, k, exact)

    def ask_by_item(self) -> None:
        """Query by a stored item with a filter; it does not find itself."""
        name, k, chosen = self.draw.choice(list(self.model.items)), self.draw.randint(1, len(IDS)), self.draw_filter()
        found, lost = self.model.by_item(name)
        body: dict[str, Any] = {"items": [name], "k": k, "mode": "raw", "exact": True, "filter": chosen}
        answer = self.post(None if found else "no_route", "/galleries/g/query", **body)
        if found:
            assert {one["version"]: one["items"] for one in answer["degraded"]} == lost
            self.compare(answer, {n: found[n] for n in self.passing(chosen) if n in found and n != name}, k, exact=True)

    def compare(self, answer: Any, expected: dict[str, Expected], k: int, exact: bool) -> None:
        """Check each match, and that the best `k` of the expected items are there."""
        matches = answer["results"][0]["matches"]
        assert len({match["id"] for match in matches}) == len(matches) == min(k, len(expected))
        for match in matches:
            one = expected[match["id"]]
            about = (match["version"], match["origin"], tuple(match["route"]), match["metadata"])
            assert about == (one.version, one.origin, one.kinds, one.metadata)
            assert match["score"] == pytest.approx(one.score, abs=1e-4)
        best = sorted((one.score for one in expected.values()), reverse=True)[:k]
        if exact:
            assert [match["score"] for match in matches] == pytest.approx(best, abs=1e-4)
        self.counts["found by a filter"] += len(matches)

    # Edges

    def connect(self) -> None:
        """Add an edge, or replace one, with another score; items may be served by other embeddings at once."""
        key, replacing = self.draw.choice(sorted(self.declared)), self.draw.random() < 0.7
        value = self.draw.randint(1, 999) / 1000
        edge = replace(self.declared[key], scores={"cmc@1": Score(value, value - 0.01, value + 0.01)})
        standing = self._standing()
        code = None
        if key in standing:
            code = "edge_in_use" if self._applied(edge) else None
            code = code if replacing else "edge_exists"
        data = {"new": edge.new, "old": edge.old, "replace": str(replacing).lower()}
        answer = self.http.post("/edges", data=data, files={"archive": ("edge.zip", archive(edge))})
        assert (answer.json()["code"] if answer.status_code >= 400 else None) == code, answer.text
        if code is None:
            self._connected({**standing, key: edge})

    def disconnect(self) -> None:
        """Remove an edge: `dual` reaches all items, so none is needed."""
        standing = self._standing()
        if not standing:
            return
        key = self.draw.choice(sorted(standing))
        code = "edge_in_use" if self._applied(standing[key]) else None
        answer = self.http.delete("/edges/" + "/".join(key), params={"confirm": key[2]})
        assert (answer.json()["code"] if answer.status_code >= 400 else None) == code, answer.text
        if code is None:
            self._connected({other: edge for other, edge in standing.items() if other != key})

    def _serving(self) -> set[tuple[str, str]]:
        return {(name, self.model.active(name)) for name in self.model.items}

    def _standing(self) -> dict[Any, Edge]:
        return {edge.key: edge for edge in self.world.graph.edges}

    def _applied(self, edge: Edge) -> bool:
        """Whether a backfill that runs or is paused applies it."""
        move = self.model.move if self.model.backfill in {"running", "paused"} else None
        return move is not None and (edge.kind, move.kind, move.target) == (EdgeKind.FORWARD, "transform", edge.new)

    def _connected(self, edges: dict[Any, Edge]) -> None:
        before = self._serving()
        self.world.graph = Graph(edges.values())
        self.counts["edges changed"] += 1
        self.counts["items moved by edges"] += len(before ^ self._serving()) // 2
        self._choose_anew()


def archive(edge: Edge) -> bytes:
    """The folder of an edge, with its scores, as a .zip."""
    assert edge.folder is not None
    files = {path.name: path.read_bytes() for path in edge.folder.iterdir() if path.name != EDGE}
    return zipped({**files, EDGE: json.dumps(edge.as_json()).encode()})


FILTERING = {
    "store_pictures": 3,
    "add_embeddings": 5,
    "describe": 5,
    "patch_passing": 2,
    "delete_passing": 2,
    "list_passing": 2,
    "ask_passing": 6,
    "ask_by_item": 3,
    "connect": 4,
    "disconnect": 4,
    "deploy": 3,
    "roll_back": 2,
    "upgrade": 3,
    "work": 5,
    "race": 2,
}
"""Operation -> weight, instead of those of `run`."""
