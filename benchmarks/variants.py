"""The effect of a choice on quality, on one data set over several seeds.

    python benchmarks/variants.py forms       # the forms of a method that papers and codes differ in
    python benchmarks/variants.py hbct        # HBCT's ablations
    python benchmarks/variants.py cache_old   # old embeddings computed once, of images that are not augmented
    python benchmarks/variants.py scales      # the scale of the logits of class means
    python benchmarks/variants.py epochs      # HBCT, trained for longer
    python benchmarks/variants.py sides       # FCT's side-information
    python benchmarks/variants.py views       # the views that train SimCLR's side-information

On scikit-learn's digits (minutes on a CPU), or on another family of recipes with --family and --root. Seed N adds 10 N
to the seed of every recipe, including references. A value is the mean over seeds. Its interval is the 95 % percentile
bootstrap over queries, each query's value being its mean over seeds; differences are paired. Versions and measurements
are kept in --out and reused. --held-out measures on a tenth of the training images, on which nothing is then trained:
use it to choose. --write FILE puts the table between `<!-- table TABLE FAMILY -->` and `<!-- end -->`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from command_line import Count, Document, Root, Settings, choice_of, run_main

from index.evaluation.metrics import MEAN_AP, mean_interval, p_up, paired_bootstrap
from index.version import CARD, Score
from training.comparison.runs import COMPARED_FAMILIES, MetricValues, per_query
from training.comparison.sweep import HELD_OUT
from training.comparison.table import deviation, replace_table
from training.data.images import Data
from training.measurement import measure
from training.methods.compatible import adacos_scale
from training.overrides import with_overrides
from training.recipes import Recipe
from training.recipes.family import Family
from training.sources import load_data
from training.train import train
from training.trained import Trained
from training.validation import hold_out

ABLATIONS = {
    "HBCT": [],
    "RINCE on cosines": ["contrast=cosine"],
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
SCALE = {"bct": "scale", "oca": "scale", "bt2": "logit_scale"}
"""Methods with logits of class means, and what their scale is called."""
EPOCHS = (5, 20, 60)
SIDES: dict[str, list[str]] = {
    "none": ["side=none"],
    "SimCLR, temperature 0.5": [],
    "SimCLR, temperature 0.1": ["side_temperature=0.1"],
    "autoencoder": ["side=autoencoder"],
    "alternate old model": ["side=alternate"],
    "alternate + mixup": ["side=alternate_mixup"],
    "SimCLR, 1 bit x 16": ["side_bits=true"],
    "SimCLR, 1 bit x 64": ["side_bits=true", "side_dim=64"],
}
VIEWS: dict[str, list[str]] = {
    "the recipe's": [],
    "random parts": ["side_augment=small_crop_flip"],
    "random parts, colours": ["side_augment=small_crop_jitter"],
    "random parts, colours, 2 small parts more": ["side_augment=small_crop_jitter", "side_crops=2"],
}


@dataclass(frozen=True)
class Bench:
    """One family's versions, made when they are asked for.

    Args:
        family: of recipes.
        out: where they lie.
        seeds: how many.
        settings: changes of every recipe, field=value.
        held_out: measure on training images that are held out.
        methods: only these, in the tables that have several.
    """

    family: Family
    out: Path
    seeds: int
    settings: Sequence[str]
    held_out: bool
    methods: Sequence[str]

    def wanted(self, methods: Iterable[str]) -> list[str]:
        """Those of a table's methods that are asked for."""
        return [method for method in methods if not self.methods or method in self.methods]

    @cached_property
    def read(self) -> dict[tuple[str, str], Data]:
        """What has been read, by source."""
        return {}

    def data(self, recipe: Recipe) -> Data:
        """What a recipe trains on and is measured on."""
        key = recipe.data, recipe.root
        if key not in self.read:
            data = load_data(recipe.data, recipe.root)
            if self.held_out:
                kept, held = hold_out(data.train, HELD_OUT, recipe.split_seed)
                data = Data(kept, held, held, same=True, names=data.names)
            self.read[key] = data
        return self.read[key].split(recipe.classes, recipe.class_share, recipe.fraction, recipe.split_seed)

    def made(self, part: str, settings: Sequence[str], seed: int) -> Path:
        """A version of the family; settings `old.FIELD=VALUE` are of the version that it is compatible with."""
        recipe = self.family.recipe(part)
        own, olds = ([s for s in settings if s.startswith("old.") == of_old] for of_old in (False, True))
        out = self.out / f"seed{seed}" / "-".join([recipe.name, *settings]).replace("=", ".")
        if not (out / CARD).is_file():
            named: Mapping[str, tuple[str, list[str]]] = {
                "old": (recipe.old, [text.removeprefix("old.") for text in olds]),
                "independent": (recipe.independent, []),
            }
            here = [
                f"{field}={self.made(name.removeprefix(f'{self.family.name}_'), changed, seed)}"
                for field, (name, changed) in named.items()
                if name
            ]
            recipe = with_overrides(recipe, [*self.settings, *own, *here, f"seed={recipe.seed + 10 * seed}"])
            train(recipe, out, progress=False, data=self.data(recipe))
        return out

    def values(self, part: str, settings: Sequence[str]) -> list[MetricValues]:
        """What each seed measured beside the version that it is compatible with."""
        found = []
        for seed in range(self.seeds):
            folder = self.made(part, settings, seed)
            kept = folder.with_suffix(f"{folder.suffix}.npz")
            if not kept.is_file():
                new = Trained.load(folder)
                old = Trained.load(Path(new.recipe.old)) if new.recipe.old else None
                rows = measure(new, old, self.data(new.recipe)).rows()
                arrays: dict[str, Any] = {name: x for pair, r in rows.items() for name, x in per_query(pair, r)}
                np.savez(kept, **arrays)
            with np.load(kept) as held:
                found.append({name: held[name] for name in held.files})
        return found


