"""Every method on one data set over several seeds, as a table to put beside the papers'.

    python benchmarks/compatibility.py omniglot --root FOLDER --seeds 3 --out runs/omniglot

trains what OUT/seed<N>/ does not hold yet, one version after the other, measures it, and prints a markdown table. Stop
it at any time: the same command goes on. A recipe's settings can be changed for all versions by --set, as in `regraft
train`; --methods leaves some out; --table only prints what is there.

Seed N adds 10 N to the seed of every recipe of the family, so that every method of a seed has the same old version. A
value is the mean over seeds; its interval is the 95 % percentile bootstrap over queries, each query's value being its
mean over seeds; "sd" is the standard deviation over seeds of new/old CMC-1. HBCT stands beside hyperbolic references.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from index.evaluation.metrics import MEAN_AP, Retrieval, mean_interval, p_com, p_up, paired_bootstrap
from index.version import CARD, Score
from training.data import Data
from training.evaluate import compare, embed_both, measure
from training.overrides import with_overrides
from training.recipes import FAMILIES, Recipe
from training.recipes.family import FIRSTS, HOW, Family
from training.train import recipe_data, train
from training.trained import Trained

PAIRS = ("old/old", "new/old", "new/new")
METRICS = ("cmc@1", MEAN_AP)
GAINS = ("new/old - old/old, CMC-1", "the same, mAP")
COLUMNS = ("method", *PAIRS, *GAINS, "P_com", "P_up", "flips", "seeds", "sd", "training, s")

PerQuery = dict[str, NDArray[np.float64]]
""" "<pair> <metric>" -> (Q,) values of the queries that have an item to find."""


@dataclass(frozen=True)
class Sets:
    """Images read and decoded once for all versions that train on the same ones.

    Args:
        read: what decides a recipe's images -> the images.
    """

    read: dict[tuple[object, ...], Data]

    def of(self, recipe: Recipe) -> Data:
        """The recipe's images."""
        fields = ("data", "root", "unreadable", "classes", "class_share", "fraction", "split_seed")
        key = tuple(getattr(recipe, field) for field in fields)
        if key not in self.read:
            self.read[key] = recipe_data(recipe)
        return self.read[key]


@dataclass(frozen=True)
class Run:
    """One seed of a family.

    Args:
        family: which.
        seed: which.
        folder: where its versions are.
        settings: changes of every recipe, field=value.
    """

    family: Family
    seed: int
    folder: Path
    settings: Sequence[str]

    def recipe(self, part: str) -> Recipe:
        """A recipe of the family with this run's seed, its references being this run's versions."""
        recipe = with_overrides(self.family.recipe(part), self.settings)
        references = {"old": recipe.old, "independent": recipe.independent}
        here = [f"{field}={self.folder / name}" for field, name in references.items() if name]
        return with_overrides(recipe, [f"seed={recipe.seed + 10 * self.seed}", *here])

    def version(self, part: str) -> Path:
        """Folder of a version."""
        return self.folder / self.family.recipe(part).name

    def note(self, part: str) -> Path:
        """The file that says how a version was trained."""
        return self.version(part).with_suffix(".json")

    def measured(self, part: str) -> Path:
        """The file of a version's measurements."""
        return self.version(part).with_suffix(".npz")

    def train(self, part: str, sets: Sets) -> None:
        """Train a version unless the one that is there came of this recipe and these references."""
        recipe, out = self.recipe(part), self.version(part)
        cards = [Path(folder) / CARD for folder in (recipe.old, recipe.independent) if folder]
        made_of = {
            "recipe": recipe.as_json(),
            "references": [hashlib.sha256(card.read_bytes()).hexdigest() for card in cards],
        }
        if self.note(part).is_file():
            note = json.loads(self.note(part).read_text())
            if (out / CARD).is_file() and note["made_of"] == made_of:
                return
        self.measured(part).unlink(missing_ok=True)
        print(f"seed {self.seed}: training {out.name}", flush=True)
        start = time.perf_counter()
        train(recipe, out, progress=False, data=sets.of(recipe))
        note = {"seconds": round(time.perf_counter() - start, 1), "made_of": made_of}
        self.note(part).write_text(json.dumps(note, indent=1))

    def measure(self, part: str, sets: Sets) -> None:
        """Measure a version beside its old one, unless that was done."""
        if self.measured(part).is_file():
            return
        data = sets.of(self.recipe(part))
        new, old = (Trained.load(self.version(name)) for name in (part, old_of(part)))
        report = measure(new, old, data)
        rows = dict(report.rows())
        if report.new_old is None and new.dim == old.dim:
            # No edge: what comes of comparing all the same.
            rows["new/old"] = compare(embed_both(new, data)[0], embed_both(old, data)[1], data, old.recipe.space)
        values: dict[str, Any] = {name: x for pair, found in rows.items() for name, x in per_query(pair, found)}
        np.savez(self.measured(part), **values)

    def results(self, part: str) -> PerQuery | None:
        """What was measured; None before it is."""
        if not self.measured(part).is_file():
            return None
        with np.load(self.measured(part)) as held:
            return {name: held[name] for name in held.files}

    def seconds(self, part: str) -> float:
        """How long the training took, with its measurement and export."""
        return float(json.loads(self.note(part).read_text())["seconds"])


