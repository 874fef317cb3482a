"""Backfill curves in every merge mode: accuracy while the items of a gallery move, as one table per data set.

    python benchmarks/backfill_curves.py digits --versions runs/digits
    python benchmarks/backfill_curves.py omniglot --root FOLDER --versions runs/omniglot/seed0

The versions are those of a run of benchmarks/compatibility.py (one seed's folder); cases without their versions are
left out. For digits, which take seconds, missing versions are trained. `procrustes` and `slerp` are edges fitted here
from the independent version to the old one, on at most 4,000 training images. They are written to copies of the
versions; the folder stays unchanged.

Measured at 0, 5, ... 100 % of the items moved, mean of three random orders, on a subset: the items and queries of 100
random classes, at most 2,000 and 500 of them, no image on both sides. Modes: `raw`, `rank` (reciprocal rank fusion),
`calibrated` (maps fitted with labels on one half of the queries rank the other half) and `label-free` (maps of
`evalue_calibration`, same halves, no labels). Kinds of backfill: items are re-encoded or, `fct by h`, moved by FCT's
forward transform. In both, queries reach unmoved FCT items by `dual`.

First table: the area under the curve, in percent, and its paired difference to `raw`. Second: the lowest point of the
curve minus old/old, in points; a negative value is a dip (inevitable if new/old starts below old/old). Intervals are 95
% percentile bootstraps over queries, 1,000 resamples; each resample finds its own lowest point. A calibration should
have no dip beyond its interval, and the largest area: "yes" if both hold, "tied" if a mode has a larger area within the
interval of the difference, else "no" and why. Label-free maps are compared only with raw and rank.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from command_line import Root, choice_of, run_main
from numpy.typing import NDArray

from index.evaluation.curves import CALIBRATED, LABEL_FREE, RANK, RAW, curve_values
from index.evaluation.metrics import MEAN_AP, Compared, paired_bootstrap
from index.evaluation.ordering import PendingItems, backfill_order
from index.evaluation.relevance import LabelRelevance
from index.version import CARD, Score, Version
from index.version_folder.folder import load_version
from training.adapters.fit_edge import fit_edge
from training.adapters.pairs import embed_pairs
from training.data.images import Data, ImageSet
from training.evaluation.cross_version import CrossVersions
from training.evaluation.embeddings import embed_version
from training.evaluation.matrix import relevance_of
from training.overrides import with_overrides
from training.recipes import FAMILIES, find_recipe
from training.train import recipe_data, train

Floats = NDArray[np.float64]

ROUNDING = 1e-9
CLASSES, ITEMS, QUERIES, PAIRS, ORDERS = 100, 2_000, 500, 4_000, 3
MODES = (RAW, RANK, CALIBRATED, LABEL_FREE)
METRICS = ("cmc@1", MEAN_AP)
FITTED = ("procrustes", "slerp")
DIGITS = {
    "v1": "digits_v1",
    "side_v1": "digits_v1_side",
    "hyperbolic_v1": "digits_hyperbolic",
    "independent": "digits_independent",
    "bct": "digits_bct",
    "oca": "digits_oca",
    "fct": "digits_fct_side",
    "hbct": "digits_hbct",
}
"""The parts of a family, as digits' recipes call them; first what others need."""
OLD_OF = {"fct": "side_v1", "hbct": "hyperbolic_v1"}


@dataclass(frozen=True)
class Case:
    """One way to upgrade, and to move items.

    Attributes:
        name: what the table calls it.
        ground: queries and items of the old version.
        before, after: how new queries meet items that have not moved, and that have.
    """

    name: str
    ground: Compared
    before: Compared
    after: Compared


