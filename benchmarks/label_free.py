"""What a calibration without labels is worth: backfill curves by raw scores, by `index.chance` and by labelled maps.

    python -m benchmarks.label_free

Digits (ten classes, so one random pair in ten is right), the example versions and two edges fitted here. Each figure is
the area under CMC-1 while items move, mean of five random orders. The labelled maps have seen the queries they are
measured on, so they are a bound and no competitor.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from index.chance import fit_chance
from index.evaluation import Compared, comparable, costs
from index.folder import load_version
from index.ordering import POINTS
from index.version import Version
from training.crossing import Crossings
from training.curves import Matching, backfill_values, fit_map
from training.data import Arrays, Data, ImageSet
from training.digits import Digits, load_digits_split
from training.fit_edge import fit_edge
from training.matrix import match
from training.pairs import embed_pairs
from training.sides import embed_sides

Floats = NDArray[np.float64]

PAIRS, ORDERS = 20_000, 5
EXAMPLES = Path(__file__).parent.parent / "examples"


def main() -> None:
    """Print one line a way to upgrade."""
    split = load_digits_split()
    data = Data(_images(split.new_train), _images(split.query), _images(split.gallery), False, None, 0)
    matching = match(data)
    print(f"{'upgrade':24}{'old':>8}{'new':>8}{'raw':>9}{'chance':>9}{'labelled':>9}")
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 900 pairs are few
        for name, old, new in upgrades(data, Path(root)):
            crossings = Crossings({version.name: embed_sides(version, data) for version in (old, new)})
            before, after = crossings.unmoved(new.name, old.name).compared, crossings.reencoded(new.name)
            raw, chance, labelled = areas((before, after), matching)
            print(f"{name:24}{raw[0]:8.3f}{raw[-1]:8.3f}{raw.mean():9.4f}{chance.mean():9.4f}{labelled.mean():9.4f}")


def upgrades(data: Data, root: Path) -> Iterator[tuple[str, Version, Version]]:
    """Name, old and new version: the examples as they are, then unrelated versions joined by a fitted edge."""
    old = load_version(EXAMPLES / "v1")
    for name in ("v2-bct", "v2-oca", "v2-fct"):
        yield name, old, load_version(EXAMPLES / name)
    for kind in ("procrustes", "slerp"):
        shutil.copytree(EXAMPLES / "v2-fct", root / kind)
        new = load_version(root / kind)
        fit_edge(old, new, embed_pairs(data, old, new), kind, overwrite=True)
        yield f"v2-fct by {kind}", old, load_version(root / kind)


def areas(ways: Sequence[Compared], matching: Matching) -> list[Floats]:
    """The curve of each way to score, (POINTS,)."""
    scores = [_scores(way) for way in ways]
    items = scores[0].shape[1]
    draw = np.random.default_rng(1)
    better = [way.space.higher_is_better for way in ways]
    by_chance = [
        fit_chance(draw.choice(table.ravel(), PAIRS), items, higher_is_better=higher)
        for table, higher in zip(scores, better, strict=True)
    ]
    by_label = [fit_map(way, matching, np.arange(len(scores[0]))) for way in ways]
    return [
        _curve([-table if higher else table for table, higher in zip(scores, better, strict=True)], matching),
        _curve([-fitted.log_odds(table) for fitted, table in zip(by_chance, scores, strict=True)], matching),
        _curve([-fitted.log_odds(table) for fitted, table in zip(by_label, scores, strict=True)], matching),
    ]


def _scores(way: Compared) -> Floats:
    table = costs(*comparable(way), way.space)
    return way.space.score(-table if way.space.inner_product else table).astype(np.float64)


def _curve(tables: Sequence[Floats], matching: Matching) -> Floats:
    orders = [np.random.default_rng(seed).permutation(tables[0].shape[1]) for seed in range(ORDERS)]
    relevant = matching.relevant(slice(None))
    curves = [backfill_values(tables[0], tables[1], relevant, order, "cmc@1", POINTS).mean(axis=1) for order in orders]
    return np.asarray(np.mean(curves, axis=0))


def _images(part: Digits) -> ImageSet:
    return ImageSet(Arrays(part.images), part.labels)


if __name__ == "__main__":
    main()