def forms(bench: Bench) -> Iterator[Sequence[str]]:
    yield ("method", "form", "new/old CMC-1 %", "sd", "mAP %", "new/new CMC-1 %", "sd")
    for method in bench.wanted(FORMS):
        for name, settings in FORMS[method].items():
            yield method, name, *measured(bench.values(method, settings))


def hbct(bench: Bench) -> Iterator[Sequence[str]]:
    yield ("", "new/old CMC-1 %", "sd", "mAP %", "new/new CMC-1 %", "sd", "new/old - old/old")
    for name, settings in ABLATIONS.items():
        seeds = bench.values("hbct", settings)
        yield name, *measured(seeds), gain(seeds)


def cache_old(bench: Bench) -> Iterator[Sequence[str]]:
    columns = (cell for pair in ("new/old", "new/new") for cell in (f"exact {pair} CMC-1 %", "sd", "cached - exact"))
    yield ("method", *columns)
    for method in bench.wanted(CACHED):
        form = ["influence=distill"] if method == "bct" else []
        exact, cached = (
            bench.values(method, ["augment=shift", f"cache_old={flag}", *form]) for flag in ("false", "true")
        )
        cells = [method]
        for pair in ("new/old", "new/new"):
            name = f"{pair} cmc@1"
            difference = paired_bootstrap(mean(cached, name), mean(exact, name))
            cells += [shown(exact, name), deviation(exact, pair), percent(difference)]
        yield cells


def scales(bench: Bench) -> Iterator[Sequence[str]]:
    yield ("method", "scale", "new/old CMC-1 %", "sd", "mAP %", "new/new CMC-1 %", "sd", "new/old - old/old")
    classes = len(bench.data(with_overrides(bench.family.recipe("independent"), bench.settings)).classes)
    named = {"1 (unit)": None, f"{adacos_scale(classes):.1f} (AdaCos)": adacos_scale(classes), "32": 32.0}
    for method in bench.wanted(SCALE):
        for name, scale in named.items():
            settings = ["logits=unit"] if scale is None else ["logits=cosine", f"{SCALE[method]}={scale:.3g}"]
            seeds = bench.values(method, settings)
            yield method, name, *measured(seeds), gain(seeds)


