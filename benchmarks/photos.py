"""Accuracy of the encoders for photos, old, new and across versions, against baselines without training.

    python benchmarks/photos.py ROOT --queries 10 --items 20

ROOT is the training data of their recipes (training/recipes/photos.py). Of every class in ROOT/test the first QUERIES
images by name are queries, the next ITEMS are the items. Everything runs as in serving: exported encoders, the edge of
the new version. Queries are counted separately by whether the trainings of the two versions knew their class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from command_line import Count, run_main
from numpy.typing import NDArray
from PIL import Image

from index.edges.transform import load_transform
from index.encoders.encoder import Encoder
from index.evaluation.metrics import Retrieval, mean_interval, paired_bootstrap, retrieval
from index.evaluation.scores import METRICS
from index.space import Cosine, Vectors
from index.version import Score
from index.version_folder.folder import load_version
from training.data.images import Data, ImageSet
from training.sources import load_data

OLD, NEW = Path("examples/photos-v1"), Path("examples/photos-v2")
TINY, LEVELS = 16, 4
BLOCK = 256


def main(root: Annotated[Path, typer.Argument(exists=True)], queries: Count = 10, items: Count = 20) -> None:
    data = sides(load_data("folders", str(root)), queries, items)
    old, new = Encoder(load_version(OLD)), load_version(NEW)
    cut = load_transform(next(edge for edge in new.edges if edge.old == old.card.name), new.card, old.card)
    encode = Encoder(new)
    old_QD, old_ND = both(data, lambda images: old.encode(images).vectors)
    new_QD, new_ND = both(data, lambda images: encode.encode(images).vectors)
    pairs = {
        f"raw pixels, {TINY} x {TINY}": both(data, thumbnails),
        f"colour histogram, {LEVELS**3} bins": both(data, histograms),
        "old/old": (old_QD, old_ND),
        "new/old": (cut(new_QD), old_ND),
        "new/new": (new_QD, new_ND),
    }
    measured = {name: measure(*pair, data) for name, pair in pairs.items()}
    print(f"{len(data.query)} queries, {len(data.gallery)} items, {len(data.names or ())} classes\n")
    for title, rows in groups(data, set(old.card.data["classes"]), set(new.card.data["classes"])).items():
        print(f"| {title} ({len(rows)} queries) | CMC-1 % | CMC-5 % | mAP % |\n| --- | --- | --- | --- |")
        for name, found in measured.items():
            print(f"| {name} | {' | '.join(show(score_of(found, metric, rows)) for metric in METRICS)} |")
        for better, worse in (("new/old", "old/old"), ("new/new", "old/old")):
            a, b = measured[better], measured[worse]
            gains = [paired_bootstrap(a.per_query(m)[rows], b.per_query(m)[rows]) for m in METRICS]
            print(f"| {better} - {worse}, points | {' | '.join(map(show, gains))} |")
        print()


def sides(data: Data, queries: int, items: int) -> Data:
    """The first images of each class ask, the next ones are asked."""
    labels = data.query.labels
    place = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        place[labels == label] = np.arange((labels == label).sum())
    query = data.query.take(np.flatnonzero(place < queries))
    gallery = data.query.take(np.flatnonzero((place >= queries) & (place < queries + items)))
    return Data(data.train, query, gallery, names=data.names)


def groups(data: Data, old: set[object], new: set[object]) -> dict[str, NDArray[np.int64]]:
    """Rows of the queries of all classes, and of those that both trainings, only the newer, and neither knew."""
    names = [data.name(int(label)) for label in data.query.labels]
    known = {
        "all classes": [True] * len(names),
        "classes known to both": [name in old for name in names],
        "classes known to the new version only": [name in new and name not in old for name in names],
        "classes known to neither": [name not in new and name not in old for name in names],
    }
    return {title: np.flatnonzero(among) for title, among in known.items() if any(among)}


def both(data: Data, embed: Callable[[Sequence[Image.Image]], Vectors]) -> tuple[Vectors, Vectors]:
    """Embeddings (Q, D) of the queries and (N, D) of the items."""
    return in_blocks(data.query, embed), in_blocks(data.gallery, embed)


def in_blocks(images: ImageSet, embed: Callable[[Sequence[Image.Image]], Vectors]) -> Vectors:
    """Embed a few images at a time."""
    starts = range(0, len(images), BLOCK)
    blocks = ([images.images[row] for row in range(s, min(s + BLOCK, len(images)))] for s in starts)
    return np.concatenate([embed(block) for block in blocks])


def thumbnails(images: Sequence[Image.Image]) -> Vectors:
    """Tiny images (Torralba 2008), their mean taken off: (N, 3 TINY^2), unit vectors."""
    pixels_NP = np.stack([np.asarray(one.convert("RGB").resize((TINY, TINY)), np.float32).ravel() for one in images])
    return unit(pixels_NP - pixels_NP.mean(axis=1, keepdims=True))


def histograms(images: Sequence[Image.Image]) -> Vectors:
    """Square roots of joint colour histograms (their product is the Bhattacharyya coefficient): (N, LEVELS^3)."""
    counted = []
    for one in images:
        level_P3 = np.asarray(one.convert("RGB"), np.int64).reshape(-1, 3) * LEVELS // 256
        counted.append(np.bincount(level_P3 @ [LEVELS**2, LEVELS, 1], minlength=LEVELS**3))
    return unit(np.sqrt(np.stack(counted).astype(np.float32)))


def unit(x_ND: Vectors) -> Vectors:
    """Rows of length one; a plain grey image has no direction of its own and gets the first."""
    length_N1 = np.linalg.norm(x_ND, axis=1, keepdims=True)
    x_ND[length_N1[:, 0] == 0, 0] = 1
    return np.asarray(x_ND / np.where(length_N1 == 0, 1, length_N1), np.float32)


def measure(queries_QD: Vectors, items_ND: Vectors, data: Data) -> Retrieval:
    """Every query over all items."""
    return retrieval(queries_QD, data.query.labels, items_ND, data.gallery.labels, Cosine())


def score_of(found: Retrieval, metric: str, rows: NDArray[np.int64]) -> Score:
    """A metric over some of the queries, with its interval."""
    return mean_interval(found.per_query(metric)[rows])


def show(score: Score) -> str:
    """In percent, with the interval."""
    return f"{100 * score.value:.1f} [{100 * score.low:.1f}, {100 * score.high:.1f}]"


if __name__ == "__main__":
    run_main(main)
