"""What a choice does to quality, on scikit-learn's digits over several seeds (minutes on a CPU).

    python benchmarks/digits_variants.py forms       the forms of a method that papers and codes differ in
    python benchmarks/digits_variants.py hbct        HBCT's ablations
    python benchmarks/digits_variants.py cache_old   old embeddings made once, of images that are not augmented

Seed N adds 10 N to the seed of every recipe, references included. A value is the mean over seeds; its interval is the
95 % percentile bootstrap over queries, each query's value being its mean over seeds; differences are paired. Versions
lie in --out; what is there is not trained again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from index.evaluation.metrics import MEAN_AP, mean_interval, paired_bootstrap
from index.version import Score
from training.evaluate import measure
from training.overrides import with_overrides
from training.recipes import find_recipe
from training.train import recipe_data, train
from training.trained import Trained

METRICS = ("cmc@1", MEAN_AP)
AUGMENT = "augment=shift"
ABLATIONS = {
    "HBCT": [],
    "InfoNCE in place of RINCE": ["contrast=info_nce"],
    "no entailment": ["entail=false"],
    "no entailment, InfoNCE": ["entail=false", "contrast=info_nce"],
    "entailment alone": ["contrast=none"],
    "neither (base loss)": ["entail=false", "contrast=none"],
}
FORMS: dict[str, dict[str, list[str]]] = {
    "oca": {"unit h (default)": [], "raw, the letter": ["logits=raw"]},
    "bct": {
        "class means, unit (default)": [],
        "the old head, unit": ["logits=head"],
        "raw, the letter": ["logits=raw"],
        "distill": ["influence=distill"],
        "alleviate": ["alleviate=true"],
    },
    "bt2": {"unit (default)": [], "raw": ["logits=raw"]},
    "l2": {"all, unit (default)": [], "old classes, raw, weight 1": ["over=old", "unit=false", "weight=1"]},
    "contrast": {
        "temperature 0.05": ["temperature=0.05"],
        "0.1 (default)": ["temperature=0.1"],
        "0.2": ["temperature=0.2"],
        "1, its code's": ["temperature=1"],
    },
    "advbct": {"weight 10 (default)": ["weight=10"], "weight 3": ["weight=3"], "weight 1": ["weight=1"]},
    "hot_refresh": {
        "contrast (default)": [],
        "without new negatives": ["among_new=false"],
        "triplet, hardest 1": ["form=triplet", "hardest=1"],
        "l2, weight 10": ["form=l2", "weight=10"],
    },
}
CACHED = ("l2", "lwf", "bct", "contrast", "hot_refresh", "advbct", "hoc", "hbct", "bt2")
"""Methods that look at old embeddings in every step; `bct` in its form `distill`, the only one that does."""

Values = dict[str, NDArray[np.float64]]
""" "<pair> <metric>" -> (Q,) one seed's values."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/digits-variants"))
    given = parser.parse_args()
    TABLES[given.table]([given.out / f"seed{seed}" for seed in range(given.seeds)])


def forms(folders: Sequence[Path]) -> None:
    print("| method | form | new/old CMC-1 % | sd | mAP % | new/new CMC-1 % | sd |\n|" + " --- |" * 7)
    for method, choices in FORMS.items():
        for name, settings in choices.items():
            # method= sets the method's own defaults in place of the recipe's options.
            changed = [f"method={method}", *settings] if method in {"bct", "oca"} else settings
            seeds = [values(f"digits_{method}", changed, folder) for folder in folders]
            found = ("new/old cmc@1", f"new/old {MEAN_AP}", "new/new cmc@1")
            new_old, mean_ap, new_new = (shown(seeds, pair) for pair in found)
            spread = (deviation(seeds, pair) for pair in (found[0], found[2]))
            cells = [new_old, next(spread), mean_ap, new_new, next(spread)]
            print(f"| {method} | {name} | {' | '.join(cells)} |", flush=True)


def hbct(folders: Sequence[Path]) -> None:
    print("| | new/old CMC-1 % | new/old - old/old | mAP % | new/new CMC-1 % |\n| --- | --- | --- | --- | --- |")
    for name, settings in ABLATIONS.items():
        seeds = [values("digits_hbct", settings, folder) for folder in folders]
        gain = difference(seeds, seeds, "new/old cmc@1", "old/old cmc@1")
        cells = [shown(seeds, "new/old cmc@1"), percent(gain), shown(seeds, f"new/old {MEAN_AP}")]
        print(f"| {name} | {' | '.join(cells)} | {shown(seeds, 'new/new cmc@1')} |", flush=True)


def cache_old(folders: Sequence[Path]) -> None:
    columns = ("method", "exact new/old CMC-1 %", "cached - exact", "exact new/new CMC-1 %", "cached - exact")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for method in CACHED:
        form = ["influence=distill"] if method == "bct" else []
        exact, cached = (
            [values(f"digits_{method}", [AUGMENT, f"cache_old={flag}", *form], folder) for folder in folders]
            for flag in ("false", "true")
        )
        cells = [
            cell
            for name in ("new/old cmc@1", "new/new cmc@1")
            for cell in (shown(exact, name), percent(difference(cached, exact, name, name)))
        ]
        print(f"| {method} | {' | '.join(cells)} |", flush=True)


def values(recipe_name: str, settings: Sequence[str], folder: Path) -> Values:
    """Train a recipe and what it refers to with this folder's seed, and measure it."""
    new = Trained.load(made(recipe_name, settings, folder))
    old = Trained.load(made(find_recipe(recipe_name).old, [], folder))
    report = measure(new, old, recipe_data(new.recipe))
    return {f"{pair} {m}": found.per_query(m)[found.valid] for pair, found in report.rows().items() for m in METRICS}


def made(name: str, settings: Sequence[str], folder: Path) -> Path:
    """The version of a recipe, trained unless it is there. The committed example stands for its recipe."""
    name = {"examples/v1": "digits_v1"}.get(name, name)
    out = folder / "-".join([name, *settings]).replace("=", ".")
    if not out.exists():
        recipe = find_recipe(name)
        given: Mapping[str, str] = {"old": recipe.old, "independent": recipe.independent}
        here = [f"{field}={made(reference, [], folder)}" for field, reference in given.items() if reference]
        seed = recipe.seed + 10 * int(folder.name.removeprefix("seed"))
        train(with_overrides(recipe, [*settings, *here, f"seed={seed}"]), out, progress=False)
    return out


def deviation(seeds: Sequence[Values], name: str) -> str:
    """Standard deviation over training seeds, in points."""
    return f"{100 * np.std([found[name].mean() for found in seeds], ddof=1):.1f}" if len(seeds) > 1 else ""


def shown(seeds: Sequence[Values], name: str) -> str:
    return percent(mean_interval(np.mean([found[name] for found in seeds], axis=0)))


def difference(better: Sequence[Values], worse: Sequence[Values], name: str, other: str) -> Score:
    above, below = (np.mean([x[n] for x in seeds], axis=0) for seeds, n in ((better, name), (worse, other)))
    return paired_bootstrap(above, below)


def percent(score: Score) -> str:
    value, low, high = (f"{100 * x:.1f}" for x in (score.value, score.low, score.high))
    return f"{value} [{low}, {high}]"


TABLES = {"forms": forms, "hbct": hbct, "cache_old": cache_old}

if __name__ == "__main__":
    main()