def epochs(bench: Bench) -> Iterator[Sequence[str]]:
    yield (
        "epochs",
        "old/old CMC-1 %",
        "new/old",
        "new/new",
        "independent",
        "P_up",
        "mAP new/old",
        "new/new",
        "independent",
    )
    for count in EPOCHS:
        seeds = bench.values("hbct", [f"epochs={count}"])
        alone = bench.values("hyperbolic_independent", [f"epochs={count}"])
        up = p_up(*(float(mean(found, "new/new cmc@1").mean()) for found in (seeds, alone)))
        cells = [shown(seeds, f"{pair} cmc@1") for pair in ("old/old", "new/old", "new/new")]
        means = [shown(seeds, f"{pair} {MEAN_AP}") for pair in ("new/old", "new/new")]
        yield (
            str(count),
            *cells,
            shown(alone, "new/new cmc@1"),
            f"{up:+.3f}",
            *means,
            shown(alone, f"new/new {MEAN_AP}"),
        )


def sides(bench: Bench, settings_of: Mapping[str, Sequence[str]] = SIDES) -> Iterator[Sequence[str]]:
    yield ("side-information", "new/old CMC-1 %", "sd", "mAP %", "new/new CMC-1 %", "sd", "new/old - old/old")
    for name, settings in settings_of.items():
        seeds = bench.values("fct", [f"old.{setting}" for setting in settings])
        yield name, *measured(seeds), gain(seeds)


def measured(seeds: Sequence[MetricValues]) -> list[str]:
    """CMC-1 with its deviation over seeds and mAP of new/old, CMC-1 with its deviation of new/new."""
    new_old, new_new = ([shown(seeds, f"{pair} cmc@1"), deviation(seeds, pair)] for pair in ("new/old", "new/new"))
    return [*new_old, shown(seeds, f"new/old {MEAN_AP}"), *new_new]


def gain(seeds: Sequence[MetricValues]) -> str:
    """M(new/old) - M(old/old) on CMC-1."""
    return percent(paired_bootstrap(mean(seeds, "new/old cmc@1"), mean(seeds, "old/old cmc@1")))


def mean(seeds: Sequence[MetricValues], name: str) -> np.ndarray:
    """(Q,) each query's mean over seeds."""
    return np.asarray(np.mean([found[name] for found in seeds], axis=0))


def shown(seeds: Sequence[MetricValues], name: str) -> str:
    return percent(mean_interval(mean(seeds, name)))


def percent(score: Score) -> str:
    value, low, high = (f"{100 * x:.1f}" for x in (score.value, score.low, score.high))
    return f"{value} [{low}, {high}]"


TABLES: dict[str, Callable[[Bench], Iterator[Sequence[str]]]] = {
    "forms": forms,
    "hbct": hbct,
    "cache_old": cache_old,
    "scales": scales,
    "epochs": epochs,
    "sides": sides,
    "views": partial(sides, settings_of=VIEWS),
}


def main(
    table: Annotated[str, typer.Argument(parser=choice_of(TABLES))],
    family: Annotated[str, typer.Option(parser=choice_of(COMPARED_FAMILIES))] = "digits",
    root: Root = None,
    settings: Settings = None,
    seeds: Count = 3,
    held_out: Annotated[bool, typer.Option("--held-out", help="Measure on held-out training images.")] = False,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help="Only this, of forms, cache_old or scales; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where versions and measurements go; runs/variants-FAMILY.")] = None,
    write: Document = None,
) -> None:
    given = [*([f"root={root}"] if root else []), *(settings or [])]
    kept = out or Path("runs") / f"variants-{family}"
    bench = Bench(COMPARED_FAMILIES[family], kept, seeds, given, held_out, methods or [])
    lines: list[str] = []
    for row in TABLES[table](bench):
        lines += [f"| {' | '.join(row)} |", *([] if lines else [f"|{' --- |' * len(row)}"])]
        print("\n".join(lines) if len(lines) == 2 else lines[-1], flush=True)
    if write:
        replace_table(write, f"{table} {family}", "\n".join(lines))


if __name__ == "__main__":
    run_main(main)
