"""Versions trained here, in the real service with a real worker: HBCT in hyperbolic space, BT2, and FCT with
side-information, each before its items have moved and after, against brute force over the exported models."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from PIL import Image

from examples.demo.processes import Processes
from index.version_folder.folder import load_version
from regraft import Client
from regraft.client import ImageItem
from regraft.models import QueryMatches

pytestmark = pytest.mark.slow

ITEMS, QUERIES = 60, 12
OLD = {"hbct": "hyperbolic", "bt2": "v1", "fct": "v1_side"}
OPTIONS = {"fct": {"branch": 16, "trunk": 32}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every version, trained for two epochs."""
    from training.recipes import find_recipe
    from training.train import train

    place = tmp_path_factory.mktemp("trained")
    made: dict[str, Path] = {}
    recipes = {name: f"digits_{name}" for name in ("v1", "hyperbolic", "independent", "v1_side", "hbct", "bt2")}
    for name, recipe_name in {**recipes, "fct": "digits_fct_side"}.items():
        recipe = replace(find_recipe(recipe_name), epochs=2, warmup_epochs=0, side_epochs=2)
        old = str(made[OLD[name]]) if name in OLD else ""
        independent = str(made["independent"]) if recipe.independent else ""
        options = {**recipe.options, **OPTIONS.get(name, {})}
        made[name] = train(
            replace(recipe, old=old, independent=independent, options=options), place / name, progress=False
        )
    return made


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Iterator[Client]:
    with Processes(tmp_path_factory.mktemp("service")) as running, running.client() as client:
        for name in (*OLD.values(), *OLD):
            client.register_version(folders[name])
        yield client


@dataclass(frozen=True)
class Pictures:
    """8 x 8 grey images (N, 8, 8)."""

    pixels: np.ndarray

    def files(self) -> list[bytes]:
        return [png(image) for image in self.pixels]


def png(pixels: np.ndarray) -> bytes:
    with io.BytesIO() as out:
        Image.fromarray(pixels).save(out, "png")
        return out.getvalue()


@pytest.fixture(scope="module")
def pictures() -> tuple[Pictures, Pictures]:
    from training.data.digits import load_digits_split

    split = load_digits_split()
    return Pictures(split.query.images[:QUERIES]), Pictures(split.gallery.images[:ITEMS])


def run(model: Path, **given: np.ndarray) -> list[np.ndarray]:
    return ort.InferenceSession(model.read_bytes()).run(None, {name: x.astype(np.float32) for name, x in given.items()})


def embed(folder: Path, pictures: Pictures, model: str = "encoder.onnx") -> np.ndarray:
    spec = load_version(folder).card.preprocess
    assert spec is not None
    pixels = (pictures.pixels[:, None] / 255.0 - spec.mean[0]) / spec.std[0]
    return run(folder / model, images=pixels)[0].astype(np.float64)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def cost(name: str, queries: np.ndarray, items: np.ndarray) -> np.ndarray:
    """(Q, N), lower is better: minus the cosine, or the distance on the hyperboloid of curvature 1."""
    if name != "hbct":
        return -queries @ items.T
    times = [np.sqrt(1 + np.square(x).sum(1)) for x in (queries, items)]
    return np.arccosh(np.maximum(1.0, np.outer(*times) - queries @ items.T))


def before(name: str, folders: dict[str, Path], queries: Pictures, items: Pictures) -> np.ndarray:
    """What new queries should find of items that have not moved: along the edge; with FCT by the old encoder."""
    old_items = embed(folders[OLD[name]], items)
    if name == "fct":
        return cost(name, embed(folders[OLD[name]], queries), old_items)
    asked = embed(folders[name], queries)
    return cost(name, unit(asked[:, : old_items.shape[1]]) if name == "bt2" else asked, old_items)


def after(name: str, folders: dict[str, Path], queries: Pictures, items: Pictures) -> np.ndarray:
    """What they should find once all have: encoded anew; with FCT moved by h from what was stored."""
    if name != "fct":
        return cost(name, embed(folders[name], queries), embed(folders[name], items))
    old, edge = folders[OLD[name]], folders[name] / "edges" / OLD[name] / "edge.onnx"
    moved, _ = run(edge, embedding=embed(old, items), side=embed(old, items, "side.onnx"))
    return cost(name, embed(folders[name], queries), unit(moved.astype(np.float64)))


def same_ranking(results: list[QueryMatches], costs: np.ndarray) -> None:
    """Every item, best first; two whose costs are equal up to rounding may change places."""
    for result, cost_N in zip(results, costs, strict=True):
        found = [int(match.id) for match in result.matches]
        assert sorted(found) == list(range(ITEMS))
        np.testing.assert_allclose(cost_N[found], np.sort(cost_N), atol=2e-5)


@pytest.mark.parametrize("name", list(OLD))
def test_a_trained_version_answers_as_brute_force_over_its_exported_models_does(
    name: str, client: Client, folders: dict[str, Path], pictures: tuple[Pictures, Pictures]
) -> None:
    queries, items = pictures
    old, asked = OLD[name], queries.files()
    client.create_gallery(name)
    client.deploy(name, old)
    assert client.ingest(name, [ImageItem(str(n), image) for n, image in enumerate(items.files())]).failed == 0
    same_ranking(
        client.query(name, asked, ITEMS).results,
        cost(name, embed(folders[old], queries), embed(folders[old], items)),
    )

    client.deploy(name, name)
    mixed = client.query(name, asked, ITEMS, strict=True)
    assert {match.version for match in mixed.results[0].matches} == {old}
    same_ranking(mixed.results, before(name, folders, queries, items))

    job = client.start_backfill(name, kind="transform" if name == "fct" else "reencode").id
    deadline = time.monotonic() + 60
    while client.backfill(job).state not in {"done", "failed", "cancelled"}:
        assert time.monotonic() < deadline, client.backfill(job)
        time.sleep(0.05)
    assert client.backfill(job).state == "done"
    answer = client.query(name, asked, ITEMS, strict=True)
    found = answer.results[0].matches[0]
    assert (found.version, found.origin) == (name, "transformed" if name == "fct" else "encoded")
    same_ranking(answer.results, after(name, folders, queries, items))
