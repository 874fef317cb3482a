"""Random operations on a real server, compared after each with a plain model in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from index.encoder import Encoder
from index.image import decode_image
from index.transform import load_transform
from index.version import Version
from service.settings import Settings

STEPS = 60


@dataclass
class Model:
    """What a gallery should hold: id -> (version, vector, metadata, image or None)."""

    versions: dict[str, Version]
    current: str = "v1"
    items: dict[str, tuple[str, np.ndarray, dict[str, Any], bytes | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.encoders = {name: Encoder(version) for name, version in self.versions.items()}
        new, old = self.versions["v2"], self.versions["v1"]
        self.truncate = load_transform(new.edges[0], new.card, old.card)

    def encode(self, version: str, image: bytes) -> np.ndarray:
        return self.encoders[version].encode([decode_image(image)]).vectors[0]

    def scores(self, image: bytes) -> dict[str, float]:
        """The score of every item for a query image, by the route that should be taken."""
        by = {name: self.encode(name, image) for name in self.versions}
        # v2 reaches items of v1 by its edge; v1 reaches items of v2 only through v2's encoder.
        old = self.truncate(by["v2"][None])[0] if self.current == "v2" else by["v1"]
        query = {"v1": old, "v2": by["v2"]}
        return {name: float(query[version] @ vector) for name, (version, vector, _, _) in self.items.items()}


class Actions:
    """One method an operation; each acts on the server and on the model and compares what it is told."""

    def __init__(self, served: Any, model: Model, pictures: list[bytes], seed: int) -> None:
        self.served, self.model, self.pictures = served, model, pictures
        self.random = np.random.default_rng(seed)
        self.path = served.gallery("v1")

    def names(self, count: int) -> list[str]:
        return [f"i{n}" for n in self.random.integers(0, 25, count)]

    def ingest_images(self) -> None:
        names, atomic = self.names(self.random.integers(1, 6)), bool(self.random.random() < 0.3)
        chosen = [b"broken" if self.random.random() < 0.15 else self.pictures[self.random.integers(20)] for _ in names]
        items = [{"id": name, "metadata": {"n": n}, "image": f"{n}"} for n, name in enumerate(names)]
        files = [(f"{n}", image) for n, image in enumerate(chosen)]
        response = self.served.post_items(self.path, items, files, atomic=atomic)
        duplicate = {n for n, name in enumerate(names) if name in names[:n]}
        bad = duplicate | {n for n, image in enumerate(chosen) if image == b"broken"}
        self.check_ingest(response, len(names), bad, atomic)
        for n, name in enumerate(names):
            if response.status_code == 200 and n not in bad:
                vector = self.model.encode(self.model.current, chosen[n])
                self.model.items[name] = (self.model.current, vector, {"n": n}, chosen[n])

    def ingest_embeddings(self) -> None:
        names, version = self.names(self.random.integers(1, 6)), str(self.random.choice(["v1", "v2"]))
        dim = self.model.versions[version].card.dim
        vectors = [np.zeros(dim) if self.random.random() < 0.15 else self.random.normal(size=dim) for _ in names]
        listed = [{"id": name, "embedding": v.tolist()} for name, v in zip(names, vectors, strict=True)]
        response = self.served.http.post(f"{self.path}/items", json={"version": version, "items": listed})
        bad = {n for n, name in enumerate(names) if name in names[:n]} | {
            n for n, v in enumerate(vectors) if not v.any()
        }
        self.check_ingest(response, len(names), bad, False)
        for n, name in enumerate(names):
            if n not in bad:
                unit = (vectors[n] / np.linalg.norm(vectors[n])).astype(np.float32)
                self.model.items[name] = (version, unit, {}, None)

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
        assert status == (204 if self.model.items.pop(name, None) else 404)

    def delete_many(self) -> None:
        names = list(dict.fromkeys(self.names(4)))
        missing = [name for name in names if self.model.items.pop(name, None) is None]
        told = self.served.http.post(f"{self.path}/items:delete", json={"ids": names}).json()
        assert told == {"deleted": len(names) - len(missing), "missing": missing}

    def deploy(self) -> None:
        if self.model.current == "v2":
            assert self.served.http.post(f"{self.path}/rollback", json={}).status_code == 201
            self.model.current = "v1"
        else:
            assert self.served.http.post(f"{self.path}/deployments", json={"version": "v2"}).status_code == 201
            self.model.current = "v2"

    def query(self) -> None:
        image, k = self.pictures[self.random.integers(20)], int(self.random.integers(1, 30))
        response = self.served.query(self.path, image, k=k)
        if k > len(self.model.items):
            assert response.status_code == 422
            return
        assert response.status_code == 200, response.text
        expected = self.model.scores(image)
        answer = response.json()
        matches = answer["results"][0]["matches"]
        given = [match["score"] for match in matches]
        np.testing.assert_allclose(given, sorted(expected.values(), reverse=True)[:k], atol=1e-5)
        assert len({match["id"] for match in matches}) == k
        for match in matches:
            version, _, metadata, stored = self.model.items[match["id"]]
            assert match["score"] == pytest.approx(expected[match["id"]], abs=1e-5)
            origin = "supplied" if stored is None else "encoded"
            assert (match["version"], match["metadata"], match["origin"]) == (version, metadata, origin)
        assert (answer["version"], answer["degraded"]) == (self.model.current, [])

    def look(self) -> None:
        """Everything the service shows is everything the model holds."""
        shown = self.served.http.get(f"{self.path}/items", params={"limit": 1000}).json()["items"]
        assert {i["id"]: (i["active"], i["metadata"]) for i in shown} == {
            name: (version, metadata) for name, (version, _, metadata, _) in self.model.items.items()
        }
        gallery = self.served.http.get(self.path).json()
        held = [version for version, _, _, _ in self.model.items.values()]
        assert gallery["mix"] == {version: held.count(version) for version in set(held)}
        for name, (_, _, _, image) in list(self.model.items.items())[:3]:
            response = self.served.http.get(f"{self.path}/items/{name}/image")
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


@pytest.mark.parametrize("seed", range(4))
def test_the_service_behaves_like_the_model_also_after_a_restart(
    seed: int, tmp_path: Path, serving: Any, versions: dict[str, Version], pictures: list[bytes]
) -> None:
    settings = Settings(data=tmp_path)
    model = Model({name: versions[name] for name in ("v1", "v2")})
    kinds = list(WEIGHTS)
    chances = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    with serving(settings) as served:
        for version in model.versions.values():
            served.register(version)
        actions = Actions(served, model, pictures, seed)
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