def main() -> None:
    arguments = parse()
    family = FAMILIES[arguments.family]
    settings = [*([f"root={arguments.root}"] if arguments.root else []), *arguments.set]
    runs = [Run(family, seed, arguments.out / f"seed{seed}", settings) for seed in range(arguments.seeds)]
    parts = [*FIRSTS, *(arguments.methods or HOW)]
    sets = Sets({})
    for run in [] if arguments.table else runs:
        for part in parts:
            run.train(part, sets)
            run.measure(part, sets)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for part in parts:
        if not part.endswith("v1"):
            print(*row(part, runs), sep="", end="")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--root", default="", help="the data set's folder")
    parser.add_argument("--out", type=Path, required=True, help="where versions and measurements go")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=HOW, help="only these")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="change every recipe")
    parser.add_argument("--table", action="store_true", help="train nothing")
    return parser.parse_args()


def old_of(part: str) -> str:
    """The first version that a part stands beside."""
    if part == "fct":
        return "side_v1"
    return "hyperbolic_v1" if part.startswith("hyperbolic") or part == "hbct" else "v1"


def independent_of(part: str) -> str:
    """The independent version that a part is measured against."""
    return "hyperbolic_independent" if old_of(part) == "hyperbolic_v1" else "independent"


def per_query(pair: str, measured: Retrieval) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """The values of one pair by "<pair> <metric>"."""
    for metric in METRICS:
        yield f"{pair} {metric}", measured.per_query(metric)[measured.valid]


def row(part: str, runs: Sequence[Run]) -> Iterator[str]:
    """One line of the table; none before the first seed is measured."""
    seeds = [(run, found) for run in runs if (found := run.results(part)) is not None]
    if not seeds:
        return
    mean = {name: np.mean([found[name] for _, found in seeds], axis=0) for name in seeds[0][1]}
    own = [run.results(independent_of(part)) or found for run, found in seeds]
    independent = float(np.mean([found["new/new cmc@1"] for found in own]))
    cells = [part, *(cell(mean, pair) for pair in PAIRS)]
    if "new/old cmc@1" in mean:
        old_old, new_old, new_new = (float(mean[f"{pair} cmc@1"].mean()) for pair in PAIRS)
        flips = np.mean([(found["old/old cmc@1"] > found["new/old cmc@1"]).mean() for _, found in seeds])
        spread = np.std([found["new/old cmc@1"].mean() for _, found in seeds], ddof=len(seeds) > 1)
        cells += [
            *(interval(paired_bootstrap(mean[f"new/old {m}"], mean[f"old/old {m}"])) for m in METRICS),
            f"{p_com(old_old, new_old, independent):.3f}",
            f"{p_up(new_new, independent):+.3f}",
            f"{flips:.1%}",
            str(len(seeds)),
            f"{spread:.3f}" if len(seeds) > 1 else "",
        ]
    else:
        cells += [""] * 7
    yield f"| {' | '.join([*cells, f'{np.mean([run.seconds(part) for run, _ in seeds]):.0f}'])} |\n"


def cell(mean: PerQuery, pair: str) -> str:
    """CMC-1 with its interval, and mAP in brackets, in percent as in the papers' tables."""
    if f"{pair} cmc@1" not in mean:
        return ""
    return f"{interval(mean_interval(mean[f'{pair} cmc@1']))} [{100 * mean[f'{pair} {MEAN_AP}'].mean():.1f}]"


def interval(score: Score) -> str:
    """In percent."""
    return f"{100 * score.value:.1f} ({100 * score.low:.1f} to {100 * score.high:.1f})"


if __name__ == "__main__":
    main()