@dataclass(frozen=True)
class Measured:
    """A case by one metric.

    Attributes:
        ground: (V,) old/old of each valid query.
        curves: mode -> (P, V) the values while items move.
    """

    ground: Floats
    curves: Mapping[str, Floats]

    def area(self, mode: str) -> Floats:
        """(V,) the area under the curve of each query."""
        points_P = np.linspace(0, 1, len(self.curves[mode]))
        return np.asarray(np.trapezoid(self.curves[mode], points_P, axis=0))

    def gain(self, mode: str, over: str) -> Score:
        """The paired difference of two areas."""
        return paired_bootstrap(self.area(mode), self.area(over))

    def lowest(self, mode: str) -> Score:
        """The curve's lowest point minus old/old."""
        return lowest_point(self.curves[mode] - self.ground)

    def aim(self, mode: str) -> str:
        """Whether the aim holds; a mode with labels is also held against the one without."""
        others = [other for other in MODES if other != mode and (mode == CALIBRATED or other != CALIBRATED)]
        gains = [self.gain(mode, other) for other in others]
        why = ["dips"] * (self.lowest(mode).high < -ROUNDING) + ["smaller"] * any(gain.high < 0 for gain in gains)
        return "no: " + ", ".join(why) if why else "yes" if all(gain.value >= 0 for gain in gains) else "tied"


def main(
    family: Annotated[str, typer.Argument(parser=choice_of(("digits", *FAMILIES)))],
    versions: Annotated[Path, typer.Option(help="Folder of the trained versions.")],
    root: Root = None,
    data: Annotated[str, typer.Option(help="Source of the data, where it is not the recipe's.")] = "",
) -> None:
    folders = {part: versions / name for part, name in names(family).items()}
    if family == "digits":
        train_digits(versions)
    settings = [f"{field}={value}" for field, value in (("root", root), ("data", data)) if value]
    images = subset(recipe_data(with_overrides(find_recipe(names(family)["independent"]), settings)))
    print(
        f"{len(images.query)} queries, {len(images.gallery)} items, {len(np.unique(images.gallery.labels))} classes\n"
    )
    relevance = relevance_of(images)
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # digits has few pairs to fit an edge on
        found = {
            (case.name, metric): measure(case, relevance, metric)
            for case in cases(folders, images, Path(scratch))
            for metric in METRICS
        }
    print("\n".join([*areas_table(found), "", *dips_table(found)]))


def names(family: str) -> Mapping[str, str]:
    """Part -> name of its version."""
    return DIGITS if family == "digits" else {part: f"{family}_{part}" for part in DIGITS}


def train_digits(folder: Path) -> None:
    """Train the digits' versions that are not there."""
    for part, name in DIGITS.items():
        references = {"old": DIGITS[OLD_OF.get(part, "v1")], "independent": DIGITS["independent"]}
        recipe = find_recipe(name)
        here = [f"{field}={folder / other}" for field, other in references.items() if getattr(recipe, field)]
        if not (folder / name / CARD).is_file():
            train(with_overrides(recipe, here), folder / name, progress=False)


def subset(data: Data, seed: int = 0) -> Data:
    """Queries and items of CLASSES classes, and PAIRS training images."""
    generator = np.random.default_rng(seed)
    classes = np.unique(data.gallery.labels)
    classes = generator.choice(classes, min(CLASSES, len(classes)), replace=False)

    def of_classes(images: ImageSet) -> ImageSet:
        return images.take(generator.permutation(np.flatnonzero(np.isin(images.labels, classes))))

    if data.same:
        images = of_classes(data.gallery)
        query, gallery = images.take(np.arange(QUERIES)), images.take(np.arange(QUERIES, len(images))[:ITEMS])
    else:
        query, gallery = of_classes(data.query), of_classes(data.gallery)
        query, gallery = query.take(np.arange(len(query))[:QUERIES]), gallery.take(np.arange(len(gallery))[:ITEMS])
    fitting = data.train.take(generator.permutation(len(data.train))[:PAIRS])
    return replace(data, train=fitting, query=query, gallery=gallery, same=False)


