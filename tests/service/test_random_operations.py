"""Random operations on a real server, compared after each with a plain model in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.version import Version
from service.settings import Settings
from staging.galleries import Model
from staging.world import World

STEPS = 60
PICTURES = 20


class Actions:
    """One method an operation; each acts on the server and on the model and compares what it is told."""

    def __init__(self, served: Any, world: World, seed: int) -> None:
        self.served, self.model = served, Model(world)
        self.random = np.random.default_rng(seed)
        self.path = served.gallery("v1")
        self.model.begin("v1")
        self.pictures = [world.as_bytes(number) for number in range(PICTURES)]

    def names(self, count: int) -> list[str]:
        return [f"i{n}" for n in self.random.integers(0, 25, count)]

    def ingest_images(self) -> None:
        names, atomic = self.names(self.random.integers(1, 6)), bool(self.random.random() < 0.3)
        chosen = [None if self.random.random() < 0.15 else int(self.random.integers(PICTURES)) for _ in names]
        items = [{"id": name, "metadata": {"n": n}, "image": f"{n}"} for n, name in enumerate(names)]
        files = [(f"{n}", b"broken" if number is None else self.pictures[number]) for n, number in enumerate(chosen)]
        response = self.served.post_items(self.path, items, files, atomic=atomic)
        duplicate = {n for n, name in enumerate(names) if name in names[:n]}
        bad = duplicate | {n for n, number in enumerate(chosen) if number is None}
        self.check_ingest(response, len(names), bad, atomic)
        for n, name in enumerate(names):
            if response.status_code == 200 and n not in bad:
                self.model.store_picture(name, chosen[n], {"n": n})

    def ingest_embeddings(self) -> None:
        names, version = self.names(self.random.integers(1, 6)), str(self.random.choice(["v1", "v2"]))
        dim = self.model.world.versions[version].card.dim
        vectors = [np.zeros(dim) if self.random.random() < 0.15 else self.random.normal(size=dim) for _ in names]
        listed = [{"id": name, "embedding": v.tolist()} for name, v in zip(names, vectors, strict=True)]
        about = {"e": int(self.random.integers(9))} if self.random.random() < 0.5 else None
        listed = [item if about is None else {**item, "metadata": about} for item in listed]
        response = self.served.http.post(f"{self.path}/items", json={"version": version, "items": listed})
        bad = {n for n, name in enumerate(names) if name in names[:n]} | {
            n for n, v in enumerate(vectors) if not v.any()
        }
        self.check_ingest(response, len(names), bad, False)
        for n, name in enumerate(names):
            if n not in bad:
                unit = (vectors[n] / np.linalg.norm(vectors[n])).astype(np.float32)
                self.model.store_embedding(name, version, unit, about)

    def check_ingest(self, response: Any, size: int, bad: set[int], atomic: bool) -> None:
        told = response.json()
        assert {e["index"] for e in told["errors"]} == bad
        if len(bad) == size or (atomic and bad):
            assert response.status_code == 422
        else:
            assert (response.status_code, told["stored"], told["failed"]) == (200, size - len(bad), len(bad))

    def delete(self) -> None:
        (name,) = self.names(1)
        status = self.served.http.delete(f"{self.path}/items/{name}").status_code
        assert status == (204 if self.model.delete(name) is None else 404)

    def delete_many(self) -> None:
        names = list(dict.fromkeys(self.names(4)))
        missing = [name for name in names if self.model.delete(name) is not None]
        told = self.served.http.post(f"{self.path}/items:delete", json={"ids": names}).json()
        assert told == {"deleted": len(names) - len(missing), "missing": missing}

    def deploy(self) -> None:
        if self.model.current == "v2":
            assert self.served.http.post(f"{self.path}/rollback", json={}).status_code == 201
            self.model.rollback()
        else:
            assert self.served.http.post(f"{self.path}/deployments", json={"version": "v2"}).status_code == 201
            self.model.begin("v2")

    def query(self) -> None:
        number, k = int(self.random.integers(PICTURES)), int(self.random.integers(1, 30))
        response = self.served.query(self.path, self.pictures[number], k=k)
        assert response.status_code == 200, response.text
        expected, _ = self.model.by_picture(number)
        best = sorted((found.score for found in expected.values()), reverse=True)[:k]
        answer = response.json()
        matches = answer["results"][0]["matches"]
        given = [match["score"] for match in matches]
        np.testing.assert_allclose(given, best, atol=1e-5)
        assert len({match["id"] for match in matches}) == min(k, len(self.model.items))
        for match in matches:
            found = expected[match["id"]]
            assert match["score"] == pytest.approx(found.score, abs=1e-5)
            assert (match["version"], match["metadata"], match["origin"]) == (
                found.version,
                found.metadata,
                found.origin,
            )
        assert (answer["version"], answer["degraded"]) == (self.model.current, [])

    def look(self) -> None:
        """Everything the service shows is everything the model holds."""
        shown = self.served.http.get(f"{self.path}/items", params={"limit": 1000}).json()["items"]
        assert {i["id"]: (i["active"], i["metadata"]) for i in shown} == {
            name: (self.model.active(name), held.metadata) for name, held in self.model.items.items()
        }
        gallery = self.served.http.get(self.path).json()
        assert gallery["mix"] == self.model.mix()
        for name, held in list(self.model.items.items())[:3]:
            response = self.served.http.get(f"{self.path}/items/{name}/image")
            image = None if held.picture is None else self.pictures[held.picture]
            assert (response.content if image else response.status_code) == (image or 404)


WEIGHTS = {
    Actions.ingest_images: 5,
    Actions.ingest_embeddings: 3,
    Actions.delete: 3,
    Actions.delete_many: 1,
    Actions.deploy: 1,
    Actions.query: 6,
    Actions.look: 2,
}


@pytest.fixture(scope="module")
def world(versions: dict[str, Version], make_image: Callable[..., Any], image_bytes: Callable[..., bytes]) -> World:
    """v2 reaches items of v1 by its edge; v1 reaches items of v2 only through v2's encoder."""
    return World([versions["v1"], versions["v2"]], lambda number: make_image(number % 5, number), image_bytes)


@pytest.mark.parametrize("seed", range(4))
def test_the_service_behaves_like_the_model_also_after_a_restart(
    seed: int, tmp_path: Path, serving: Any, world: World
) -> None:
    settings = Settings(data=tmp_path)
    kinds = list(WEIGHTS)
    chances = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    with serving(settings) as served:
        for version in world.versions.values():
            served.register(version)
        actions = Actions(served, world, seed)
        run(actions, kinds, chances)
    with serving(settings) as served:
        actions.served = served
        actions.look()
        run(actions, kinds, chances)


def run(actions: Actions, kinds: list[Callable[[Actions], None]], chances: np.ndarray) -> None:
    for number in actions.random.choice(len(kinds), STEPS, p=chances):
        kinds[number](actions)
    actions.query()
    actions.look()