def cases(folders: Mapping[str, Path], data: Data, root: Path) -> Iterator[Case]:
    """Every case whose versions are there."""
    for part in ("bct", "oca", "fct", "hbct"):
        new, old = folders[part], folders[OLD_OF.get(part, "v1")]
        if (new / CARD).is_file() and (old / CARD).is_file():
            yield from ways(part, load_version(old), load_version(new), data)
    if (folders["independent"] / CARD).is_file():
        old_version = load_version(folders["v1"])
        for kind in FITTED:
            copy = root / kind / folders["independent"].name
            shutil.copytree(folders["independent"], copy)
            new_version = load_version(copy)
            fit_edge(old_version, new_version, embed_pairs(data, old_version, new_version), kind)
            yield from ways(kind, old_version, load_version(copy), data)


def ways(name: str, old: Version, new: Version, data: Data) -> Iterator[Case]:
    """The ways to move items from one version to another."""
    cross_versions = CrossVersions({version.name: embed_version(version, data) for version in (old, new)})
    ground, before = cross_versions.reencoded(old.name), cross_versions.unmoved(new.name, old.name).compared
    yield Case(name, ground, before, cross_versions.reencoded(new.name))
    moved = cross_versions.transformed(new.name, old.name)
    if moved is not None:
        yield Case(f"{name} by h", ground, before, moved.compared)


def measure(case: Case, relevance: LabelRelevance, metric: str) -> Measured:
    """Old/old and the curves of every mode, mean over the orders."""
    waiting = np.arange(len(relevance.item_codes))
    orders = {str(seed): backfill_order("random", PendingItems(waiting, seed=seed)) for seed in range(ORDERS)}
    alone = curve_values(case.ground, case.ground, relevance, {"": waiting}, [RAW], metric=metric, points=2)
    values = curve_values(case.before, case.after, relevance, orders, MODES, metric=metric)
    curves = {mode: np.asarray(np.mean([values[order, mode] for order in orders], axis=0)) for mode in MODES}
    return Measured(alone["", RAW][0], curves)


def lowest_point(above_PV: Floats, resamples: int = 1000) -> Score:
    """The lowest mean over queries of any point, and its interval over resamples that each look for their own."""
    queries = above_PV.shape[1]
    weight_RV = np.random.default_rng(0).multinomial(queries, np.full(queries, 1 / queries), resamples) / queries
    low, high = np.quantile((weight_RV @ above_PV.T).min(axis=1), [0.025, 0.975])
    return Score(float(above_PV.mean(axis=1).min()), float(low), float(high))


def areas_table(found: Mapping[tuple[str, str], Measured]) -> Iterator[str]:
    """Where each curve starts and ends, its area, and what that is above raw."""
    yield from header("case", "metric", "old/old", "0 %", "100 %", *MODES, *(f"{mode} - raw" for mode in MODES[1:]))
    for (case, metric), one in found.items():
        levels = [one.ground, one.curves[RAW][0], one.curves[RAW][-1], *(one.area(mode) for mode in MODES)]
        gains = (points(one.gain(mode, RAW)) for mode in MODES[1:])
        yield row([case, metric, *(f"{100 * level.mean():.1f}" for level in levels), *gains])


def dips_table(found: Mapping[tuple[str, str], Measured]) -> Iterator[str]:
    """The lowest point of each curve below or above old/old, and for which modes the aim holds."""
    yield from header("case", "metric", *MODES, f"aim, {CALIBRATED}", f"aim, {LABEL_FREE}")
    for (case, metric), one in found.items():
        lowest = [points(one.lowest(mode)) for mode in MODES]
        yield row([case, metric, *lowest, *(one.aim(mode) for mode in (CALIBRATED, LABEL_FREE))])


def header(*cells: str) -> Iterator[str]:
    yield row(cells)
    yield row(["---"] * len(cells))


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def points(score: Score) -> str:
    """A difference in points of percent."""
    value, low, high = (round(100 * x, 1) + 0.0 for x in (score.value, score.low, score.high))  # + 0.0: no "-0.0"
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


if __name__ == "__main__":
    run_main(main)
